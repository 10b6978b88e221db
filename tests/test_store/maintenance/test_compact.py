"""Folding: the same rows bit for bit, without the chain; attempts that meet, and versions that go meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch import nn

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from cnr_backends.testing.faulty import Fault
from cnr_codecs import parse, present_rows
from cnr_store import (
    Checkpointer,
    CorruptionError,
    EmptyStoreError,
    OptionError,
    VersionNotFoundError,
    compact,
)
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.array_reader import ArrayReader
from cnr_store.errors import FormatError
from cnr_store.format import grid, layout
from cnr_store.format.record_document import decode_record, encode_record
from cnr_store.policies.policy import PolicyName
from tests.test_store.support.retention_helpers import delete_version
from tests.test_store.support.same_arrays import assert_same_arrays
from tests.test_store.support.zarr_nodes import values_of

Arrays = dict[str, np.ndarray[Any, Any]]
CODECS: dict[str, Any] = {
    "2 bits": 2,
    "3 bits": 3,
    "4 bits": 4,
    "8 bits": 8,
    "lossless": 32,
    "symmetric": {"id": "cnr_uniform", "scheme": "symmetric", "bits": 5},
    "k-means of rows": {"id": "cnr_kmeans", "bits": 1},
    "k-means of blocks": {"id": "cnr_kmeans", "bits": 2, "group": "block", "block_rows": 8},
    "k-means of clusters": {"id": "cnr_kmeans", "bits": 2, "group": "cluster"},
    "lattice": {"id": "cnr_lattice", "rms_step": 0.1},
    "lattice of a step": {"id": "cnr_lattice", "step": 0.0625, "then": [{"id": "zstd"}]},
    "zstd": {"id": "cnr_uniform", "bits": 4, "then": [{"id": "zstd"}]},
    "two behind": {
        "id": "cnr_kmeans",
        "bits": 2,
        "group": "block",
        "then": [{"id": "lz4"}, {"id": "zstd"}],
    },
}


@pytest.fixture
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut small tables as large ones are."""
    sizes = {"TARGET_CHUNK_BYTES": 512, "MAX_CHUNK_BYTES": 1024, "TARGET_SHARD_BYTES": 4096}
    for name, nbytes in {**sizes, "MAX_SHARD_BYTES": 4096}.items():
        monkeypatch.setattr(grid, name, nbytes)
    monkeypatch.setattr("cnr_store.maintenance.folding.folded_array.REGION_BYTES", 4096)


