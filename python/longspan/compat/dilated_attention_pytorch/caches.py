"""The fork's caches and buffer pools. Longspan's own calls use none of them: plans have a cache (longspan.plan_cache),
workspace a pool. They keep what users' own code puts into them."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import plan_cache
from .configs import MemoryPoolConfig


def _moved(value: Any, device: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_moved(one, device) for one in value)
    return value.to(device) if isinstance(value, Tensor) and device is not None else value


class PatternCache:
    """Keeps the values that were used last. `max_size` None: all of them."""

    def __init__(self, max_size: int | None = None, enable_stats: bool = True) -> None:
        self.max_size = max_size
        self._cache: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.RLock()
        self.reset_stats()

    def reset_stats(self) -> None:
        self._hits = self._misses = self._evictions = 0

    def get(self, key: Any, target_device: Any = None, default: Any = None) -> Any:
        with self._lock:
            if key not in self._cache:
                self._misses += 1
                return default
            self._hits += 1
            self._cache.move_to_end(key)
            return _moved(self._cache[key], target_device)

    def put(self, key: Any, value: Any, move_to_cpu: bool = True) -> None:
        with self._lock:
            self._cache[key] = _moved(value, "cpu") if move_to_cpu else value
            self._cache.move_to_end(key)
            while self.max_size is not None and len(self._cache) > self.max_size:
                self._cache.popitem(last=False)
                self._evictions += 1

    def clear(self) -> None:
        with self._lock:
            self._cache.clear()
            self.reset_stats()

    def __len__(self) -> int:
        return len(self._cache)

    def __contains__(self, key: Any) -> bool:
        return key in self._cache

    def items(self) -> list[tuple[Any, Any]]:
        return list(self._cache.items())

    __setitem__ = put
    __getitem__ = get

    def get_stats(self) -> dict[str, Any]:
        asked = self._hits + self._misses
        return {
            "hits": self._hits, "misses": self._misses, "hit_rate": self._hits / asked if asked else 0.0,
            "evictions": self._evictions, "size": len(self._cache), "max_size": self.max_size,
        }  # fmt: skip


class DilatedPatternCache(PatternCache):
    @staticmethod
    def _make_dilated_key(*parts: Any) -> tuple[Any, ...]:
        return ("dilated", *parts)

    @staticmethod
    def _make_sparse_key(*parts: Any) -> tuple[Any, ...]:
        return ("sparse", *parts)

    def put_dilated_indices(self, indices: Tensor, seq_len: int, segment_lengths: Any, dilation_rates: Any) -> None:
        self.put(self._make_dilated_key(seq_len, tuple(segment_lengths), tuple(dilation_rates)), indices)

    def get_dilated_indices(self, seq_len: int, segment_lengths: Any, dilation_rates: Any, device: Any = None) -> Any:
        return self.get(self._make_dilated_key(seq_len, tuple(segment_lengths), tuple(dilation_rates)), device)

    def put_sparse_pattern(
        self, row_indices: Tensor, col_indices: Tensor, seq_len: int, pattern_type: str, sparsity_ratio: float,
        block_size: int | None = None,
    ) -> None:  # fmt: skip
        self.put(self._make_sparse_key(seq_len, pattern_type, sparsity_ratio, block_size), (row_indices, col_indices))

    def get_sparse_pattern(
        self, seq_len: int, pattern_type: str, sparsity_ratio: float, block_size: int | None = None, device: Any = None
    ) -> Any:
        return self.get(self._make_sparse_key(seq_len, pattern_type, sparsity_ratio, block_size), device)


class _GlobalCache(DilatedPatternCache):
    """What users put into it, and in its statistics the plans of all calls: those are the cached patterns here."""

    def reset_stats(self) -> None:
        super().reset_stats()
        self._before = plan_cache.statistics()

    def get_stats(self) -> dict[str, Any]:
        own, plans = super().get_stats(), plan_cache.statistics()
        sums = {name: own[name] + max(0, plans[name] - self._before[name]) for name in ("hits", "misses", "evictions")}
        rate = sums["hits"] / max(1, sums["hits"] + sums["misses"])
        return {**own, **sums, "hit_rate": rate, "size": own["size"] + plans["entries"]}

    def clear(self) -> None:
        plan_cache.clear()
        super().clear()


class OptimizedPatternCache(PatternCache):
    """Two tiers: values kept where they are asked for, as far as the limits go, and the rest on the CPU."""

    def __init__(
        self, max_gpu_patterns: int = 50, max_cpu_patterns: int = 500, gpu_memory_limit_mb: float = 100.0,
        enable_async: bool = True, enable_prefetch: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(max_cpu_patterns)
        self.max_gpu_patterns, self.gpu_memory_limit_mb = max_gpu_patterns, gpu_memory_limit_mb
        self._gpu_cache: OrderedDict[Any, Tensor] = OrderedDict()
        self._gpu_hits = 0

    def _gpu_megabytes(self) -> float:
        return sum(one.nbytes for one in self._gpu_cache.values()) / 2**20

    def _keep_on_gpu(self, key: Any, value: Tensor) -> None:
        self._gpu_cache[key] = value
        while self._gpu_cache and (
            len(self._gpu_cache) > self.max_gpu_patterns or self._gpu_megabytes() > self.gpu_memory_limit_mb
        ):
            self._gpu_cache.popitem(last=False)

    def get(self, key: Any, target_device: Any = None, prefetch_next: Any = None) -> Any:
        with self._lock:
            found = self._gpu_cache.get(key)
            if found is not None and (target_device is None or found.device == torch.device(target_device)):
                self._gpu_hits += 1
                return found
            result = super().get(key, target_device)
            if isinstance(result, Tensor) and result.is_cuda:
                self._keep_on_gpu(key, result)
            return result

    def put(self, key: Any, value: Tensor, store_on_gpu: bool = False) -> None:
        with self._lock:
            super().put(key, value)
            if store_on_gpu and value.is_cuda:
                self._keep_on_gpu(key, value)

    def get_batch(self, keys: list[Any], target_device: Any = None) -> dict[Any, Any]:
        return {key: self.get(key, target_device) for key in keys}

    def pin_pattern(self, key: Any, device: Any) -> bool:
        return self.get(key, device) is not None

    def clear(self) -> None:
        super().clear()
        self._gpu_cache.clear()
        self._gpu_hits = 0

    def get_stats(self) -> dict[str, Any]:
        return {
            "gpu_hits": self._gpu_hits, "cpu_hits": self._hits, "misses": self._misses,
            "gpu_cache_size": len(self._gpu_cache), "cpu_cache_size": len(self._cache),
            "gpu_memory_used_mb": self._gpu_megabytes(),
        }  # fmt: skip


class PersistentPatternCache(PatternCache):
    """Row and column indices by key and device, made by `generator_fn` where they are missing."""

    def __init__(self, max_size: int = 100) -> None:
        super().__init__(max_size)

    def get(self, key: Any, device: Any, generator_fn: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        found = super().get((key, str(device)), device)
        if found is None and generator_fn is not None:
            found = _moved(generator_fn(), device)
            self.put((key, str(device)), found, move_to_cpu=False)
        return found

    def get_stats(self) -> dict[str, Any]:
        stats = super().get_stats()
        return {"total_patterns": stats["size"], "total_accesses": stats["hits"] + stats["misses"],
                "hit_rate": stats["hit_rate"]}  # fmt: skip


class MemoryPool:
    """Buffers that were returned, at most `max_size` in all, by shape, type and device."""

    def __init__(self, max_size: int = 10) -> None:
        self.max_size = max_size
        self._free: dict[Any, list[Tensor]] = {}
        self._lock = threading.Lock()
        self._allocations = self._reuses = 0

    def get_buffer(self, shape: Any, dtype: torch.dtype, device: Any) -> Tensor:
        with self._lock:
            free = self._free.get((tuple(shape), dtype, torch.device(device)))
            if free:
                self._reuses += 1
                return free.pop()
            self._allocations += 1
        return torch.empty(shape, dtype=dtype, device=device)

    def return_buffer(self, buffer: Tensor) -> None:
        with self._lock:
            if sum(map(len, self._free.values())) < self.max_size:
                self._free.setdefault((tuple(buffer.shape), buffer.dtype, buffer.device), []).append(buffer)

    def clear(self) -> None:
        with self._lock:
            self._free.clear()

    def get_stats(self) -> dict[str, Any]:
        asked = self._allocations + self._reuses
        return {
            "allocations": self._allocations, "reuses": self._reuses,
            "reuse_rate": self._reuses / asked if asked else 0.0, "pooled_buffers": sum(map(len, self._free.values())),
        }  # fmt: skip


class UnifiedMemoryPool:
    """One buffer for each shape, type, device and pool; get_buffer gives the same one again. Beyond the configured
    megabytes the buffers that were used longest ago are dropped."""

    TYPES = ("default", "ring", "sparse", "distributed")

    def __init__(self, config: MemoryPoolConfig | None = None) -> None:
        self.config = config or MemoryPoolConfig()
        self._pools: dict[str, OrderedDict[Any, Tensor]] = {name: OrderedDict() for name in self.TYPES}
        self._lock = threading.RLock()

    def get_buffer(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: Any = None, pinned: bool = False,
        pool_type: str = "default",
    ) -> Tensor:  # fmt: skip
        pool = self._pools.get(pool_type, self._pools["default"])
        key = (tuple(shape), dtype, None if device is None else torch.device(device), pinned)
        with self._lock:
            if key in pool:
                pool.move_to_end(key)
                return pool[key]
            try:
                made = torch.empty(shape, dtype=dtype, device=device)
            except torch.OutOfMemoryError:
                self.clear_pool()
                made = torch.empty(shape, dtype=dtype, device=device)
            pool[key] = made.pin_memory() if pinned and not made.is_cuda and torch.cuda.is_available() else made
            while len(pool) > 1 and self._megabytes(pool) > self.config.max_pool_size_mb:
                pool.popitem(last=False)
            return pool[key]

    @staticmethod
    def _megabytes(pool: OrderedDict[Any, Tensor]) -> float:
        return sum(math.prod(key[0]) * key[1].itemsize for key in pool) / 2**20

    def clear_pool(self, pool_type: str | None = None) -> None:
        with self._lock:
            for name in self.TYPES if pool_type is None else (pool_type,):
                self._pools[name].clear()

    def get_stats(self) -> dict[str, Any]:
        sizes = {name: len(pool) for name, pool in self._pools.items()}
        memory = {name: self._megabytes(pool) * 2**20 for name, pool in self._pools.items()}
        return {
            "total_buffers": sum(sizes.values()), "pool_sizes": sizes, "hot_cache_size": 0,
            "memory_by_pool": memory, "total_memory": sum(memory.values()), "total_allocated_bytes": sum(memory.values()),
        }  # fmt: skip


class _Global:
    """One object of a class, made when it is first asked for."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        self._kind, self._one, self._lock = kind, None, threading.Lock()

    def get(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self._one is None:
                self._one = self._kind(*args, **kwargs)
            return self._one

    def reset(self) -> None:
        self._one = None

    def clear(self) -> None:
        if self._one is not None:
            self._one.clear()


_memory_pool, _pattern_cache, _optimized_cache = _Global(UnifiedMemoryPool), _Global(_GlobalCache), _Global(OptimizedPatternCache)
get_global_memory_pool, reset_global_memory_pool = _memory_pool.get, _memory_pool.reset
get_global_pattern_cache, clear_global_cache = _pattern_cache.get, _pattern_cache.clear
get_optimized_pattern_cache, clear_optimized_cache = _optimized_cache.get, _optimized_cache.clear
