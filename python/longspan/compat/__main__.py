"""Prints the argument mapping of longspan.compat: `python -m longspan.compat [NAME]`."""

import sys

from .dilated_attention_pytorch.table import markdown

if __name__ == "__main__":
    print(markdown(*sys.argv[1:2]), end="")