class Tables(nn.Module):
    """Tables of each element type that rows may have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.full = nn.Embedding(700, 12, sparse=True)
        self.short = nn.Embedding(300, 8, sparse=True).half()
        self.brain = nn.Embedding(260, 9, sparse=True).bfloat16()
        self.wide = nn.Embedding(90, 4, sparse=True)
        self.narrow = nn.Embedding(1, 1, sparse=True)

    def change(self, rng: np.random.Generator, checkpointer: Checkpointer, share: float) -> None:
        """Change a share of the rows of some tables, here and there to values that no codec quantizes."""
        for name, table in self.named_children():
            assert isinstance(table, nn.Embedding)
            if rng.random() < 0.2:
                continue
            rows = np.flatnonzero(rng.random(len(table.weight)) < share)
            with torch.no_grad():
                chosen = torch.from_numpy(rows)
                table.weight[chosen] = torch.randn(len(rows), table.weight.shape[1]).to(table.weight.dtype)
                if len(rows) and rng.random() < 0.5:
                    table.weight[int(rows[0])] = float(rng.choice([np.nan, np.inf, 1e4, 0.0]))
            checkpointer.touch(name, rows)


def bits_of(codec: Any) -> dict[str, Any]:
    quantized = dict.fromkeys(("full", "short", "brain"), codec)
    return {"bits": quantized} if isinstance(codec, int) else {"codec": quantized}


def history(
    url: str, codec: Any, policy: PolicyName = "consecutive", saves: int = 5, seed: int = 0
) -> list[Arrays]:
    """Save a model again and again; what each version reads as."""
    rng, model, found = np.random.default_rng(seed), Tables(), []
    with Checkpointer(
        url, model, None, policy=policy, job=cnr_store.Job(rng=False), **bits_of(codec)
    ) as checkpointer:
        for step in range(saves):
            if step:
                model.change(rng, checkpointer, rng.choice([0.01, 0.1, 0.6]))
            checkpointer.save(step).result()
            found.append(cnr_store.state_dict(url))
    return found


@pytest.mark.slow
@pytest.mark.some_by_day(4)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.usefixtures("many_chunks")
def test_a_fold_reads_the_same_bit_for_bit(url: str, name: str) -> None:
    history_of = history(url, CODECS[name])
    backend, infos = open_backend(url), cnr_store.versions(url)
    seen: list[tuple[int, int]] = []
    report = compact(url, infos[3], progress=lambda done, known: seen.append((done, known)))
    assert (report.version, report.outcome) == (infos[3].id, "folded")
    assert report.links > 1
    assert seen == [(done, len(seen)) for done in range(1, len(seen) + 1)]
    folded = sum(nbytes for _, nbytes in backend.list_keys(f"{layout.FOLDS}/{infos[3].id}"))
    assert report.bytes == folded
    assert cnr_store.versions(url) == infos
    for info, expected in zip(infos, history_of, strict=True):
        assert_same_arrays(cnr_store.state_dict(url, info), expected)
    for info in infos[:3]:
        delete_version(backend, info.id)
    for info, expected in list(zip(infos, history_of, strict=True))[3:]:
        assert_same_arrays(cnr_store.state_dict(url, info), expected)
        array = cnr_store.open(url, info)["tables/full/weight"]
        assert isinstance(array, zarr.Array)
        np.testing.assert_array_equal(array[5:600], expected["full.weight"][5:600])


@pytest.mark.slow
@pytest.mark.some_by_day(6)
@pytest.mark.parametrize("name", CODECS)
def test_plain_zarr_reads_the_arrays_of_a_fold(url: str, name: str) -> None:
    expected = history(url, CODECS[name])[-1]
    version = compact(url).version
    backend = open_backend(url)
    fold = Catalog(backend).find_fold(version)
    assert fold is not None
    group = zarr.open_group(backend.zarr_store(), path=f"{layout.FOLDS}/{version}", mode="r")
    for path in fold.arrays:
        table = path.split("/")[1]
        values = values_of(group, f"{fold.nonce}/{path}")
        np.testing.assert_array_equal(values, expected[f"{table}.weight"].astype(values.dtype))
    objects = [key for key, _ in backend.list_keys(f"{layout.FOLDS}/{version}")]
    assert [key for key in objects if key.endswith(layout.NODE)] == [fold.key()]


@pytest.mark.slow
@pytest.mark.usefixtures("many_chunks")
def test_codes_are_copied_and_chunks_have_few_segments(url: str) -> None:
    """What a fold takes is what one whole version takes: no row is stored in a costlier way."""
    history(url, 4, saves=12)
    compact(url)
    catalog = Catalog(open_backend(url))
    record = catalog.find()
    fold = catalog.find_fold(record.id)
    assert fold is not None
    with Checkpointer(url, Tables(), None, job=cnr_store.Job(rng=False), **bits_of(4)) as checkpointer:
        checkpointer.load()
        whole = catalog.record(checkpointer.save(99, full=True).result().id)
    for path, entry in fold.arrays.items():
        assert entry.nbytes <= 1.25 * whole.arrays[path].nbytes
        (link,) = ArrayReader(catalog, record, path).links
        segments = link.take(0, np.ones(link.entry.shape[0], np.uint8))
        assert sum(segment.row_set.count for segment in segments) == entry.rows


def test_nothing_to_fold_and_folded_already(url: str) -> None:
    history(url, 8, saves=1)
    before = objects(url)
    report = compact(url)
    assert (report.outcome, report.arrays, report.bytes) == ("nothing to fold", (), 0)
    assert objects(url) == before
    history(url, 8, saves=3)
    assert compact(url).outcome == "folded"
    before = objects(url)
    report = compact(url)
    assert (report.outcome, report.arrays, report.bytes) == ("already folded", (), 0)
    assert objects(url) == before


def objects(url: str) -> dict[str, bytes]:
    backend = open_backend(url)
    return {key: backend.get(key) for key, _ in backend.list_keys("")}


@pytest.mark.slow
def test_a_fold_over_a_fold(url: str) -> None:
    """A later version is folded over an earlier one's fold; both stay as they were."""
    history_of = history(url, 4, saves=6)
    infos = cnr_store.versions(url)
    assert compact(url, infos[2]).links == 3
    assert compact(url, infos[5]).links == 4
    for info in infos[:2] + infos[3:5]:
        delete_version(open_backend(url), info.id)
    for number in (2, 5):
        assert_same_arrays(cnr_store.state_dict(url, infos[number]), history_of[number])


