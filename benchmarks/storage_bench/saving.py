"""Saving, beside what it is made of: encoding alone and putting alone; and beside others' saves."""

from __future__ import annotations

import itertools
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import cnr_store
from benchmarks.codec_bench.targets import Target
from benchmarks.codec_bench.timing import race
from cnr_backends import Backend, Transfer, open_backend
from cnr_backends.testing import DelayedBackend
from cnr_codecs import UniformRows
from cnr_store.ranks.protocol import Team
from cnr_store.writing.plan import Plan, RowsWrite
from cnr_store.writing.stage import PUT_BYTES_IN_FLIGHT, PUTS_IN_FLIGHT, stage

DELAY_SECONDS = 0.02
TABLES = 20
WORKERS = 2
_VERSION = "000001-00000000.00000001"
Objects = dict[str, bytes]
Figures = dict[str, Any]


class _Nowhere(DelayedBackend):
    """Takes no time to put beside the delay, and keeps objects only if it is told where."""

    def __init__(self, delay_seconds: float, kept: Objects | None = None) -> None:
        self.url, self.atomic_create = "nowhere", True
        self._put_seconds, self._kept = delay_seconds, kept

    def prepare(self, key: str) -> None:
        """There are no folders."""

    def _put(self, key: str, pieces: list[memoryview]) -> None:
        def keep() -> None:
            if self._kept is not None:
                self._kept[key] = b"".join(pieces)

        self._change(keep)


class _Rows:
    def __init__(self, rows: np.ndarray[Any, Any]) -> None:
        self._rows = rows

    def block(self, begin: int, end: int) -> np.ndarray[Any, Any]:
        return self._rows[begin:end]


def _plan(rows: int, dim: int, tables: int) -> Plan:
    draw, codec = np.random.default_rng(0), UniformRows(bits=4)
    each = rows // tables
    writes = [
        RowsWrite(
            f"tables/t{number}/weight",
            (each, dim),
            "float32",
            None,
            None,
            _Rows(draw.standard_normal((each, dim), np.float32)),
            codec,
        )
        for number in range(tables)
    ]
    return Plan(step=0, previous=None, rows=writes, dense=[], state=None, policy={})


def _save(backend: Backend, plan: Plan) -> None:
    with Transfer(WORKERS, 2 * WORKERS) as transfer:
        stage(backend, _VERSION, plan, transfer, Team.alone())


def _put_all(backend: Backend, objects: Objects) -> None:
    with Transfer(PUTS_IN_FLIGHT, PUTS_IN_FLIGHT, PUT_BYTES_IN_FLIGHT) as transfer:
        for _ in transfer.map(lambda item: backend.put(*item), objects.items(), lambda item: len(item[1])):
            pass


def _write_synced(path: Path, objects: Objects) -> None:
    """What the machine does by itself: all bytes, one after the other, into one file."""
    with path.open("xb", buffering=0) as file:
        for data in objects.values():
            file.write(data)
        os.fsync(file.fileno())


def measure(rows: int, dim: int, folder: Path) -> Figures:
    """Seconds of each, the best of several in turns."""
    found: Figures = {}
    plan = _plan(rows, dim, TABLES)
    objects: Objects = {}
    _save(_Nowhere(0, objects), plan)
    fresh = (open_backend(folder / str(number)) for number in itertools.count())
    files = (folder / f"file{number}" for number in itertools.count())
    far = f"puts of {DELAY_SECONDS * 1000:.0f} ms"
    places: dict[str, tuple[Callable[[], Backend], str, Callable[[], object]]] = {
        far: (
            lambda: _Nowhere(DELAY_SECONDS),
            "put alone",
            lambda: _put_all(_Nowhere(DELAY_SECONDS), objects),
        ),
        "local disk": (
            lambda: next(fresh),
            "one file, synced",
            lambda: _write_synced(next(files), objects),
        ),
    }
    for place, (make, name, write) in places.items():
        seconds = race(
            {
                "encode alone": lambda: _save(_Nowhere(0), plan),
                name: write,
                "save": lambda make=make: _save(make(), plan),  # type: ignore[misc]
            },
            rounds=3,
        )
        found |= {f"{place}: {each} (s)": value for each, value in seconds.items()}
        slower = max(seconds["encode alone"], seconds[name])
        found[f"{place}: share of the slower"] = slower / seconds["save"]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    return found | _beside_others(rows, dim, folder)


def _beside_others(rows: int, dim: int, folder: Path) -> Figures:
    model = nn.Module()
    model.table = nn.Embedding(rows, dim, sparse=True)
    values = model.table.weight.detach().numpy()
    places: Iterator[Path] = (folder / f"{number}" for number in itertools.count())

    def through_zarr() -> None:
        chunk = max(1, (1 << 20) // (4 * dim))
        array = zarr.create_array(
            str(next(places)),
            shape=values.shape,
            dtype="float32",
            chunks=(chunk, dim),
            shards=(32 * chunk, dim),
            serializer={"name": "cnr.uniform", "configuration": {"scheme": "adaptive", "bits": 4}},
            compressors=None,
            fill_value=np.nan,
        )
        array[:] = values

    runs: dict[str, Callable[[], object]] = {
        "ours, 4 bits": lambda: cnr_store.save(next(places), model, bits=4),
        "ours, lossless": lambda: cnr_store.save(next(places), model, bits=32),
        "torch.save, float32": lambda: torch.save(model.state_dict(), next(places)),
        "torch.distributed.checkpoint, float32": lambda: dcp_save(
            model.state_dict(), checkpoint_id=next(places), no_dist=True
        ),
        "zarr z[:] =, 4 bits": through_zarr,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        seconds = race(runs, rounds=2)
    return {f"whole model, local disk: {name} (s)": value for name, value in seconds.items()}


def targets(figures: Figures) -> Iterator[Target]:
    for name, value in figures.items():
        place, found, _ = name.partition(": share of the slower")
        if found:
            wanted = 0.9 if place == "local disk" else 0.8
            yield Target("save: share of the slower of encoding and putting", wanted, value, place)
