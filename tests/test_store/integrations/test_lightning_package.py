"""Lightning comes from either of its packages; without both, the error says what to install."""

from __future__ import annotations

import runpy
import sys

import pytest


def test_without_lightning_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "cnr_store.integrations.lightning_package", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'cnr-store\[lightning\]'"):
        runpy.run_module("cnr_store.integrations.lightning_package")
