"""Projections and attention together: longspan::strand_linear and longspan::stacked_attention, with their backwards.

A head group of dilated attention reads every r-th row, so the linear layers before it compute no others: matrix products
take rows in steps as they are. And query, key and value of a row lie side by side, so that their gradients do, too: one
product instead of three for the gradient of the input, and no sums of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .._arguments import NO_DATA, SCHEMA, Settings
from .dilated import DilatedAttention
from .operator import _empty_lse, call_data, library, refuse_second_derivative, run_backward, run_forward
from .options import autocast_once, surely

# With fewer rows the host takes longer for these calls than a device for what they save.
FEWEST_ROWS = {"cpu": 4096, "cuda": 16384}
# Where they pay outside of compiled graphs, too: a GPU waits for what stands around them there.
EAGER_DEVICES = {"cpu"}

# Columns of ones after the inputs: a weight for the first of them is the bias, and its gradient comes with that of the
# others. torch would fill outputs in steps with the bias first, and sum their gradients once more. Rows should begin
# with a cache line, for the GPU's copy engine.
_ONES = {"cpu": 8, "cuda": 64}

# strands: columns, first row and step of each block of outputs, one after another. What lies between rows is not
# written, and its gradients are not read. features: the columns of x that have a gradient.
library.define("strand_linear(Tensor x, Tensor weight, int features, int[] strands) -> Tensor")
# Without weight the gradient of x is not wanted, which takes nothing else, and without x that of weight.
library.define(
    "strand_linear_backward(Tensor grad, Tensor? x, Tensor? weight, int features, int[] strands) -> (Tensor, Tensor)"
)
# stacked: [batch, tokens, heads, 3, head_dim]; or of query alone, and `keys` of key and value.
library.define(f"stacked_attention(Tensor stacked, Tensor? keys, {SCHEMA}) -> (Tensor, Tensor)")
library.define(
    "stacked_attention_backward(Tensor grad_out, Tensor stacked, Tensor? keys, Tensor out, Tensor lse, "
    f"{SCHEMA}) -> (Tensor, Tensor)"
)

_strand_linear = torch.ops.longspan.strand_linear.default
_strand_linear_backward = torch.ops.longspan.strand_linear_backward.default
_stacked_attention = torch.ops.longspan.stacked_attention.default
_stacked_attention_backward = torch.ops.longspan.stacked_attention_backward.default


def _run_linear(x: Tensor, weight: Tensor, features: int, strands: Sequence[int]) -> Tensor:
    result = _fake_linear(x, weight, features, strands)
    sizes = strands[::3]
    blocks = zip(weight.t().split_with_sizes(sizes, 1), result.split_with_sizes(sizes, 1), strands[1::3], strands[2::3])
    for part, target, row, step in blocks:
        if step == 1:
            torch.mm(x, part, out=target)
        else:
            torch.mm(x[row::step], part, out=target[row::step])
    return result


def _run_linear_backward(
    grad: Tensor, x: Tensor | None, weight: Tensor | None, features: int, strands: Sequence[int]
) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = _fake_linear_backward(grad, x, weight, features, strands)
    sizes = strands[::3]
    given = grad.split_with_sizes(sizes, 1)
    if x is not None:
        for part, made, row, step in zip(given, grad_weight.split_with_sizes(sizes), strands[1::3], strands[2::3]):
            torch.mm(part[row::step].t(), x[row::step], out=made)
    if weight is not None:
        target, begun = grad_x[:, :features], False
        grad_x[:, features:].zero_()  # never read, but uninitialised memory may look like NaN to a check of gradients
        weights = weight[:, :features].split_with_sizes(sizes)
        for i in sorted(range(len(sizes)), key=strands[2::3].__getitem__):  # first a block that has every row
            row, step = strands[3 * i + 1 : 3 * i + 3]
            if not begun and step > 1:
                target.zero_()
            if not begun and step == 1:
                torch.mm(given[i], weights[i], out=target)
            else:
                target[row::step].addmm_(given[i][row::step], weights[i])
            begun = True
    return grad_x, grad_weight


def _fake_linear(x: Tensor, weight: Tensor, features: int, strands: Sequence[int]) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _fake_linear_backward(
    grad: Tensor, x: Tensor | None, weight: Tensor | None, features: int, strands: Sequence[int]
) -> tuple[Tensor, Tensor]:
    rows, columns = grad.shape
    return (
        grad.new_empty(0 if weight is None else (rows, weight.shape[1])),
        grad.new_empty(0 if x is None else (columns, x.shape[1])),
    )


def _linear_context(ctx, inputs, output) -> None:
    x, weight, ctx.features, ctx.strands = inputs
    for_x, for_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if for_weight else None, weight if for_x else None)


def _differentiate_linear(ctx, grad):
    x, weight = ctx.saved_tensors
    grad_x, grad_weight = _strand_linear_backward(grad, x, weight, ctx.features, ctx.strands)
    return None if weight is None else grad_x, None if x is None else grad_weight, None, None


def _parts(stacked: Tensor, keys: Tensor | None) -> tuple[Tensor, ...]:
    """Query, key and value."""
    return stacked.unbind(3) if keys is None else (*stacked.unbind(3), *keys.unbind(3))


def _run_attention(stacked: Tensor, keys: Tensor | None, *settings) -> tuple[Tensor, Tensor]:
    return run_forward(*_parts(stacked, keys), *settings)


def _run_attention_backward(grad_out, stacked, keys, out, lse, *settings) -> tuple[Tensor, Tensor]:
    grads = _fake_attention_backward(grad_out, stacked, keys)
    into = _parts(grads[0], None if keys is None else grads[1])
    run_backward(grad_out, None, *_parts(stacked, keys), out, lse, *settings, into=into)
    return grads


def _fake_attention(stacked: Tensor, keys: Tensor | None, *settings) -> tuple[Tensor, Tensor]:
    query = stacked.select(3, 0)
    return stacked.new_empty(query.shape), _empty_lse(query)


def _fake_attention_backward(grad_out, stacked, keys, *rest) -> tuple[Tensor, Tensor]:
    return stacked.new_empty(stacked.shape), stacked.new_empty(0 if keys is None else keys.shape)


def _attention_context(ctx, inputs, output) -> None:
    ctx.settings, tensors = Settings(*inputs[2:]).split()
    ctx.save_for_backward(*inputs[:2], *output, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate_attention(ctx, grad_out, _):
    stacked, keys, out, lse, *tensors = ctx.saved_tensors
    nothing = (None,) * len(ctx.settings)
    if grad_out is None:
        return None, None, *nothing
    grads = _stacked_attention_backward(grad_out, stacked, keys, out, lse, *ctx.settings.joined(tensors))
    return grads[0], None if keys is None else grads[1], *nothing


for _name, _run, _fake, _differentiate, _context in (
    ("strand_linear", _run_linear, _fake_linear, _differentiate_linear, _linear_context),
    ("strand_linear_backward", _run_linear_backward, _fake_linear_backward, refuse_second_derivative, None),
    ("stacked_attention", _run_attention, _fake_attention, _differentiate_attention, _attention_context),
    ("stacked_attention_backward", _run_attention_backward, _fake_attention_backward, refuse_second_derivative, None),
):
    for _device in ("CPU", "CUDA"):
        library.impl(_name, _run, _device)
    torch.library.register_fake(f"longspan::{_name}", _fake, lib=library)
    torch.library.register_autograd(f"longspan::{_name}", _differentiate, setup_context=_context, lib=library)


def strands_of(attention: DilatedAttention, heads: int, batch: int, tokens: int) -> list[tuple[int, int, int]]:
    """(heads, first row, step) of each head group: the rows of [batch * tokens] that it reads, or all of them where they
    are not evenly apart."""
    groups = len(attention.segment_lengths)
    result = []
    for index, (segment, dilation) in enumerate(zip(attention.segment_lengths, attention.dilation_rates)):
        count = heads // groups + (1 if index < heads % groups else 0)
        even = segment % dilation == 0 or surely(segment >= tokens)
        even = even and (surely(batch == 1) or surely(tokens % dilation == 0))
        result.append((count, index % dilation, dilation) if even else (count, 0, 1))
    return result


def _stacked(parameters: Sequence[Tensor], heads: int) -> Tensor:
    """Rows of several weights, or biases, head by head."""
    return torch.stack([x.unflatten(0, (heads, -1)) for x in parameters], 1).flatten(0, 2)


def _project(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], strands: Sequence[tuple[int, int, int]],
    heads: int,
) -> Tensor:  # fmt: skip
    """[batch, tokens, features] -> [batch, tokens, heads, parts, head_dim], one part for each weight."""
    batch, tokens, features = x.shape
    weight = _stacked(weights, heads)
    rows = autocast_once(x).reshape(batch * tokens, features)
    if biases[0] is not None:
        ones = _ONES[x.device.type]
        rows = functional.pad(rows, (0, ones), value=1.0)
        weight = torch.cat([weight, _stacked(biases, heads)[:, None], weight.new_zeros(weight.shape[0], ones - 1)], 1)
    width = weight.shape[0] // heads
    flat = [number for count, row, step in strands for number in (count * width, row, step)]
    result = _strand_linear(rows, autocast_once(weight), features, flat)
    return result.view(batch, tokens, heads, len(weights), width // len(weights))


def projected_attention(
    query: Tensor, memory: Tensor, weights: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None, Tensor | None], attention: DilatedAttention, heads: int,
    is_causal: bool, key_mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """attention of linear layers of query and, for key and value, of memory; [batch, tokens, heads, head_dim]."""
    strands = strands_of(attention, heads, query.shape[0], query.shape[1])
    own = 3 if memory is query else 1
    stacked = _project(query, weights[:own], biases[:own], strands, heads)
    keys = None if own == 3 else _project(memory, weights[1:], biases[1:], strands, heads)
    dropout = attention.dropout if attention.training else 0.0
    data = NO_DATA
    if dropout or key_mask is not None:
        data = call_data(query, dropout, key_mask=key_mask)
    settings = Settings(
        attention.pattern, is_causal, attention.softmax_scale, dropout=dropout, allow_tf32=attention.allow_tf32,
        **data._asdict(),
    )  # fmt: skip
    return _stacked_attention(stacked, keys, *settings)[0]
