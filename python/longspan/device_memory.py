"""Workspace of GPU calls outside torch: one stream-ordered pool per device, kept between calls. Calls on torch tensors
take theirs from torch's own allocator."""

from ._longspan import device_memory_statistics as statistics
from ._longspan import reset_device_memory_peak as reset_peak
from ._longspan import set_device_memory_limit as set_limit_bytes
from ._longspan import trim_device_memory as trim

__all__ = ["reset_peak", "set_limit_bytes", "statistics", "trim"]