def test_a_table_that_grew_is_cut_for_its_new_size(url: str) -> None:
    """The whole link is of the small table; rows beyond it are in the delta."""
    small, large = nn.Embedding(4, 8, sparse=True), nn.Embedding(5000, 8, sparse=True)
    with Checkpointer(url, small, None, bits={"weight": 4}, job=cnr_store.Job(rng=False)) as checkpointer:
        checkpointer.save(0).result()
    backend = open_backend(url)
    with Checkpointer(url, large, None, bits={"weight": 4}, job=cnr_store.Job(rng=False)) as checkpointer:
        checkpointer.save(1).result()
    # What a job that grows a table in place writes: every new row is in the delta.
    first, second = cnr_store.versions(url)
    record = Catalog(backend).record(second.id)
    path = layout.weight_path("weight")
    entry = record.arrays[path]
    grown = replace(entry, kind="delta", base=first.id)
    data = encode_record(replace(record, arrays={path: grown}, needs=(first.id,)))
    backend.delete(record.key())
    backend.create(record.key(), data)
    expected = cnr_store.state_dict(url)
    compact(url)
    fold = Catalog(backend).find_fold(second.id)
    assert fold is not None
    assert fold.arrays[path].shape == (5000, 8)
    assert fold.nodes[path]["codecs"][0]["configuration"]["chunk_shape"][0] >= 4096
    assert_same_arrays(cnr_store.state_dict(url), expected)


@pytest.mark.slow
def test_saves_after_a_fold_lean_on_the_folded_version(url: str) -> None:
    history(url, 4, saves=2)  # few bytes, or the next intermittent version were whole
    version = compact(url).version
    model, rng = Tables(), np.random.default_rng(5)
    for policy in ("consecutive", "one-shot", "intermittent"):
        with Checkpointer(
            url, model, None, policy=policy, job=cnr_store.Job(rng=False), **bits_of(4)
        ) as checkpointer:
            checkpointer.load(version)
            model.change(rng, checkpointer, 0.1)
            info = checkpointer.save(9).result()
        record = Catalog(open_backend(url)).record(info.id)
        assert record.needs == (version,)
        other = Tables()
        with Checkpointer(url, other, None, job=cnr_store.Job(rng=False)) as checkpointer:
            assert checkpointer.load().version.id == info.id
        written = {path: entry for path, entry in record.arrays.items() if entry.kind == "delta"}
        assert written
        assert all(entry.base == version for entry in written.values())
        assert sum(entry.rows for entry in written.values()) < 400


@pytest.mark.slow
@pytest.mark.parametrize("then", [None, "before", "after"])
def test_two_attempts_at_one_fold_never_mix(url: str, then: Fault) -> None:
    """The second one runs as a whole between the first one's last object and its record, which may fail, too."""
    expected = history(url, 2)[-1]
    inner = open_backend(url)
    reports = []

    def second(operation: str, key: str, index: int) -> Fault:
        if operation != "create":
            return None
        reports.append(compact(inner))
        return then

    first = compact(FaultyBackend(inner, second))
    assert [report.outcome for report in reports] == ["folded"]
    assert first.outcome == "already folded"
    fold = Catalog(inner).find_fold(first.version)
    assert fold is not None
    keys = [key for key, _ in inner.list_keys(layout.FOLDS)]
    assert all(key == fold.key() or f"/{fold.nonce}/" in key for key in keys)
    assert_same_arrays(cnr_store.state_dict(url), expected)


