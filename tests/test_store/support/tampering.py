"""Forges versions: the documents of a real one, changed at will and signed again, so that every digest matches."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Adagrad

import cnr_store
from cnr_backends import BackendError
from cnr_codecs import CodecError
from cnr_store import Checkpointer, CheckpointError, CorruptionError
from cnr_store.format.record_document import unpack_entries
from cnr_store.format.state import dumps

ROWS, DIM = 3000, 16
WEIGHT, SLOT, DENSE = "tables/emb/weight", "tables/emb/sum", "dense/model/lin.weight"
Json = Any
ABSENT = object()
HUGE = 10**400
TORCH_BYTES = {"kind": "torch", "dtype": "|u1", "shape": [3], "data": "AAAA"}


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(ROWS, DIM)
        self.lin = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.lin(self.emb(ids)).sum()
        return loss


def make_store(folder: Path) -> None:
    """A baseline and a delta, with optimizer state and arrays beside the state."""
    model = Model(0)
    optimizer = Adagrad(model.parameters(), lr=0.1)
    with Checkpointer(folder, model, optimizer, policy="consecutive", bits=8) as checkpointer:
        for step in range(2):
            model(torch.tensor([step, step + 5])).backward()
            optimizer.step()
            reader = {"large": torch.zeros(3000), "small": (1, 2)}
            checkpointer.save(step, reader=reader, metadata={"a": 1}).result()


class Forgery:
    """The documents of a store's newest version; change them, then `sign`."""

    def __init__(self, base: Path, folder: Path, listed: bool = False) -> None:
        shutil.copytree(base, folder)
        self.url = folder
        self.version = max(path for path in (folder / "versions").iterdir() if path.is_dir())
        self.id = self.version.name
        self.record: Json = json.loads((self.version / "zarr.json").read_bytes())
        self.state: Json = json.loads((self.version / "state/main.json").read_bytes())
        # With each entry by its path; `listed` leaves them as they are.
        if not listed:
            self.cnr["arrays"] = unpack_entries(self.cnr["arrays"], self.cnr["tables"], self.nodes)
            self.cnr["tables"] = {name: [] for name in self.cnr["tables"]}
        self.manifest: Json = json.loads(zlib.decompress((self.version / "manifest").read_bytes()))
        self._texts: dict[str, str] = {}

    @property
    def cnr(self) -> Json:
        return self.record["attributes"]["cnr"]

    def entry(self, path: str) -> Json:
        return self.cnr["arrays"][path]

    @property
    def nodes(self) -> Json:
        return self.record["consolidated_metadata"]["metadata"]

    @property
    def tree(self) -> Json:
        return self.state["optimizers"][0]

    def text(self, text: str) -> str:
        """A value that stands for JSON text which no encoder would write."""
        mark = f"@{len(self._texts)}@"
        self._texts[mark] = text
        return mark

    def reshape(self, shape: list[int], shard: list[int], chunk: list[int]) -> None:
        """Claim another shape and cut for the table."""
        node = self.nodes[WEIGHT]
        node["shape"] = self.entry(WEIGHT)["shape"] = shape
        node["chunk_grid"]["configuration"]["chunk_shape"] = shard
        node["codecs"][0]["configuration"]["chunk_shape"] = chunk
        self.entry(WEIGHT).update(kind="whole", base=None)

    def sign(self) -> None:
        self.cnr["state"] = self._put("state/main.json", self._bytes(self.state))
        self.cnr["manifest"] = self._put("manifest", zlib.compress(self._bytes(self.manifest)))
        doc = self.record.get("consolidated_metadata")
        doc = doc.get("metadata") if isinstance(doc, dict) else None
        if isinstance(doc, dict) and isinstance(doc.get(DENSE), dict):
            self._put(f"{DENSE}/zarr.json", self._bytes(doc[DENSE]))
        blank = "0" * 64
        self.cnr["digest"] = blank
        data = self._bytes(self.record)
        digest = hashlib.sha256(data).hexdigest()
        self._put(
            "zarr.json", data.replace(b'"digest":"' + blank.encode(), b'"digest":"' + digest.encode(), 1)
        )

    def _bytes(self, doc: Json) -> bytes:
        data = dumps(doc)
        for mark, text in self._texts.items():
            data = data.replace(f'"{mark}"'.encode(), text.encode())
        return data

    def _put(self, name: str, data: bytes) -> str:
        (self.version / name).write_bytes(data)
        return hashlib.sha256(data).hexdigest()


