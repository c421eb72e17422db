"""Activation and layer norm in one pass over memory on a GPU: longspan::relu_norm and its backward, as Triton kernels.

Between the linear layers of a feed-forward block torch reads and writes the widest tensors of a model once for the
activation, once for its norm, and in the backward pass three times more. Here a row is read once and written once; the
gradients of weight and bias are summed over rows on the way.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional

from .operator import library, refuse_second_derivative
from .options import PLAIN_TENSORS, hooked, surely

try:
    import triton
    import triton.language as tl
except ImportError:  # torch without CUDA may come without it
    triton = None

# A row is held in registers; and with fewer rows the host takes longer for the call than a GPU for what it saves.
_WIDEST, FEWEST_ROWS = 8192, 4096
_DEVICES, _DTYPES = ("cuda",), (torch.bfloat16, torch.float16)
_PROGRAMS_PER_PROCESSOR = 2

# -> out, and mean and 1 / deviation of each row.
library.define("relu_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)")
# -> gradients of x, weight and bias.
library.define(
    "relu_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor scale) -> (Tensor, Tensor, Tensor)"
)
_relu_norm = torch.ops.longspan.relu_norm.default
_relu_norm_backward = torch.ops.longspan.relu_norm_backward.default

if triton is not None:

    @triton.jit
    def _forward_kernel(x, weight, bias, out, mean, scale, width, eps, BLOCK: tl.constexpr):
        """One row: x, out [rows, width]; weight and bias stay in the cache."""
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < width
        value = tl.load(x + row * width + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        value = tl.where(value < 0.0, 0.0, value)  # a NaN stays one
        middle = tl.sum(value, 0) / width
        centred = tl.where(inside, value - middle, 0.0)
        factor = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
        weights = tl.load(weight + column, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        biases = tl.load(bias + column, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        result = centred * factor * weights + biases
        tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)
        tl.store(mean + row, middle)
        tl.store(scale + row, factor)

    @triton.jit
    def _backward_kernel(grad, x, weight, mean, scale, grad_x, sums, rows, width, BLOCK: tl.constexpr):
        """Every programs-th row, the next one on its way meanwhile; sums [2, programs, width] of what weight and bias get."""
        program, programs = tl.program_id(0), tl.num_programs(0)
        column = tl.arange(0, BLOCK)
        inside = column < width
        for_weight = tl.zeros([BLOCK], tl.float32)
        for_bias = tl.zeros([BLOCK], tl.float32)
        at = program.to(tl.int64) * width + column
        step, end = programs.to(tl.int64) * width, tl.cast(rows, tl.int64) * width
        next_grad = tl.load(grad + at, mask=inside, other=0.0)
        next_x = tl.load(x + at, mask=inside, other=0.0)
        for row in range(program, rows, programs):
            given, value = next_grad.to(tl.float32), next_x.to(tl.float32)
            following = at + step
            wanted = inside & (following < end)
            next_grad = tl.load(grad + following, mask=wanted, other=0.0)
            next_x = tl.load(x + following, mask=wanted, other=0.0)
            middle, factor = tl.load(mean + row), tl.load(scale + row)
            normed = (tl.where(value < 0.0, 0.0, value) - middle) * factor
            # From the cache each time: in registers there would be room for one program less.
            weights = tl.load(weight + column, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            weighted = given * weights
            along = tl.sum(weighted * normed, 0) / width
            level = tl.sum(weighted, 0) / width
            result = tl.where(value <= 0.0, 0.0, (weighted - normed * along - level) * factor)
            tl.store(grad_x + at, result.to(grad_x.dtype.element_ty), mask=inside)
            for_weight += given * normed
            for_bias += given
            at = following
        tl.store(sums + program * width + column, for_weight, mask=inside)
        tl.store(sums + (programs + program) * width + column, for_bias, mask=inside)


@functools.lru_cache
def _programs(device: torch.device) -> int:
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def _launch(kernel, programs: int, per_thread: int, width: int, *arguments) -> None:
    block = triton.next_power_of_2(width)
    kernel[(programs,)](*arguments, BLOCK=block, num_warps=max(1, min(16, block // (32 * per_thread))))


def _run_fused(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    out, mean, scale = _fake(x, weight, bias, eps)
    width = x.shape[-1]
    if mean.numel():
        with torch.cuda.device_of(x):
            _launch(_forward_kernel, mean.numel(), 32, width, x, weight, bias, out, mean, scale, width, eps)
    return out, mean, scale


def _run_fused_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, programs: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    grad, x, (rows, width) = grad.contiguous(), x.contiguous(), (mean.numel(), x.shape[-1])
    grad_x = torch.empty_like(x)
    programs = min(rows, _programs(x.device) if programs is None else programs)
    sums = torch.empty((2, programs, width), dtype=torch.float32, device=x.device)
    if programs:
        with torch.cuda.device_of(x):
            _launch(_backward_kernel, programs, 16, width, grad, x, weight, mean, scale, grad_x, sums, rows, width)
    return grad_x, *sums.sum(1).to(weight.dtype)


def _run_plain(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    out, mean, scale = torch.native_layer_norm(x.float().relu(), x.shape[-1:], weight.float(), bias.float(), eps)
    return out.to(x.dtype), mean.squeeze(-1), scale.squeeze(-1)


def _run_plain_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    wide, shape, weights = x.float(), x.shape[-1:], weight.float()
    grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
        grad.float(), wide.relu(), shape, mean.unsqueeze(-1), scale.unsqueeze(-1), weights, weights, [True] * 3
    )
    grad_x = torch.where(wide <= 0, 0.0, grad_x)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)


def _fake(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    sums = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    return torch.empty_like(x, memory_format=torch.contiguous_format), *sums


def _fake_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight), torch.empty_like(weight)


def _context(ctx, inputs, output) -> None:
    x, weight, _, _ = inputs
    ctx.save_for_backward(x, weight, *output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, *_):
    if grad is None:
        return None, None, None, None
    return *_relu_norm_backward(grad, *ctx.saved_tensors), None


for _name, _fused, _plain, _made, _derivative, _kept in (
    ("relu_norm", _run_fused, _run_plain, _fake, _differentiate, _context),
    ("relu_norm_backward", _run_fused_backward, _run_plain_backward, _fake_backward, refuse_second_derivative, None),
):
    library.impl(_name, _plain, "CPU")
    library.impl(_name, _plain if triton is None else _fused, "CUDA")
    torch.library.register_fake(f"longspan::{_name}", _made, lib=library)
    torch.library.register_autograd(f"longspan::{_name}", _derivative, setup_context=_kept, lib=library)


def can_fuse(norm: nn.Module, activation: object, x: Tensor) -> bool:
    """Whether relu_norm is for them: 16 bits on a GPU in a norm of torch's own with weight and bias, which nobody watches."""
    return (
        triton is not None and x.device.type in _DEVICES and x.dtype in _DTYPES and activation is functional.relu
        and type(norm) is nn.LayerNorm and type(norm.weight) in PLAIN_TENSORS and type(norm.bias) in PLAIN_TENSORS
        and not hooked(norm) and len(norm.normalized_shape) == 1 and norm.normalized_shape[0] == x.shape[-1] <= _WIDEST
        and surely(x.shape[:-1].numel() >= FEWEST_ROWS)
    )  # fmt: skip


def relu_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """norm(relu(x)) in x's type, with sums, weight and bias in 32 bits."""
    return _relu_norm(x, norm.weight, norm.bias, norm.eps)[0]