@pytest.mark.slow
def test_another_attempt_is_first_and_what_lay_beneath_is_removed(url: str) -> None:
    expected = history(url, 2)[-1]
    inner, infos = open_backend(url), cnr_store.versions(url)
    outcomes: list[str] = []
    lock = threading.Lock()

    def second(operation: str, key: str, index: int) -> Fault:
        with lock:
            if operation == "get_suffix" and not outcomes:
                outcomes.append(compact(inner).outcome)
                for info in infos[-2::-1]:
                    delete_version(inner, info.id)
        return None

    first = compact(FaultyBackend(inner, second, reads=True))
    assert (outcomes, first.outcome) == (["folded"], "already folded")
    assert_same_arrays(cnr_store.state_dict(url), expected)


@pytest.mark.slow
def test_leftovers_of_a_crashed_attempt_go_with_the_next(url: str) -> None:
    expected = history(url, 2)[-1]
    backend, version = open_backend(url), cnr_store.versions(url)[-1].id
    left = layout.version_key(version, "ab" * 16, "tables/full/weight/c/0/0", prefix=layout.FOLDS)
    backend.put(left, b"half")
    assert_same_arrays(cnr_store.state_dict(url), expected)
    assert compact(url).outcome == "folded"
    assert left not in dict(backend.list_keys(layout.FOLDS))
    backend.put(left, b"late")
    assert compact(url).outcome == "already folded"
    assert left not in dict(backend.list_keys(layout.FOLDS))
    assert_same_arrays(cnr_store.state_dict(url), expected)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["while rows are read", "after the record"])
def test_version_removed_meanwhile_leaves_no_fold(url: str, moment: str) -> None:
    history(url, 2)
    inner = open_backend(url)
    version = cnr_store.versions(url)[-1].id

    def removed(operation: str, key: str, index: int) -> None:
        if operation == ("get_suffix" if moment == "while rows are read" else "create"):
            delete_version(inner, version)

    with pytest.raises(VersionNotFoundError, match="removed while it was being folded"):
        compact(FaultyBackend(inner, removed, reads=True))
    assert list(inner.list_keys(layout.FOLDS)) == []


@pytest.mark.slow
def test_a_damaged_link_is_named_and_nothing_becomes_visible(url: str) -> None:
    history(url, 8)
    backend, infos = open_backend(url), cnr_store.versions(url)
    key = f"versions/{infos[0].id}/tables/full/weight/c/0/0"
    data = bytearray(backend.get(key))
    data[100] ^= 1
    backend.put(key, bytes(data))
    with pytest.raises(CorruptionError, match=f"version {infos[0].id}, tables/full/weight"):
        compact(url)
    assert list(backend.list_keys(layout.FOLDS)) == []
    assert compact(url, infos[0]).outcome == "nothing to fold"


def test_columns_cut_apart_are_refused(url: str) -> None:
    model = nn.Embedding(64, 8, sparse=True)
    with Checkpointer(
        url, model, None, policy="consecutive", bits=32, job=cnr_store.Job(rng=False)
    ) as checkpointer:
        checkpointer.save(0).result()
        checkpointer.touch("weight", [3])
        checkpointer.save(1).result()
    backend, path = open_backend(url), layout.weight_path("weight")
    record = Catalog(backend).record(cnr_store.versions(url)[0].id)
    document = record.nodes[path]
    document["codecs"][0]["configuration"]["chunk_shape"][1] = 4
    backend.delete(record.key())
    backend.create(record.key(), encode_record(record))
    with pytest.raises(FormatError, match="chunks of 4 columns for 8; only rows in one piece can be moved"):
        compact(url)
    assert list(backend.list_keys(layout.FOLDS)) == []


