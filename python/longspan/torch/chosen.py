"""Attention over blocks that a call has chosen, as operators: longspan::choose_blocks and longspan::blocks_attention. Blocks
are a boolean tensor [batch * heads, blocks, blocks], so that graphs hold them; kernels read them as a block mask, which is
made on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._arguments import SCHEMA, Settings
from .._errors import Unsupported
from .._inspect import adaptive_mask
from .._longspan import BlockMask, BlockPattern, Pattern
from .._patterns import cached
from .operator import _arguments, _calls, _empty_like, _empty_lse, call_data, library, refuse_second_derivative
from .options import autocast_once

library.define(
    "choose_blocks(Tensor query, Tensor key, Tensor? key_mask, float density, int block_size, bool causal) -> Tensor"
)
library.define(
    f"blocks_attention(Tensor query, Tensor key, Tensor value, Tensor blocks, int block_size, {SCHEMA}) -> (Tensor, Tensor)"
)
library.define(
    "blocks_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor "
    f"blocks, int block_size, {SCHEMA}) -> (Tensor, Tensor, Tensor)"
)
_choose = torch.ops.longspan.choose_blocks.default
_forward = torch.ops.longspan.blocks_attention.default
_backward = torch.ops.longspan.blocks_attention_backward.default


def _refuse_capture(tensor: Tensor) -> None:
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            "blocks chosen by a call cannot be captured in a CUDA graph: their mask is made on the host; capture "
            "BlockSparseAdaptive without learned and share_across_heads, which the kernels choose themselves"
        )


def pattern_of(blocks: Tensor, block_size: int) -> Pattern:
    _refuse_capture(blocks)
    return Pattern.block_sparse(BlockMask(blocks.cpu().numpy(), block_size))


def _run_choose(
    query: Tensor, key: Tensor, key_mask: Tensor | None, density: float, block_size: int, causal: bool
) -> Tensor:
    _refuse_capture(query)
    pattern = Pattern.block_sparse(BlockPattern.adaptive(density, block_size))
    mask = adaptive_mask(query.detach(), key.detach(), pattern, causal=causal, key_mask=key_mask)
    return torch.from_numpy(mask.to_dense()).to(query.device)


def _fake_choose(query, key, key_mask, density, block_size, causal):
    blocks = (key.shape[1] + block_size - 1) // block_size
    return query.new_empty((query.shape[0] * query.shape[2], blocks, blocks), dtype=torch.bool)


def _operator(blocks: Tensor, block_size: int, settings: Settings) -> Any:
    # Not cached: a mask is the data of one call.
    return cached.__wrapped__(pattern_of(blocks, block_size), **settings.options)


def _run_forward(query, key, value, blocks, block_size, *rest):
    settings = Settings(*rest)
    operator = _operator(blocks, block_size, settings)
    return _calls.forward(operator, query, key, value, True, *_arguments(query, settings.data))


def _run_backward(grad_out, query, key, value, out, lse, blocks, block_size, *rest):
    settings = Settings(*rest)
    operator = _operator(blocks, block_size, settings)
    return _calls.backward(operator, grad_out, None, query, key, value, out, lse, *_arguments(query, settings.data))


def _fake_forward(query, *rest):
    return _empty_like(query), _empty_lse(query)


def _fake_backward(grad_out, query, key, value, *rest):
    return _empty_like(query), _empty_like(key), _empty_like(value)


def _context(ctx, inputs, output) -> None:
    ctx.block_size = inputs[4]
    ctx.settings, tensors = Settings(*inputs[5:]).split()
    ctx.save_for_backward(*inputs[:4], *output, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_out, _):
    query, key, value, blocks, out, lse, *tensors = ctx.saved_tensors
    nothing = (None,) * (2 + len(ctx.settings))
    if grad_out is None:
        return None, None, None, *nothing
    settings = ctx.settings.joined(tensors)
    return *_backward(grad_out, query, key, value, out, lse, blocks, ctx.block_size, *settings), *nothing


for _device in ("CPU", "CUDA"):
    library.impl("choose_blocks", _run_choose, _device)
    library.impl("blocks_attention", _run_forward, _device)
    library.impl("blocks_attention_backward", _run_backward, _device)
torch.library.register_fake("longspan::choose_blocks", _fake_choose, lib=library)
torch.library.register_fake("longspan::blocks_attention", _fake_forward, lib=library)
torch.library.register_fake("longspan::blocks_attention_backward", _fake_backward, lib=library)
torch.library.register_autograd("longspan::blocks_attention", _differentiate, setup_context=_context, lib=library)
torch.library.register_autograd("longspan::blocks_attention_backward", refuse_second_derivative, lib=library)


def choose_blocks(
    query: Tensor, key: Tensor, mask: Tensor | None, density: float, block_size: int, causal: bool, shared: bool
) -> Tensor:
    """Those of BlockPattern.adaptive; shared: the same for all heads."""
    batch, _, heads, _ = query.shape
    query, key = query.detach(), key.detach()
    if not shared:
        return _choose(query, key, mask, density, block_size, causal)
    # The product of heads laid end to end is the sum over heads, which ranks like their mean.
    key = key.repeat_interleave(heads // key.shape[2], dim=2)
    one = _choose(query.flatten(2)[:, :, None], key.flatten(2)[:, :, None], mask, density, block_size, causal)
    return one.repeat_interleave(heads, dim=0)


def blocks_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: Tensor, block_size: int, causal: bool, scale: float | None,
    dropout: float, key_mask: Tensor | None,
) -> Tensor:  # fmt: skip
    query, key, value = map(autocast_once, (query, key, value))
    data = call_data(query, dropout, key_mask=key_mask)
    settings = Settings("", causal, scale, dropout=dropout, **data._asdict())
    return _forward(query, key, value, blocks, block_size, *settings)[0]
