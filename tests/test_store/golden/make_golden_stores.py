"""Writes golden stores of format 2: `python -m tests.test_store.golden.make_golden_stores NAME...`, or `all`.

Only a new format may change what such a store holds, so one that exists is never written again. A change of what is
written, such as a new codec or option, comes with a new store under a new name.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path

from tests.test_store.golden.golden_cases import CASES
from tests.test_store.golden.golden_values import STORES


def make(name: str) -> None:
    """Write one golden store."""
    folder = STORES / name
    if folder.exists():
        sys.exit(f"{folder} is there, and a golden store never changes: give a new one a new name")
    with tempfile.TemporaryDirectory() as place:
        made, store = Path(place) / name, Path(place) / "store"
        made.mkdir()
        CASES[name](store).write(made)
        pack(store, made / "store.zip")
        shutil.copytree(made, folder)
    print(name, sum(path.stat().st_size for path in folder.iterdir()), "bytes")


def pack(store: Path, target: Path) -> None:
    """A store as one file, whose bytes tell nothing of when and where it was packed."""
    with zipfile.ZipFile(target, "x", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted(store.rglob("*")):
            if path.is_file() and path.name != "reserve":  # 256 KiB of random bytes, which readers ignore
                entry = zipfile.ZipInfo(path.relative_to(store).as_posix())
                packed.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)


def main() -> None:
    warnings.simplefilter("ignore")  # pytest has them for errors
    chosen = (
        [name for name in CASES if not (STORES / name).exists()] if sys.argv[1:] == ["all"] else sys.argv[1:]
    )
    for name in chosen:
        make(name)


if __name__ == "__main__":
    main()
