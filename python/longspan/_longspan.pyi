# Made by: python -m nanobind.stubgen -m longspan._longspan
"""The compiled half of longspan; use the package's own functions."""

from collections.abc import Sequence
from typing import Annotated

import numpy
import numpy.typing
from numpy.typing import NDArray


class BlockMask:
    """Which key blocks each block row sees. Immutable."""

    def __init__(self, mask: Annotated[NDArray[numpy.bool_], dict(order='C', device='cpu', writable=False)], block_size: int) -> None: ...

    @staticmethod
    def from_rows(block_size: int, heads: int, blocks: int, rows: Sequence[Sequence[int]]) -> BlockMask:
        """rows[head * blocks + I]: active key blocks of block row I, ascending."""

    @property
    def block_size(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def blocks(self) -> int: ...

    @property
    def active_blocks(self) -> int: ...

    @property
    def density(self) -> float:
        """Fraction of blocks kept."""

    def active(self, head: int, block_row: int, block_column: int) -> bool: ...

    def row(self, head: int, block_row: int) -> list[int]:
        """Active key blocks of a block row."""

    def column(self, head: int, block_column: int) -> list[int]:
        """Block rows that see a key block."""

    def to_dense(self) -> numpy.typing.NDArray[numpy.bool_]:
        """Booleans [heads, blocks, blocks]."""

    def indices(self) -> numpy.typing.NDArray[numpy.int64]:
        """(head, block row, block column) of every active block."""

    def __or__(self, arg: BlockMask, /) -> BlockMask: ...

    def __and__(self, arg: BlockMask, /) -> BlockMask: ...

    def __sub__(self, arg: BlockMask, /) -> BlockMask: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __str__(self) -> str: ...

    def __repr__(self) -> str: ...

    def __reduce__(self) -> tuple: ...

class BlockPattern:
    """
    A block-sparse pattern for any length: a union of terms. Immutable; unite with |.
    """

    def __init__(self, mask: BlockMask) -> None: ...

    @staticmethod
    def local_window(window: int, block_size: int = 64) -> BlockPattern: ...

    @staticmethod
    def strided(stride: int, block_size: int = 64) -> BlockPattern: ...

    @staticmethod
    def dilated_sparse(rates: Sequence[int], block_size: int = 64) -> BlockPattern: ...

    @staticmethod
    def global_local(global_tokens: int, window: int, block_size: int = 64) -> BlockPattern: ...

    @staticmethod
    def hierarchical(levels: Sequence[tuple[int, int]], block_size: int = 64) -> BlockPattern: ...

    @staticmethod
    def random(density: float, seed: int = 0, block_size: int = 64) -> BlockPattern: ...

    @staticmethod
    def adaptive(density: float, block_size: int = 64) -> BlockPattern: ...

    @staticmethod
    def bigbird(global_tokens: int, window: int, density: float, seed: int, block_size: int) -> BlockPattern: ...

    @staticmethod
    def parse(text: str) -> BlockPattern: ...

    @property
    def block_size(self) -> int: ...

    def mask(self, rows: int, heads: int = 1, causal: bool = False) -> BlockMask:
        """The mask for a length."""

    def __or__(self, arg: BlockPattern, /) -> BlockPattern: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __str__(self) -> str: ...

    def __repr__(self) -> str: ...

class Pattern:
    """What attends to what: branches of (segment, dilation). Immutable."""

    @staticmethod
    def dense() -> Pattern:
        """Every position sees every position."""

    @staticmethod
    def dilated(segments: Sequence[int], dilations: Sequence[int]) -> Pattern:
        """Dilated attention by head groups."""

    @staticmethod
    def longnet(segments: Sequence[int], dilations: Sequence[int], *, phase: str = 'paper') -> Pattern:
        """LongNet: every branch on all heads, mixed by one softmax."""

    @staticmethod
    def block_sparse(mask: BlockPattern) -> Pattern:
        """One branch over the whole sequence with a mask."""

    @staticmethod
    def parse(text: str) -> Pattern:
        """The pattern whose str() is text."""

    def with_pad_keys(self, pad_keys: bool = True) -> Pattern:
        """torchscale's zero padding attended to (not when causal)."""

    def with_long_segments(self, policy: str) -> Pattern:
        """'clip' or 'skip' segments longer than the sequence."""

    def with_output_scale(self, output_scale: float) -> Pattern: ...

    def with_mask(self, branch: int, mask: BlockPattern) -> Pattern:
        """A block mask in strand coordinates for one branch."""

    @property
    def branches(self) -> list[tuple[int | None, int]]:
        """(segment, dilation) of each branch; None is the whole sequence."""

    @property
    def assignment(self) -> str: ...

    @property
    def phase(self) -> str: ...

    @property
    def long_segments(self) -> str: ...

    @property
    def pad_keys(self) -> bool: ...

    @property
    def output_scale(self) -> float: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __str__(self) -> str: ...

    def __repr__(self) -> str: ...

    def __reduce__(self) -> tuple: ...

class Options:
    """What is fixed for an Attention: part of the plan's key."""

    def __init__(self, *, causal: bool = False, scale: float | None = None, output_scale: float | None = None, dropout: float = 0.0, deterministic: bool = False, detached_mix: bool = False, allow_tf32: bool = False, kernel: str = '') -> None: ...

    @property
    def causal(self) -> bool: ...

    @property
    def scale(self) -> float | None: ...

    @property
    def output_scale(self) -> float | None: ...

    @property
    def dropout(self) -> float: ...

    @property
    def deterministic(self) -> bool: ...

    @property
    def detached_mix(self) -> bool: ...

    @property
    def allow_tf32(self) -> bool: ...

    @property
    def kernel(self) -> str: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __repr__(self) -> str: ...

class Plan:
    """
    A pattern compiled for one problem. str() describes it in several lines.
    """

    @property
    def pattern(self) -> Pattern: ...

    @property
    def options(self) -> Options: ...

    @property
    def scale(self) -> float: ...

    @property
    def output_scale(self) -> float: ...

    @property
    def merges_branches(self) -> bool: ...

    @property
    def masks(self) -> list[BlockMask | None]:
        """
        The block mask of each branch; None where there is none, or where each call chooses it.
        """

    @property
    def totals(self) -> dict[str, float]:
        """pairs, FLOPs and bytes when queries are all positions."""

    def workspace_bytes(self, pass_: str = 'forward') -> int: ...

    def kernel(self, pass_: str = 'forward') -> str | None:
        """Name of the kernel that runs the pass, or None."""

    def verdicts(self, pass_: str = 'forward') -> list[tuple[str, bool, str]]:
        """
        (kernel, whether it can run the pass, why not) for every kernel, fastest first.
        """

    def __str__(self) -> str: ...

    def __repr__(self) -> str: ...

class Attention:
    """
    Attention over one pattern with fixed options. Share it between threads.
    """

    def __init__(self, pattern: Pattern, options: Options = ...) -> None: ...

    @property
    def pattern(self) -> Pattern: ...

    @property
    def options(self) -> Options: ...

    def forward(self, q: object, k: object, v: object, out: object, lse: object | None = None, lengths: object | None = None, key_mask: object | None = None, alibi_slopes: object | None = None, query_ranges: Sequence[tuple[int, int]] | None = None, seed: int = 0, seed_pointer: int = 0, stream: int = 0, heads_first: bool = False, allocate: object | None = None) -> None:
        """Fills out and, if given, lse."""

    def backward(self, q: object, k: object, v: object, out: object, lse: object, dout: object, dlse: object | None, dq: object, dk: object, dv: object, lengths: object | None = None, key_mask: object | None = None, alibi_slopes: object | None = None, query_ranges: Sequence[tuple[int, int]] | None = None, seed: int = 0, seed_pointer: int = 0, stream: int = 0, heads_first: bool = False, allocate: object | None = None) -> None:
        """Fills dq, dk and dv."""

    def plan(self, *, tokens: int, heads: int, head_dim: int, batch: int = 1, kv_heads: int | None = None, query_rows: int | None = None, dtype: str = 'f32', device: str = 'cpu', lengths: bool = False, key_mask: bool = False, alibi: bool = False) -> Plan:
        """The plan for a problem, from the cache."""

    def __repr__(self) -> str: ...

class TorchCalls:
    """The operator on torch tensors, without Python between."""

    def __init__(self, *, exchange: object, types: tuple, observers: tuple, autocast_enabled: object, grad_enabled: object, empty_like: object, contiguous_empty_like: object, empty_f32: object, empty_f64: object) -> None: ...

    def route(self, query: object | None, key: object | None, value: object | None) -> int:
        """A number of longspan.torch.operator.Route."""

    def forward(self, attention: Attention, query: object, key: object, value: object, with_lse: bool, lengths: object | None = None, key_mask: object | None = None, alibi_slopes: object | None = None, query_ranges: Sequence[tuple[int, int]] | None = None, seed: int = 0, seed_pointer: int = 0) -> tuple:
        """(out, lse or None)"""

    def backward(self, attention: Attention, grad_out: object, grad_lse: object | None, query: object, key: object, value: object, out: object, lse: object, lengths: object | None = None, key_mask: object | None = None, alibi_slopes: object | None = None, query_ranges: Sequence[tuple[int, int]] | None = None, seed: int = 0, seed_pointer: int = 0) -> tuple:
        """(dq, dk, dv)"""

class Shards:
    """Which positions each rank of a ring owns."""

    @staticmethod
    def contiguous(offsets: Sequence[int]) -> Shards:
        """Rank p owns offsets[p] to offsets[p + 1] - 1."""

    @staticmethod
    def even(tokens: int, ranks: int) -> Shards:
        """Contiguous, lengths differing by at most one."""

    @staticmethod
    def zigzag(tokens: int, ranks: int) -> Shards:
        """Two chunks for each rank: equal shares of causal work."""

    @property
    def ranks(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    def rows(self, rank: int) -> int: ...

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """[(start, count), ...]"""

class MessageMemory:
    """Memory of a message, while it travels."""

class NativeCommunicator:
    """One rank's end of a ring whose transport is compiled."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def failure(self) -> str:
        """Why it is unusable; empty while it is not."""

def native_communicator(communicator: object) -> NativeCommunicator:
    """
    What a communicator written in Python is to rings; all rings over it share it.
    """

def all_gather(communicator: NativeCommunicator, what: str, own: tuple[int, int], parts: Sequence[tuple[int, int]], deadline: float, device: int = -1, stream: int = 0) -> None:
    """Every rank's memory on every rank; own and parts are (address, bytes)."""

def local_ring(ranks: int) -> list[NativeCommunicator]:
    """Ranks of this process, one for each calling thread."""

def nccl_id() -> bytes:
    """
    What the ranks of one NCCL ring have in common; made by one of them and given to the others.
    """

def nccl_ring(id: bytes, rank: int, size: int, device: int, deadline: float = 60.0) -> NativeCommunicator:
    """
    This rank's end of a ring over NCCL; every rank calls it at the same time, with a GPU of its own.
    """

class RingHalo:
    """Remote rows that a forward keeps for its backward."""

    def __init__(self) -> None: ...

    @property
    def bytes(self) -> int: ...

    def clear(self) -> None: ...

class Ring:
    """One rank of a ring: attention on its own rows of the sequence."""

    def __init__(self, attention: Attention, communicator: object | None, shards: Shards, deadline: float = 60.0, halo_limit_bytes: int = 0, checksums: bool = True) -> None: ...

    def forward(self, q: object, k: object, v: object, out: object, lse: object | None = None, lengths: object | None = None, key_mask: object | None = None, alibi_slopes: object | None = None, seed: int = 0, stream: int = 0, keep: RingHalo | None = None, stop: object | None = None) -> None:
        """Fills out and, if given, lse. stop: an event that cancels it."""

    def backward(self, q: object, k: object, v: object, out: object, lse: object, dout: object, dlse: object | None, dq: object, dk: object, dv: object, lengths: object | None = None, key_mask: object | None = None, alibi_slopes: object | None = None, seed: int = 0, stream: int = 0, kept: RingHalo | None = None, stop: object | None = None) -> None:
        """Fills dq, dk and dv."""

    @property
    def rank(self) -> int: ...

    def report(self) -> dict[str, float]:
        """What the last call did."""

def attention_blocks(attention: Attention, q: object, k: object, lengths: object | None = None, key_mask: object | None = None, alibi_slopes: object | None = None, query_ranges: Sequence[tuple[int, int]] | None = None, block_size: int = 0, stream: int = 0) -> tuple:
    """
    (entry, head, block row, block column) of each block, its probabilities, the block size.
    """

def attention_received(attention: Attention, q: object, k: object, lengths: object | None = None, key_mask: object | None = None, alibi_slopes: object | None = None, query_ranges: Sequence[tuple[int, int]] | None = None, received: object | None = None, stream: int = 0) -> None:
    """
    The total weight every key receives, into float32 [batch, heads, tokens].
    """

def adaptive_mask(attention: Attention, q: object, k: object, lengths: object | None = None, key_mask: object | None = None, alibi_slopes: object | None = None, query_ranges: Sequence[tuple[int, int]] | None = None, stream: int = 0) -> BlockMask:
    """What an adaptive pattern chooses."""

def draw(plan: Plan, head: int = 0, cells: int = 48, ascii: bool = False) -> str: ...

def draw_svg(plan: Plan, head: int = 0, cells: int = 128) -> str: ...

def version() -> str: ...

def commit() -> str: ...

def num_threads() -> int:
    """Threads that one call may use."""

def set_num_threads(threads: int) -> None:
    """0 restores the default."""

def plan_cache_statistics() -> dict[str, int]: ...

def clear_plan_cache() -> None: ...

def set_plan_cache_limit(limit: int) -> None: ...

def memory_statistics() -> dict[str, int]: ...

def reset_memory_peak() -> None: ...

def trim_memory() -> None: ...

def set_memory_limit(limit: int) -> None: ...

def gpus() -> list[dict[str, object]]:
    """The GPUs of this machine."""

def why_no_gpu() -> str:
    """Why gpus() is empty; empty where it is not."""

def device_memory_statistics(device: int = 0) -> dict[str, int]: ...

def reset_device_memory_peak(device: int = 0) -> None: ...

def trim_device_memory(device: int = 0) -> None: ...

def set_device_memory_limit(device: int, limit: int) -> None: ...
