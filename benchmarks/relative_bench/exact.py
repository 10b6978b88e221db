"""Rows with all their bits, on floating grids of 23 bits: beside byte planes of zstd, and as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numcodecs.zstd import Zstd

from benchmarks.relative_bench.stores import Setting, volumes
from benchmarks.relative_bench.trace import OptimizerName, Size, Training
from cnr_codecs import FloatingRows, LosslessRows
from cnr_codecs.protocol import Rows

_EXACT, _RAW = FloatingRows(23, relative=True), LosslessRows()
WITHOUT_PARENTS, PARENTS = "lossless", "lossless, exact parents"
# Of an interval, by how much fewer samples are trained.
SHARES = (1, 4)


def times_fewer(size: Size, optimizer: OptimizerName, seed: int) -> Iterator[dict[str, Any]]:
    """How many times fewer bytes than raw rows the rows take that an interval, or a part of one, changed."""
    for share in SHARES:
        part = replace(size, samples=size.samples // share, warm_up=size.warm_up * share)
        training = Training(part, optimizer, seed)
        before = _arrays(training)
        training.advance()
        for name, rows in _arrays(training).items():
            changed = (rows != before[name]).any(axis=1)
            yield {
                "part_of_interval": 1 / share,
                "array": name,
                **_measured(before[name][changed], rows[changed]),
            }


def saved(size: Size, optimizer: OptimizerName, seed: int) -> Iterator[dict[str, Any]]:
    """Bytes of lossless deltas of all intervals, with and without exact parents."""
    settings = [Setting(name, budget=0, exact_parents=name == PARENTS) for name in (WITHOUT_PARENTS, PARENTS)]
    for each in volumes(Training(size, optimizer, seed), settings):
        sizes = {f"{part}_bytes": each.delta_bytes(part) for part in ("weights", "slots")}
        yield {"setting": each.setting, **sizes, "total_bytes": each.total_bytes}


def _measured(older: Rows, rows: Rows) -> dict[str, Any]:
    count, none = len(rows), np.zeros(len(rows), np.bool_)
    raw = len(_RAW.encode_rows(rows, None, count, element="float32"))
    planes = np.ascontiguousarray(rows.view(np.uint8).reshape(-1, rows.itemsize).T)
    beneath = _EXACT.encode_over(older, None, count, np.zeros(rows.shape, np.int32), none, element="float32")
    sizes = {
        "planes": sum(len(Zstd(1).encode(plane)) for plane in planes),
        "absolute": len(_EXACT.encode_rows(rows, None, count, element="float32")),
        "relative": len(
            _EXACT.encode_over(rows, None, count, beneath.codes, beneath.coded, element="float32").payload
        ),
    }
    return {"rows": count, **{name: raw / nbytes for name, nbytes in sizes.items()}}


def _arrays(training: Training) -> dict[str, Rows]:
    """The weights of tables, and the state that follows their rows value by value."""
    found: dict[str, Any] = {}
    for name, weight in training.model.named_parameters():
        if weight.ndim == 2:
            found[name] = weight.detach()
            state = training.optimizer.state.get(weight, {})
            found |= {
                f"{name}, {key}": value for key, value in state.items() if np.shape(value) == weight.shape
            }
    return {name: tensor.numpy().copy() for name, tensor in found.items()}
