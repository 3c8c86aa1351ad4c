"""Failures that end a replay with a message instead of a traceback."""

from __future__ import annotations

from tiered_kv.bench.common.dtypes import DtypeError
from tiered_kv.bench.common.model import ModelError
from tiered_kv.bench.common.plotting import PlotError
from tiered_kv.bench.common.run_files import RunFileError
from tiered_kv.bench.common.service import ServerError

from .ab import HarnessError
from .measure import MeasureError

FAILURES = (
    DtypeError,
    HarnessError,
    MeasureError,
    ModelError,
    OSError,
    PlotError,
    RunFileError,
    ServerError,
    ValueError,
)
