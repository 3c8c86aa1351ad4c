"""Failures that end a replay with a message instead of a traceback."""

from __future__ import annotations

from tiered_kv.bench.agents.plotting import PlotError
from tiered_kv.bench.agents.run_files import RunFileError
from tiered_kv.bench.servers.dtypes import DtypeError
from tiered_kv.bench.servers.model import ModelError
from tiered_kv.bench.servers.service import ServerError

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
