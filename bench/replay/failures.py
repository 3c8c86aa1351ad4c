"""Failures that end a replay with a message instead of a traceback."""

from __future__ import annotations

from bench.common.dtypes import DtypeError
from bench.common.model import ModelError
from bench.common.plotting import PlotError
from bench.common.server import ServerError
from bench.common.sessions import RecordingError

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
