"""The process-wide cache of plans: least recently used goes first, bounded in bytes."""

from ._longspan import clear_plan_cache as clear
from ._longspan import plan_cache_statistics as statistics
from ._longspan import set_plan_cache_limit as set_limit_bytes

__all__ = ["clear", "set_limit_bytes", "statistics"]
