"""What ends a replay with a message instead of a traceback."""

from __future__ import annotations

from bench.dtypes import DtypeError
from bench.lineage import RecordingError
from bench.model import ModelError
from bench.plotting import PlotError
from bench.server import ServerError

from .ab import HarnessError
from .ledger import LedgerError
from .measure import MeasureError

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
