"""Any damage to any object of a store is an error that names it, or changes nothing; values are never wrong.

`verify` names every damaged object, and knows which versions still load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_backends import BackendError
from cnr_store import Checkpointer, CheckpointError, VersionInfo
from cnr_store.maintenance.verification.report import VerifyReport
from cnr_store.maintenance.verification.verify import verify
from tests.nightly import NIGHT, TODAY, of_today
from tests.test_store.chains.test_relative import RELATIVE

pytestmark = pytest.mark.slow

Values = dict[str, bytes]


class Model(nn.Module):
    """A quantized table, a lossless one, and a dense layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.large = nn.Embedding(600, 8, sparse=True)
        self.small = nn.Embedding(30, 4, sparse=True)
        self.top = nn.Linear(12, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        top: torch.Tensor = self.top(torch.cat([self.large(ids), self.small(ids % 30)], 1))
        return top


class Damaged:
    """A store of three versions, whose newest leans on both others or is folded, and what each version loads to."""

    def __init__(self, folder: Path, folded: bool) -> None:
        self.folder = folder
        model = Model(0)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        reader = {"positions": np.arange(2000), "rest": (1, b"x")}
        self.infos: list[VersionInfo] = []
        # The codes of a chain are relative, so that a row rests on several versions.
        codec: Any = {"id": "cnr_uniform", "bits": 4} if folded else {"large": RELATIVE}
        with Checkpointer(folder, model, optimizer, policy="consecutive", codec=codec) as checkpointer:
            for step in range(3):
                optimizer.zero_grad()
                model(torch.arange(step * 5, step * 5 + 20)).sum().backward()
                optimizer.step()
                self.infos.append(checkpointer.save(step, reader, metadata={"step": step}).result())
        self.folded = folded
        if folded:
            cnr_store.compact(folder)
        self.expected = {info.id: self.load(info.id) for info in self.infos}

    def load(self, version: str) -> Values:
        """Everything of a version as bytes."""
        model = Model(1)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        with Checkpointer(self.folder, model, optimizer) as checkpointer:
            restored = checkpointer.load(version)
        values = {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}
        values |= {
            f"sum of {name}": optimizer.state[parameter]["sum"].numpy().tobytes()
            for name, parameter in model.named_parameters()
        }
        values["rest"] = repr((restored.version, restored.metadata, restored.reader["rest"])).encode()
        values["positions"] = restored.reader["positions"].tobytes()
        return values

    def objects(self) -> dict[str, bytes]:
        """Every object of the store by its key."""
        # What the reserve holds is nobody's.
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file() and path.name != "reserve")
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}

    def to_damage(self) -> dict[str, bytes]:
        """The same, but where there is a fold only what it changes: itself, and what its version leant on."""
        if not self.folded:
            return self.objects()
        return {key: data for key, data in self.objects().items() if "folds/" in key or "/c/" in key}

    def in_turn(self, turn: int) -> dict[str, bytes]:
        """Of what is to be damaged each object of one of the versions, a turn's own and the day's; at night of all."""
        alike: dict[str, list[str]] = {}
        found = self.to_damage()
        for key in found:
            room, _, rest = key.partition("/")
            alike.setdefault(f"{room} {rest.partition('/')[2] or rest}", []).append(key)
        chosen = found if NIGHT else [keys[(turn + TODAY) % len(keys)] for keys in alike.values()]
        return {key: found[key] for key in chosen}

    @contextmanager
    def holding(self, changes: Mapping[str, bytes | None]) -> Iterator[None]:
        """Replace objects, or remove them, for a while."""
        before = {key: (self.folder / key).read_bytes() for key in changes}
        for key, data in changes.items():
            if data is None:
                (self.folder / key).unlink()
            else:
                (self.folder / key).write_bytes(data)
        try:
            yield
        finally:
            for key, data in before.items():
                (self.folder / key).write_bytes(data)

    def check(self, keys: Sequence[str], damage: str) -> bool:
        """Read all versions; every error must name one of the damaged objects. Returns whether there was one."""
        missed, lost = False, set()
        for info in self.infos:
            ways = [self.load]
            if any(info.id in key for key in keys):
                ways += [self._state_dict, self._overlay]
            for way in ways:
                try:
                    values = way(info.id)
                except (CheckpointError, BackendError) as error:
                    missed = True
                    lost.add(info.id)
                    if not any(_names(str(error), key, self.folder) for key in keys):
                        pytest.fail(f"{damage} {keys} is not named in: {error}")
                else:
                    wrong = [name for name, value in values.items() if value != self.expected[info.id][name]]
                    assert not wrong, (damage, keys, info.id, wrong)
        self._verify(keys, damage, lost)
        return missed

    def _verify(self, keys: Sequence[str], damage: str, lost: set[str]) -> None:
        """Every damaged object is named, but those which only a damaged record or manifest could tell of."""
        report = verify(self.folder, deep=True)
        named = _named(report)
        blind = {name.rpartition("/")[0] for name in named if _is_record(name) or name.endswith("/manifest")}
        unnamed = [key for key in set(keys) - named if not any(key.startswith(f"{home}/") for home in blind)]
        assert not unnamed, (damage, keys, report)
        assert {info.id for info in self.infos} - lost == set(report.restorable), (damage, keys, report)
        if damage in QUICK:
            assert not set(keys) - _named(verify(self.folder)), (damage, keys)

    def _state_dict(self, version: str) -> Values:
        return {name: v.tobytes() for name, v in cnr_store.state_dict(self.folder, version).items()}

    def _overlay(self, version: str) -> Values:
        group: Any = cnr_store.open(self.folder, version)
        return {
            "large.weight": group["tables/large/weight"][...].tobytes(),
            "sum of small.weight": group["tables/small/sum"][...].tobytes(),
            "top.bias": group["dense/model/top.bias"][...].tobytes(),
        }


