"""Notes what a golden store must give back, while it is written."""

from __future__ import annotations

import fnmatch
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import zarr

import cnr_store
from tests.test_store.golden.golden_values import (
    Array,
    Job,
    described,
    model_paths,
    own_arrays,
    own_tree,
)
from tests.test_store.support.same_arrays import differing


class Notes:
    """What a golden store is to give back, noted while it is written.

    Parameters
    ----------
    url
        Where the store is written.
    lossy
        Patterns of the paths whose values may come back rounded. Of all others the model's own tensors are expected.
    """

    def __init__(self, url: Path, lossy: tuple[str, ...] = ()) -> None:
        self.url = url
        self.lossy = lossy
        self.rounded: set[str] = set()
        self.saved: dict[str, dict[str, Any]] = {}

    def save(
        self,
        checkpointer: cnr_store.Checkpointer,
        kind: str,
        job: Job,
        step: int,
        reader: Any = None,
        metadata: Any = None,
        rng: bool = False,
        full: bool = False,
    ) -> cnr_store.VersionInfo:
        """Save a job that `golden_jobs` makes under the name `kind`, and note what it holds."""
        given = reader.state_dict() if hasattr(reader, "state_dict") else reader
        tree = {**own_tree(job, rng), "reader": described(given), "metadata": described(metadata)}
        own, names = own_arrays(job), model_paths(job.model)
        info = checkpointer.save(step, reader=reader, metadata=metadata, full=full).result()
        self.note(info, kind, own, names, tree)
        return info

    def note(
        self,
        info: cnr_store.VersionInfo,
        kind: str,
        own: dict[str, Array],
        names: dict[str, str],
        tree: dict[str, Any],
    ) -> None:
        """Note a version; of arrays that are not rounded, only the job's own bits pass."""
        found = read_arrays(self.url, info.id)
        for path, values in own.items():
            if difference := differing(found[path], values):
                assert any(fnmatch.fnmatchcase(path, each) for each in self.lossy), (path, difference)
                self.rounded.add(path)
        beside = found.keys() - own.keys()
        assert all(path.startswith(("dense/optim/", "dense/state/")) for path in beside), beside
        expected = {
            path: values if path in self.rounded else own.get(path, values) for path, values in found.items()
        }
        self.saved[info.id] = {"job": kind, "arrays": expected, "names": names, **tree}

    def write(self, folder: Path) -> None:
        """Put what is expected beside the store: of the versions that there are in the end."""
        for pattern in self.lossy:
            assert any(fnmatch.fnmatchcase(path, pattern) for path in self.rounded), f"{pattern}: all exact"
        kept: dict[str, Array] = {}
        versions = []
        for number, info in enumerate(cnr_store.versions(self.url)):
            noted = self.saved[info.id]
            again = read_arrays(self.url, info.id)
            assert all(differing(again[path], values) is None for path, values in noted["arrays"].items())
            arrays = {
                path: _place(kept, f"{number}/{path}", values) for path, values in noted["arrays"].items()
            }
            facts = {**asdict(info), "time": info.time.hex()}
            del facts["metadata"]  # which the tree describes
            versions.append({"info": facts, **noted, "arrays": arrays})
        doc = {"versions": versions, "store": store_facts(self.url)}
        (folder / "expected.json").write_text(json.dumps(doc, sort_keys=True) + "\n")
        np.savez_compressed(folder / "expected.npz", **kept)  # type: ignore[arg-type]  # numpy's stub takes them for allow_pickle


def _place(kept: dict[str, Array], key: str, values: Array) -> str:
    """The name that values are kept under; the same as before for those of an earlier version that did not change."""
    path = key.partition("/")[2]
    for other, there in kept.items():
        if other.partition("/")[2] == path and differing(there, values) is None:
            return other
    kept[key] = values
    return key


def read_arrays(url: Path, version: str) -> dict[str, Array]:
    """By path, every array of a version."""
    members = cnr_store.open(url, version=version).members(max_depth=None)
    return {path: np.asarray(each[...]) for path, each in members if isinstance(each, zarr.Array)}


def store_facts(url: Path) -> dict[str, Any]:
    """What `verify` and `pins` say of a sound store."""
    report = cnr_store.verify(url, deep=True)
    assert report.ok, report.problems
    return {
        "restorable": list(report.restorable),
        "suspicious": [finding.version for finding in report.suspicious],
        "leftovers": [[each.place, each.objects, each.nbytes] for each in report.leftovers],
        "voids": list(report.voids),
        "pins": sorted(cnr_store.pins(url)),
    }
