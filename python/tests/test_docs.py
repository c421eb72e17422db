"""The Python snippets of the manual run as they stand."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", ["longnet.md", "migration.md"])
def test_snippets_run(name, capsys):
    snippets = re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(), re.M | re.S)
    assert len(snippets) >= 2
    shared: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, name, "exec"), shared)
