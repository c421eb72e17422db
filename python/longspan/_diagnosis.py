"""What is wrong with the arrays of a call, in the caller's words. Looked for once a call was refused, so that calls that
run pay nothing: the compiled library knows views in an order of its own, and the first mismatch, not the culprit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ._errors import InvalidArgument, renamed
from ._named import shown

# The argument of each role, as the functions of longspan and of longspan.torch call it.
_ROLES = {
    "q": ("q", "query"), "k": ("k", "key"), "v": ("v", "value"), "out": ("out",), "lse": ("lse",),
    "dout": ("dout", "grad_out"), "dlse": ("dlse", "grad_lse"), "dq": ("dq",), "dk": ("dk",), "dv": ("dv",),
    "lengths": ("lengths",), "key_mask": ("key_mask",), "alibi_slopes": ("alibi_slopes",),
}  # fmt: skip
_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64", "i32": "int32", "i64": "int64"}
_FLOATS = ("float32", "bfloat16", "float16", "float64")


def _dtype(array: Any) -> str:
    return str(getattr(array, "dtype", "")).rpartition(".")[2]


def only_dlpack(array: Any) -> bool:
    """Whether an array tells its shape by DLPack alone, which the library reads."""
    return hasattr(array, "__dlpack__") and not hasattr(array, "shape") and not isinstance(array, type)


class _Call:
    """The arrays of a call by role, each with the caller's name for it."""

    def __init__(self, arrays: Mapping[str, Any], heads_first: bool, required: Sequence[str]) -> None:
        self.names, self.arrays = {}, {}
        for role, spellings in _ROLES.items():
            name = next((one for one in spellings if one in arrays), spellings[0])
            self.names[role] = name
            if arrays.get(name) is not None or role in "qkv" and name in arrays or name in required:
                self.arrays[role] = arrays[name]
        self.heads_first = heads_first

    def error(self, role: str, text: str) -> InvalidArgument:
        return InvalidArgument(f"{self.names[role]} {text}", self.names[role])

    def sizes(self, role: str) -> tuple[int, ...]:
        """(batch, tokens, heads, head_dim)"""
        shape = tuple(self.arrays[role].shape)
        return (shape[0], shape[2], shape[1], shape[3]) if self.heads_first else shape

    def _odd_one(self, values: Mapping[str, Any]) -> str:
        """Of q, k and v that do not agree, the one to name: that which is alone, or k."""
        for role in ("k", "v", "q"):
            others = [value for other, value in values.items() if other != role]
            if len(others) == 2 and others[0] == others[1] != values[role]:
                return role
        return "k"

    def _compared(self, what: str, values: Mapping[str, Any], fix: str) -> Iterator[InvalidArgument]:
        if len(set(map(str, values.values()))) <= 1:
            return
        odd = self._odd_one(values)
        others = [role for role in values if role != odd and values[role] != values[odd]]
        listed = " and ".join(self.names[role] for role in others)
        has = "have" if len(others) > 1 else "has"
        yield self.error(odd, f"has {what} {values[odd]}, {listed} {has} {values[others[0]]}: {fix}")

    def _main(self) -> Iterator[InvalidArgument]:
        layout = "[batch, heads, tokens, head_dim]" if self.heads_first else "[batch, tokens, heads, head_dim]"
        for role in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"):
            if role not in self.arrays:
                continue
            array = self.arrays[role]
            shape = getattr(array, "shape", None)
            if isinstance(array, type) or shape is None or not hasattr(array, "dtype"):
                yield self.error(role, f"is {shown(array)}: give an array {layout}")
                return
            if len(shape) != 4:
                yield self.error(role, f"has shape {list(shape)}: give {layout}")
                return
            if _dtype(array) not in _FLOATS:
                yield self.error(role, f"has dtype {_dtype(array)}: give float32, bfloat16, float16 or float64")
            device = str(getattr(array, "device", "cpu")).partition(":")[0]
            if device in ("meta", "mps", "xpu"):
                yield self.error(role, f"is on {device}: give arrays on cpu or cuda")
        three = [role for role in "qkv" if role in self.arrays]
        yield from self._compared("dtype", {role: _dtype(self.arrays[role]) for role in three}, "give all the same type")
        devices = {role: str(getattr(self.arrays[role], "device", "cpu")) for role in three}
        yield from self._compared("device", devices, "move them to one device")
        if "v" in three and self.arrays["k"].shape != self.arrays["v"].shape:
            shapes = {role: list(self.arrays[role].shape) for role in three}
            role = "k" if shapes["v"] == shapes["q"] else "v"
            other = "v" if role == "k" else "k"
            text = f"has shape {shapes[role]}, {self.names[other]} has {shapes[other]}: they must be equal"
            yield self.error(role, text)
        batch, _, heads, head_dim = self.sizes("q")
        k_batch, _, k_heads, k_dim = self.sizes("k")
        if k_batch != batch:
            yield self.error("k", f"has batch {k_batch}, {self.names['q']} has {batch}: they must be equal")
        if k_dim != head_dim:
            yield self.error("k", f"has head_dim {k_dim}, {self.names['q']} has {head_dim}: they must be equal")
        if k_heads < 1 or heads % k_heads:
            yield self.error(
                "k", f"has {k_heads} heads, {self.names['q']} has {heads}: give a number of heads that divides {heads}"
            )
        for role, like in (("out", "q"), ("dout", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
            if role in self.arrays:
                yield from self._like(role, list(self.arrays[like].shape), self.names[like], [_dtype(self.arrays["q"])])

    def _like(self, role: str, shape: list[int], meaning: str, dtypes: list[str]) -> Iterator[InvalidArgument]:
        array = self.arrays[role]
        if isinstance(array, (list, tuple)):
            if len(shape) == 1 and len(array) != shape[0]:
                yield self.error(role, f"has {len(array)} entries: give {shape[0]}, one for each of {meaning}")
            return
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            yield self.error(role, f"is {shown(array)}: give an array {shape}")
            return
        if list(array.shape) != shape:
            yield self.error(role, f"has shape {list(array.shape)}: give {shape} ({meaning})")
        if _dtype(array) not in dtypes:
            yield self.error(role, f"has dtype {_dtype(array)}: give {' or '.join(dtypes)}")

    def faults(self) -> Iterator[InvalidArgument]:
        yield from self._main()
        batch, rows, heads, _ = self.sizes("q")
        tokens = self.sizes("k")[1]
        sums = "float64" if _dtype(self.arrays["q"]) == "float64" else "float32"
        for role, shape, meaning, dtypes in (
            ("lse", [batch, heads, rows], "batch, heads, rows", [sums]),
            ("dlse", [batch, heads, rows], "batch, heads, rows", [sums]),
            ("lengths", [batch], "batch", ["int64", "int32"]),
            ("key_mask", [batch, tokens], "batch, tokens", ["bool"]),
            ("alibi_slopes", [heads], "heads", ["float32"]),
        ):
            if role in self.arrays:
                yield from self._like(role, shape, meaning, dtypes)


def diagnosed(
    error: Exception, arrays: Mapping[str, Any], heads_first: bool = False, *, required: Sequence[str] = ()
) -> Exception:
    """The error that names what is wrong with these arguments, or the given one in the caller's words. arrays: all
    arguments of the call by name; others than arrays are not looked at. required: beside q, k and v."""
    call = _Call(arrays, heads_first, required)
    if "q" not in call.arrays or "k" not in call.arrays:
        return error
    if any(map(only_dlpack, call.arrays.values())):
        return error
    fault = next(call.faults(), None)
    if fault is not None:
        return fault
    if not isinstance(error, InvalidArgument):
        return error
    spelled = {role: name for role, name in call.names.items() if role != name}
    return renamed(error, spelled | _DTYPES)