def _load(url: Path) -> Json:
    model = Model(1)
    optimizer = Adagrad(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        cnr_store.load(url, model, optimizer)
    except CheckpointError as error:
        if "partly overwritten" not in str(error):
            assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        raise
    return {name: value.numpy().tobytes() for name, value in model.state_dict().items()}


def _open(url: Path) -> Json:
    tables: Json = cnr_store.open(url)["tables/emb"]
    return {path: array[...].tobytes() for path, array in tables.arrays()}


def _verify(url: Path) -> Json:
    """What can be restored; damage is reported, and raised here."""
    report = cnr_store.verify(url, deep=True)
    for problem in report.problems:
        raise CorruptionError(problem.what)
    return report.restorable


def _compact(url: Path) -> Json:
    """What is read once the newest version is folded."""
    with _copied(url) as folder:
        cnr_store.compact(folder)
        return READERS["state_dict"](folder)


def _gc(url: Path) -> Json:
    """What is left once old versions are removed."""
    with _copied(url) as folder:
        cnr_store.gc(folder, keep_last=1)
        return READERS["state_dict"](folder)


@contextmanager
def _copied(url: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=url.parent) as folder:
        yield Path(shutil.copytree(url, Path(folder) / "store", symlinks=True))


READERS: dict[str, Callable[[Path], Json]] = {
    "versions": lambda url: [info.id for info in cnr_store.versions(url)],
    "open": _open,
    "state_dict": lambda url: {name: value.tobytes() for name, value in cnr_store.state_dict(url).items()},
    "load": _load,
    "verify": _verify,
    "compact": _compact,
    "gc": _gc,
}


def read_all(url: Path, readers: Collection[str] = tuple(READERS)) -> dict[str, Json]:
    """What each reader finds, an error of the library's own being a finding; any other is raised."""
    found: dict[str, Json] = {}
    for name in readers:
        try:
            found[name] = READERS[name](url)
        except (CheckpointError, BackendError, CodecError) as error:
            found[name] = error
    assert all(len(str(value)) < 2000 for value in found.values() if isinstance(value, Exception))
    return found


def refused(
    forgery: Forgery, exact: dict[str, Json], note: object = "", readers: Collection[str] = tuple(READERS)
) -> dict[str, Json]:
    """What the readers find: one at least an error, the others what is true."""
    forgery.sign()
    found = read_all(forgery.url, readers)
    errors = {name for name, value in found.items() if isinstance(value, Exception)}
    assert errors, f"nobody refuses {note!r}"
    for name in found.keys() - errors:
        assert found[name] == exact[name], f"{name} is wrong with {note!r}"
    return found


def put(members: Json, key: Any, value: Json) -> None:
    if value is ABSENT:
        del members[key]
    else:
        members[key] = value


def spoiled_generators(rng: Json) -> Iterator[tuple[str, Json]]:
    """Name and value of states of which no generator may be made; `rng` is a good one."""

    def changed(name: str, *place: int | str, to: Json) -> tuple[str, Json]:
        copied = copy.deepcopy(rng)
        inner = copied[name]
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = to
        return f"{name} {place} {to!r:.40}", copied

    for name in ("torch", "numpy", "python"):
        yield f"no {name}", {key: value for key, value in rng.items() if key != name}
        values: list[Json] = [None, [], 5, "x", {"$tuple": []}, {"$array": TORCH_BYTES}]
        for value in values:
            yield f"{name} {value}", rng | {name: value}
    for position in (-1, 625, 1 << 30, HUGE, 1.5, True, "1"):
        yield changed("numpy", "$tuple", 2, to=position)
        yield changed("python", "$tuple", 1, "$tuple", -1, to=position)
    yield changed("numpy", "$tuple", 0, to="PCG64")
    yield changed("numpy", "$tuple", 1, to={"$array": TORCH_BYTES | {"kind": "numpy"}})
    yield changed("numpy", "$tuple", 1, "$array", "dtype", to="<i4")
    yield changed("numpy", "$tuple", 3, to="x")
    yield changed("numpy", "$tuple", 4, to="x")
    yield changed("python", "$tuple", 0, to=2)
    yield changed("python", "$tuple", 1, "$tuple", to=[1] * 600)
    yield changed("python", "$tuple", 1, "$tuple", 0, to=1 << 32)
    yield changed("python", "$tuple", 2, to="x")