def _named(report: VerifyReport) -> set[str]:
    return {finding.key for finding in (*report.problems, *report.suspicious) if finding.key is not None}


def _names(message: str, key: str, folder: Path) -> bool:
    """Whether a message says which object it is: its key, its array in its version, or its version's record."""
    room, _, rest = key.partition("/")
    if room not in ("versions", "folds") or key.count("/") < 2:
        return str(folder) in message and key in message
    version, name = rest.split("/", 1)
    if room == "folds" and not _is_record(key):
        name = name.partition("/")[2]  # below the folder of the attempt
    array = name.partition("/c/")[0]
    what = {"zarr.json": version, "state/main.json": "state"}.get(array, array)
    return version in message and what in message


@pytest.fixture(scope="module", params=["chain", "fold"])
def damaged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    return Damaged(tmp_path_factory.mktemp("damaged"), request.param == "fold")


@pytest.fixture(autouse=True)
def nothing_changed(damaged: Damaged) -> Iterator[None]:
    before = damaged.objects()
    yield
    assert damaged.objects() == before, "an object was not put back, or reading wrote something"


def _guards_data(damaged: Damaged, key: str) -> bool:
    """Whether our readers depend on an object, rather than on its copy in the commit record or in a fold."""
    if damaged.folded and damaged.infos[-1].id in key and key.startswith("versions/") and "/tables/" in key:
        return False
    return "/c/" in key or key.endswith(("/manifest", "/main.json")) or _is_record(key)


def _is_record(key: str) -> bool:
    return key.startswith(("versions/", "folds/")) and key.count("/") == 2 and key.endswith("/zarr.json")


QUICK = {"lost", "emptied", "cut in half", "cut by a byte", "lengthened"}
"""Damages that a quick check must find, wherever they are."""

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "first byte flipped": lambda data: bytes([data[0] ^ 0x10]) + data[1:],
    "middle byte flipped": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 0x10]) + data[len(data) // 2 + 1 :]
    ),
    "last byte flipped": lambda data: data[:-1] + bytes([data[-1] ^ 0x10]),
    "emptied": lambda _: b"",
    "cut in half": lambda data: data[: len(data) // 2],
    "cut by a byte": lambda data: data[:-1],
    "lengthened": lambda data: data + b"\0",
}


@pytest.mark.some_by_day(4)
@pytest.mark.parametrize("damage", DAMAGES)
def test_altered_object(damaged: Damaged, damage: str) -> None:
    for key, data in damaged.in_turn(list(DAMAGES).index(damage)).items():
        with damaged.holding({key: DAMAGES[damage](data)}):
            missed = damaged.check([key], damage)
        assert missed or not _guards_data(damaged, key), key


def test_lost_object(damaged: Damaged) -> None:
    for key in damaged.in_turn(len(DAMAGES)):
        if key.endswith(".closed"):  # as of a run that was killed
            continue
        with damaged.holding({key: None}):
            missed = damaged.check([key], "lost")
        assert missed or not _guards_data(damaged, key) or _lost_unseen(damaged, key), key


def _lost_unseen(damaged: Damaged, key: str) -> bool:
    """Without its record a version or a fold does not exist; only `verify` may tell that it once did."""
    return _is_record(key) and key.startswith("folds/")


@pytest.mark.some_by_day(1)
def test_swapped_objects(damaged: Damaged) -> None:
    """Each with the next object, and with the one at the same place of the next version."""
    objects = damaged.to_damage()
    pairs = list(zip(objects, list(objects)[1:], strict=False))
    for older, newer in zip(damaged.infos, damaged.infos[1:], strict=False):
        others = ((key, key.replace(older.id, newer.id)) for key in objects if older.id in key)
        pairs += [(key, other) for key, other in others if other in objects]
    for left, right in of_today(pairs, 12):
        if objects[left] == objects[right]:
            continue
        with damaged.holding({left: objects[right], right: objects[left]}):
            missed = damaged.check([left, right], "swapped")
        assert missed or not (_guards_data(damaged, left) or _guards_data(damaged, right)), (left, right)


def test_lost_record_of_the_newest_version(damaged: Damaged) -> None:
    """Without its record a version does not exist; the one before it is then the newest, and exact."""
    newest, before = damaged.infos[-1], damaged.infos[-2]
    with damaged.holding({f"versions/{newest.id}/zarr.json": None}):
        assert cnr_store.versions(damaged.folder) == damaged.infos[:-1]
        assert damaged.load("latest") == damaged.expected[before.id]