def test_the_record_of_a_fold_is_proven(url: str) -> None:
    history(url, 8, saves=2)
    version = compact(url).version
    backend = open_backend(url)
    key = layout.record_key(version, layout.FOLDS)
    data = backend.get(key)
    fold = decode_record(data, version, layout.FOLDS)
    assert fold is not None
    assert encode_record(fold) == data
    assert fold.home == f"fold of version {version}"
    for nonce in ("../../up", "AB" * 16, "", "ab" * 40):
        with pytest.raises(CorruptionError, match="nonce"):
            decode_record(encode_record(replace(fold, nonce=nonce)), version, layout.FOLDS)
    with pytest.raises(CorruptionError, match="neither a commit nor a void record"):
        decode_record(data, version)
    with pytest.raises(CorruptionError, match="metadata of nodes outside"):
        other = data.replace(f'"{fold.nonce}/tables"'.encode(), b'"elsewhere/tables"')
        blank = fold.nodes["tables"]
        assert blank
        decode_record(redigested(other), version, layout.FOLDS)


def redigested(data: bytes) -> bytes:
    """The same record with its digest made right again."""
    import hashlib
    import re

    found = re.search(rb'"digest":"([0-9a-f]{64})"', data)
    assert found is not None
    blank = data.replace(found[1], b"0" * 64, 1)
    return data.replace(found[1], hashlib.sha256(blank).hexdigest().encode(), 1)


FORGERIES: dict[str, dict[str, Any]] = {
    "of another shape": {"shape": (80, 4)},
    "of another type": {"element": "float16"},
    "no whole array": {"kind": "delta", "base": "000000-00000000.00000001"},
    "fewer rows than metadata know": {"rows": 91},
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_fold_that_is_not_the_versions_is_an_error(url: str, name: str) -> None:
    history(url, 8, saves=2)
    backend, version = open_backend(url), compact(url).version
    fold = Catalog(backend).find_fold(version)
    assert fold is not None
    path = layout.weight_path("wide")
    entry = replace(fold.arrays[path], **FORGERIES[name])
    forged = replace(fold, arrays={**fold.arrays, path: entry})
    backend.put(fold.key(), encode_record(forged))
    with pytest.raises(CorruptionError, match=f"fold of version {version}"):
        cnr_store.state_dict(url, version)


@pytest.mark.parametrize("name", ["without metadata", "without objects"])
def test_a_fold_without_its_rows_is_an_error(url: str, name: str) -> None:
    history(url, 8, saves=2)
    backend, version = open_backend(url), compact(url).version
    fold = Catalog(backend).find_fold(version)
    assert fold is not None
    path = layout.weight_path("wide")
    if name == "without metadata":
        nodes = {key: node for key, node in fold.nodes.items() if key != path}
        backend.put(fold.key(), encode_record(replace(fold, nodes=nodes)))
    else:
        backend.delete(fold.key(path, "c/0/0"))
    with pytest.raises(CorruptionError, match=f"{version}, {path}"):
        cnr_store.state_dict(url, version)


def test_what_cannot_be_folded(url: str, tmp_path: Path) -> None:
    with pytest.raises(EmptyStoreError):
        compact(url)
    history(url, 8, saves=2)
    with pytest.raises(VersionNotFoundError):
        compact(url, "000009-0123abcd.00000001")
    for workers in (0, True, 1.5):
        with pytest.raises(OptionError, match="workers"):
            compact(url, workers=workers)  # type: ignore[arg-type]


def test_payloads_name_the_fold(url: str) -> None:
    """An object of the version in the place of the fold's is refused, and the other way round."""
    history(url, 8, saves=2)
    backend, version = open_backend(url), compact(url).version
    catalog = Catalog(backend)
    fold = catalog.find_fold(version)
    assert fold is not None
    path = layout.weight_path("wide")
    (link,) = ArrayReader(catalog, catalog.record(version), path).links
    data = backend.get(fold.key(path, "c/0/0"))
    payload = parse(data[: 24 + 4 + 16 + 4 + 90 * 16])
    assert present_rows(payload).tolist() == list(range(90))
    assert payload.seal == layout.seal(version, path, 0, 0, layout.FOLDS) != layout.seal(version, path, 0, 0)
    assert link.record is fold


@pytest.mark.slow
def test_folding_needs_no_torch(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    expected = history(url, 4, saves=3)[-1]
    script = (
        "import sys; from cnr_store import compact\n"
        f"assert compact({url!r}).outcome == 'folded' and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert_same_arrays(cnr_store.state_dict(url), expected)
