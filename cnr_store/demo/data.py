"""MovieLens ratings as columns of integer ids, one column a feature, oldest rating first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cnr_store.demo.errors import DemoDataError

Ids = NDArray[np.int64]
HELD_OUT = 0.1
"""Share of the ratings, the newest, that no run trains on."""

CROSS_ROWS = {"user_genre": 16_384, "user_year": 32_768, "item_hour": 32_768, "item_occupation": 32_768}
"""Rows of the hashed tables: about as many as MovieLens-100k has different pairs of each."""

_HOUR_SECONDS = 3_600
_DAY_SECONDS = 86_400


@dataclass(frozen=True)
class Features:
    """All ratings, oldest first.

    `columns`: per table, ids of shape (ratings,), or (ratings, width) with 0 as padding for a bag of ids.
    `rows`: per table, its number of rows. `labels`: float32 (ratings,), 1 where the rating is 4 or 5.
    `train`: how many of the ratings, from the start, are trained on.
    """

    columns: dict[str, Ids]
    rows: dict[str, int]
    labels: NDArray[np.float32]
    train: int

    def __len__(self) -> int:
        return len(self.labels)


def load_features(folder: Path) -> Features:
    """Read the three files of `folder`, see `source.find_data`.

    Raises: DemoDataError naming the file that is not as expected.
    """
    users = _read(folder / "ml-100k.user", 5)
    items = _read(folder / "ml-100k.item", 4)
    user, item, rating, seconds = _ratings(folder / "ml-100k.inter", users, items)
    age = np.array([int(row[1]) // 10 if row[1].isdigit() else 0 for row in users], np.int64)[user]
    gender, occupation = (_codes([row[k] for row in users])[user] for k in (2, 3))
    year = _codes([row[2] for row in items])[item]
    genres = _genre_bags([row[3].split() for row in items])[item]
    hour = seconds // _HOUR_SECONDS % 24
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
        "weekday": seconds // _DAY_SECONDS % 7,
        "user_count": _log2_bucket(_seen_before(user)),
        "item_count": _log2_bucket(_seen_before(item)),
        # Row 0 of a bag's table is its padding.
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
    columns = list(zip(*_read(path, 4), strict=True))
    try:
        rating, seconds = (np.array(column, np.float64) for column in columns[2:])
        user, item = (_look_up(keys, rows) for keys, rows in zip(columns, (users, items), strict=False))
    except (ValueError, KeyError) as error:
        raise DemoDataError(f"{path} has an unknown user or item, or no number: {error}") from error
    order = np.argsort(seconds, kind="stable")
    return user[order], item[order], rating[order], seconds[order].astype(np.int64)


def _look_up(keys: Sequence[str], rows: list[list[str]]) -> Ids:
    place: Callable[[str], int] = {row[0]: k for k, row in enumerate(rows)}.__getitem__
    return np.fromiter(map(place, keys), np.int64, count=len(keys))


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
    """How often each id occurred earlier: what a service knows at that moment, nothing of the future."""
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
