#!/usr/bin/env python3
"""How errors grow with the length of a strand: relative errors of norms against float64, on a CPU or a GPU.

Two problems per length. Rows over all keys: some query rows of dense attention, of which out and dq are sums over the
whole sequence. Keys under all rows: block attention with one block that every row sees, whose dk and dv are such sums.
Inputs have means apart from 0, so that sums do not cancel and lost terms show.

    python bench/errors_by_length.py --json bench/results/cpu_errors_by_length.json
    python bench/errors_by_length.py --device cuda --json bench/results/h200_errors_by_length.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import longspan
import longspan.torch as lt
from longspan.bench.timing import machine, without_folders

import torch
from torch import Tensor

BLOCK, CHUNK = 128, 65_536
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def inputs(rows: int, keys: int, head_dim: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """query, key, value and the gradient of the output, of one head."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(count: int) -> Tensor:
        return torch.randn(1, count, 1, head_dim, generator=generator, device=device)

    query, key, grad = 0.8 * draw(rows) + 1, 0.8 * draw(keys), 0.8 * draw(rows) + 1
    return [tensor.to(dtype) for tensor in (query, key, key + 0.25 * draw(keys) + 1, grad)]


def gradients(attend, tensors: list[Tensor]) -> dict[str, Tensor]:
    """Results of one head, by rows."""
    *operands, grad = tensors
    operands = [operand.detach().requires_grad_() for operand in operands]
    out = attend(*operands)
    out.backward(grad)
    return {name: tensor.detach()[0, :, 0] for name, tensor in zip(("out", "dq", "dk", "dv"), (out, *(o.grad for o in operands)))}


def chunks(count: int, size: int = CHUNK):
    return (slice(first, min(first + size, count)) for first in range(0, count, size))


def expected_over_keys(tensors: list[Tensor]) -> dict[str, Tensor]:
    """out and dq of rows that see all keys, in float64."""
    query, key, value, grad = (tensor[0, :, 0] for tensor in tensors)
    query, grad = query.double(), grad.double()
    scale = query.shape[1] ** -0.5
    parts = list(chunks(len(key)))
    scores = torch.cat([scale * query @ key[part].double().T for part in parts], 1)
    weights = scores.softmax(1)
    out = sum(weights[:, part] @ value[part].double() for part in parts)
    delta = (grad * out).sum(1, keepdim=True)
    dq = sum((weights[:, part] * (grad @ value[part].double().T - delta)) @ key[part].double() for part in parts)
    return {"out": out, "dq": scale * dq}


def expected_under_rows(tensors: list[Tensor]) -> dict[str, Tensor]:
    """dk and dv of the block that every row sees, in float64. Its own rows see everything, others that and their own."""
    query, key, value, grad = (tensor[0, :, 0] for tensor in tensors)
    tokens, head_dim = query.shape
    scale = head_dim**-0.5
    first_key, first_value = key[:BLOCK].double(), value[:BLOCK].double()
    dk, dv = torch.zeros_like(first_key), torch.zeros_like(first_key)

    def add(rows: slice, weights: Tensor, delta: Tensor) -> None:
        nonlocal dk, dv
        rows_of_grad = grad[rows].double()
        dv += weights.T @ rows_of_grad
        dk += scale * (weights * (rows_of_grad @ first_value.T - delta)).T @ query[rows].double()

    whole = slice(0, BLOCK)
    scores = torch.cat([scale * query[whole].double() @ key[part].double().T for part in chunks(tokens)], 1)
    lse = scores.logsumexp(1, keepdim=True)
    delta = sum(
        ((scores[:, part] - lse).exp() * (grad[whole].double() @ value[part].double().T)).sum(1, keepdim=True)
        for part in chunks(tokens)
    )
    add(whole, (scores[:, whole] - lse).exp(), delta)
    for rows in chunks(tokens - BLOCK):
        rows = slice(rows.start + BLOCK, rows.stop + BLOCK)
        own = [tensor[rows].double().view(-1, BLOCK, head_dim) for tensor in (query, key, value, grad)]
        scores = torch.cat([own[0] @ first_key.T, own[0] @ own[1].mT], 2) * scale
        weights = scores.softmax(2)
        dweights = torch.cat([own[3] @ first_value.T, own[3] @ own[2].mT], 2)
        delta = (weights * dweights).sum(2).view(-1, 1)
        add(rows, weights[:, :, :BLOCK].reshape(-1, BLOCK), delta)
    return {"dk": dk, "dv": dv}


def errors(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float | None]:
    """By quantity; None where a result is beyond what its type holds."""

    def error(name: str, want: Tensor) -> float | None:
        if want.abs().max() > torch.finfo(got[name].dtype).max:
            return None
        return float(f"{((got[name][: len(want)].double() - want).norm() / want.norm()).item():.3g}")

    return {name: error(name, want) for name, want in expected.items()}


def told(errors_of_one: dict[str, float | None]) -> str:
    return "  ".join(f"{name} {'too large' if e is None else f'{e:.1e}'}" for name, e in errors_of_one.items())


def measure(tokens: int, rows: int, head_dim: int, dtype: torch.dtype, device: str, kernel: str | None) -> dict[str, object]:
    tensors = inputs(rows, tokens, head_dim, dtype, device)
    expected = expected_over_keys(tensors)
    ranges = [(tokens - rows, rows)]
    ours = gradients(lambda *qkv: lt.attention(*qkv, query_ranges=ranges, kernel=kernel), tensors)
    found = errors(ours, expected)

    def theirs(*qkv: Tensor) -> Tensor:
        heads_first = [tensor.transpose(1, 2) for tensor in qkv]
        return torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)

    torch_errors = errors(gradients(theirs, tensors), expected)
    del ours, expected
    tensors = inputs(tokens, tokens, head_dim, dtype, device)
    pattern = longspan.global_local(BLOCK, 0, BLOCK)
    ours = gradients(lambda *qkv: lt.attention(*qkv, pattern, kernel=kernel), tensors)
    return {"longspan": {**found, **errors(ours, expected_under_rows(tensors))}, "torch": torch_errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1 << power for power in range(14, 23, 2)])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rows", type=int, default=32, help="query rows that see all keys (default: 32)")
    parser.add_argument("--kernel", help="force a kernel by name")
    parser.add_argument("--json", type=Path, help="write everything here")
    arguments = parser.parse_args()
    report = {
        **machine(),
        "command": " ".join(["python bench/errors_by_length.py", *without_folders(sys.argv[1:])]),
        "head_dim": arguments.head_dim,
        "rows": [],
    }
    for tokens in arguments.lengths:
        for name in arguments.dtypes:
            found = measure(
                tokens, arguments.rows, arguments.head_dim, DTYPES[name], arguments.device, arguments.kernel
            )
            report["rows"].append({"dtype": name, "tokens": tokens, "errors": found})
            for who, values in found.items():
                print(f"{name:9} {tokens:>9,} tokens, {who:9} {told(values)}", flush=True)
            if arguments.json:  # what there is so far, should the longest not fit
                arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
