"""The README's examples run as they stand."""

import re
from pathlib import Path

import pytest

from tests.paths import ROOT

README = ROOT / "codecs" / "README.md"


def test_the_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)  # the README is ours
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("7.1")
    assert printed[1].startswith("0.04")
    assert printed[-3:] == ["[  5  70 900]", "3", "[  5  70 900]"]
