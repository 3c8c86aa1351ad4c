"""What ends a replay with a message instead of a traceback."""

from __future__ import annotations

from bench.dtypes import DtypeError
from bench.lineage import RecordingError
from bench.model import ModelError
from bench.plotting import PlotError
from bench.replay.ab import HarnessError
from bench.replay.ledger import LedgerError
from bench.replay.measure import MeasureError
from bench.server import ServerError

FAILURES = (
    DtypeError,
    HarnessError,
    LedgerError,
    MeasureError,
    ModelError,
    OSError,
    PlotError,
    RecordingError,
    ServerError,
    ValueError,
)
