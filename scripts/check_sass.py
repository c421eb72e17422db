#!/usr/bin/env python3
"""Fails if the hot loops of the Hopper kernels are not what they were written to be.

usage: check_sass.py CUOBJDUMP OBJECT...

The hot loop is the innermost loop with matrix products. There, moves from general to uniform registers (R2UR) mean that the
compiler no longer sees that stages and descriptors are uniform, which once cost 15%; local memory (LDL, STL) means spills. The
backward has more uniform values than there are uniform registers: a few moves and words are left to it. Kernels with block
lists (a number and true in its Shape) read one note for each tile, which decides branches; with options of a call, more than
fits uniform registers follows from it. Kernels without matrix products are not
looked at.
"""
import re
import subprocess
import sys

ALLOWED = {
    "forward": {"R2UR": 0, "LDL": 0, "STL": 0},
    "forward with options": {"R2UR": 1, "LDL": 56, "STL": 30},  # mostly in branches that few tiles take, and dropout
    "forward by parts": {"R2UR": 12, "LDL": 0, "STL": 0},
    "forward by lists": {"R2UR": 3, "LDL": 0, "STL": 0},
    "forward by lists with options": {"R2UR": 8, "LDL": 0, "STL": 0},
    "backward": {"R2UR": 8, "LDL": 4, "STL": 2},
    "wide backward": {"R2UR": 43, "LDL": 12, "STL": 5},  # its products have 16 steps
    "backward with options": {"R2UR": 16, "LDL": 24, "STL": 20},  # half of them where a call has rare options
    "wide backward with options": {"R2UR": 44, "LDL": 44, "STL": 28},
}
PRODUCT = "HGMMA"


def functions(text):
    """(name, [(address, instruction)]) of every kernel in cuobjdump's listing."""
    for part in re.split(r"^\s*Function : ", text, flags=re.M)[1:]:
        code = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", part, flags=re.M)
        yield part.split("\n", 1)[0].strip(), [(int(address, 16), text) for address, text in code]


def loops(code):
    """(first, last) of what backward branches enclose, as positions in code."""
    place = {address: i for i, (address, _) in enumerate(code)}
    for i, (address, text) in enumerate(code):
        target = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if target and int(target.group(1), 16) < address and int(target.group(1), 16) in place:
            yield place[int(target.group(1), 16)], i


def main():
    dump, objects = sys.argv[1], sys.argv[2:]
    checked, bad = 0, 0
    for name, code in (f for path in objects for f in functions(subprocess.check_output([dump, "-sass", path], text=True))):
        if not any(PRODUCT in text for _, text in code):
            continue
        with_products = [(a, b) for a, b in loops(code) if any(PRODUCT in text for _, text in code[a : b + 1])]
        if not with_products:
            print(f"{name}: no loop with matrix products")
            bad += 1
            continue
        first, last = min(with_products, key=lambda loop: loop[1] - loop[0])
        words = [re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0] for _, text in code[first : last + 1]]
        # Of Shape: lists, options of a call, and whether tiles have parts.
        shape = re.search(r"Li\d+ELi\dELb([01])ELb\dELb([01])ELb\dELb([01])E", name)
        kind = "backward" if "8backward" in name else "forward"
        if kind == "forward" and shape.group(1) == "1":
            kind += " by parts" if shape.group(3) == "1" and shape.group(2) == "0" else " by lists"
        if kind != "backward" and shape.group(2) == "1":
            kind += " with options"
        if kind == "backward" and ("Li192E" in name or "Li256E" in name):
            kind = "wide backward"
        if "BackwardExtrasE0" not in name and "backward" in kind:
            kind += " with options"
        allowed = ALLOWED[kind]
        found = {word: words.count(word) for word, most in allowed.items() if words.count(word) > most}
        checked += 1
        if found:
            print(f"{name}: its hot loop of {len(words)} instructions has {found}")
            bad += 1
    print(f"{checked} kernels, {bad} bad")
    return bad > 0 or checked == 0


if __name__ == "__main__":
    sys.exit(main())
