"""mypy, as users run it, accepts the Python code of the documents and the examples."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import README, ROOT

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.nightly
def test_blocks_and_examples_are_typed_for_a_strict_user(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="a part of the extra dev")
    (tmp_path / "readme.py").write_text("\n".join(_BLOCK.findall(README.read_text(encoding="utf-8"))), encoding="utf-8")
    examples = [*(ROOT / "examples").glob("*.py"), *(ROOT / "examples" / "plugin").glob("*.py")]
    assert examples
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "readme.py", *map(str, examples)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
