"""Writes the stub of the compiled module, which type checkers and editors read: make_stub.py FOLDER_OF_THE_MODULE FILE."""

import re
import sys
from pathlib import Path

folder, target = sys.argv[1:]
sys.path.insert(0, folder)

import _longspan
from nanobind.stubgen import StubGen

stub = StubGen(_longspan)
stub.put(_longspan)
# Constructors have a last overload, which says what is wrong with arguments that the first did not take.
text = re.sub(r" +@overload\n +def __init__\(self, \*arguments, .*\n\n", "", stub.get())
Path(target).write_text(re.sub(r" +@overload\n", "", text).replace("Annotated, overload\n", "Annotated\n"))
