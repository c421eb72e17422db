"""Workspace of CPU calls: kept between calls, so that the steady state allocates nothing."""

from ._longspan import memory_statistics as statistics
from ._longspan import reset_memory_peak as reset_peak
from ._longspan import set_memory_limit as set_limit_bytes
from ._longspan import trim_memory as trim

__all__ = ["reset_peak", "set_limit_bytes", "statistics", "trim"]
