"""Stores that reach for what is not theirs: links out of their folder, and documents that claim the memory.

Whoever reads, verifies, folds or tidies such a store gets an error or the exact values. Nothing outside is read,
changed or removed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cnr_store
from cnr_backends import BackendError
from cnr_store import CheckpointError
from cnr_store.format import layout
from tests.test_store.support.tampering import DENSE, SLOT, WEIGHT, Forgery, read_all

Json = Any


class Linked:
    """A copy of a store, and a folder beside it that links in the store lead to."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.url, self.outside = folder / "store", folder / "outside"
        shutil.copytree(base, self.url)
        self.outside.mkdir()

    def link(self, name: str) -> None:
        """Move something of the store outside, and leave a link."""
        place, target = self.url / name, self.outside / "target"
        if place.exists():
            shutil.move(place, target)
        else:
            target.mkdir()
            (target / "000001-00000000.00000001").write_bytes(b"{}")
        place.symlink_to(target)

    def files_outside(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.outside.rglob("*") if path.is_file()}


def names(base: Path) -> Iterator[str]:
    """One object of every kind, and every folder that a store has or may have."""
    older, newer = sorted(path.name for path in (base / "versions").iterdir() if path.is_dir())
    yield from ("zarr.json", "versions/zarr.json", f"writers/{next((base / 'writers').iterdir()).name}")
    for version in (older, newer):
        for name in ("zarr.json", "manifest", "state/main.json", f"{WEIGHT}/c/0/0", f"{DENSE}/c/0/0"):
            yield f"versions/{version}/{name}"
    yield from (f"versions/{newer}", f"versions/{newer}/tables", f"versions/{older}/{WEIGHT}/c", "versions")
    yield from (f"versions/{newer}/{SLOT}/zarr.json", "writers", "pins", "tombstones", "folds")
    yield f"tombstones/{older}"


@pytest.mark.slow
def test_links_that_lead_outside(base: Path, exact: dict[str, Json], tmp_path: Path) -> None:
    newest = f"versions/{exact['versions'][-1]}"
    shutil.copytree(base, tmp_path / "without")
    shutil.rmtree(tmp_path / "without" / newest)
    without = read_all(tmp_path / "without")  # a link is as good as nothing
    for number, name in enumerate(names(base)):
        store = Linked(base, tmp_path / str(number))
        (store.url / name).parent.mkdir(exist_ok=True)
        store.link(name)
        before = store.files_outside()
        found = read_all(store.url)
        expected = exact if name != newest else without
        for reader, value in found.items():
            assert isinstance(value, Exception) or value == expected[reader], (name, reader)
        if "/c" in name or name.endswith(("manifest", "main.json")):
            report = cnr_store.verify(store.url, deep=True)
            assert any(name in (finding.key or "") for finding in report.problems), name
        for change in (_compact, _gc, _pin):
            with_errors(change, store.url)
        assert store.files_outside() == before, name


def with_errors(change: Callable[[Path], object], url: Path) -> None:
    try:
        change(url)
    except (CheckpointError, BackendError):
        return


def _compact(url: Path) -> object:
    return cnr_store.compact(url)


def _gc(url: Path) -> object:
    return cnr_store.gc(url, keep_last=1, grace_seconds=0)


def _pin(url: Path) -> object:
    return cnr_store.pin(url)


_MEASURE = """
import sys, cnr_store
from cnr_backends import BackendError
calls = [
    cnr_store.versions, cnr_store.open, cnr_store.state_dict, cnr_store.verify,
    lambda url: cnr_store.verify(url, deep=True), cnr_store.compact, lambda url: cnr_store.gc(url, keep_last=1),
]
for url in sys.argv[1:]:
    for call in calls:
        try:
            call(url)
        except (cnr_store.CheckpointError, BackendError):
            pass
print([int(line.split()[1]) for line in open("/proc/self/status") if "VmHWM" in line][0])
"""


def _terabytes(forgery: Forgery) -> None:
    forgery.reshape([1 << 40, 16], [1 << 12, 16], [1 << 12, 16])


def _terabytes_in_a_shard(forgery: Forgery) -> None:
    forgery.reshape([1 << 36, 16], [1 << 32, 16], [1 << 20, 16])


def _wide(forgery: Forgery) -> None:
    forgery.reshape([1 << 12, 1 << 20], [1 << 12, 1 << 20], [1, 1 << 20])


def _dense_terabytes(forgery: Forgery) -> None:
    forgery.nodes[DENSE]["shape"] = forgery.entry(DENSE)["shape"] = [1 << 40, 16]
    forgery.nodes[DENSE]["chunk_grid"]["configuration"]["chunk_shape"] = [1 << 20, 16]


def _inflating_manifest(forgery: Forgery) -> None:
    forgery.manifest["z"] = forgery.text("[" + "[]," * (20 << 20) + "[]]")


def _nested_state(forgery: Forgery) -> None:
    forgery.state["reader"] = forgery.text("[" * 100_000 + "]" * 100_000)


def _nested_record(forgery: Forgery) -> None:
    forgery.cnr["policy"]["x"] = forgery.text('{"a":' * 50_000 + "1" + "}" * 50_000)


@pytest.mark.slow
def test_memory_stays_flat(base: Path, tmp_path: Path) -> None:
    """Whatever is claimed, nobody takes more than the interpreter with what it has imported, and a few chunks."""
    changes = (
        *(_terabytes, _terabytes_in_a_shard, _wide, _dense_terabytes),
        *(_inflating_manifest, _nested_state, _nested_record),
    )
    stores = []
    for change in changes:
        forgery = Forgery(base, tmp_path / change.__name__)
        change(forgery)
        forgery.sign()
        stores.append(str(forgery.url))
    shown = subprocess.run(
        [sys.executable, "-c", _MEASURE, *stores], capture_output=True, check=True, text=True
    )
    assert int(shown.stdout) < 400 << 10


@pytest.mark.parametrize("text", [b"", b"[" * 100_000, b"{}", b'{"base": "../../x"}', b"\xff" * 100, b"null"])
def test_objects_beside_versions(base: Path, tmp_path: Path, text: bytes) -> None:
    """Pins, tombstones, folds and claims may hold anything."""
    shutil.copytree(base, tmp_path / "store")
    url = tmp_path / "store"
    older, newer = (info.id for info in cnr_store.versions(url))
    for name in (
        f"pins/{older}",
        f"tombstones/{newer}",
        layout.record_key(newer, layout.FOLDS),
        "pins/x",
        "folds/y",
    ):
        (url / name).parent.mkdir(parents=True, exist_ok=True)
        (url / name).write_bytes(text)
    (url / "writers/000009").write_bytes(text)
    found = read_all(url)
    assert found["versions"] == [older, newer]
    assert isinstance(found["load"], CheckpointError)
    report = cnr_store.verify(url, deep=True)
    assert {finding.key for finding in report.problems} >= {
        layout.record_key(newer, layout.FOLDS),
        "writers/000009",
    }
    for change in (_compact, _gc, _pin):
        with_errors(change, url)
    assert cnr_store.state_dict(url, older).keys() == {"emb.weight", "lin.weight", "lin.bias"}
