"""`FoldingBackend`: keys that differ in case are one."""

from __future__ import annotations

from pathlib import Path

import pytest

from cnr_backends import ObjectExistsError, StorageError, open_backend
from cnr_backends.testing import FoldingBackend


def test_keys_that_meet_are_one_object_under_its_first_spelling(tmp_path: Path) -> None:
    backend = FoldingBackend(open_backend(tmp_path))
    backend.put("Users/A", b"first")
    backend.put("users/a", b"second")
    assert backend.get("USERS/A") == b"second"
    assert backend.size("users/A") == 6
    assert backend.list_names("") == ["Users"]
    assert list(backend.list_keys("users")) == [("users/A", 6)]
    with pytest.raises(ObjectExistsError):
        backend.create("users/A. ", b"third")
    # Another one over the same objects finds them by any spelling, too.
    assert FoldingBackend(open_backend(tmp_path)).get("uSERS/a") == b"second"
    backend.delete("USERS/a")
    assert backend.list_names("") == []


@pytest.mark.parametrize("key", ["CON", "a/nul.txt/b", "Com1"])
def test_devices_hold_no_objects(tmp_path: Path, key: str) -> None:
    with pytest.raises(StorageError):
        FoldingBackend(open_backend(tmp_path)).put(key, b"")
