"""Commit records and manifests prove themselves; names stay inside their folder."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_codecs import LosslessRows, RowCodec, UniformRows
from cnr_store import CorruptionError, FormatError
from cnr_store.format import layout
from cnr_store.format.arrays import Doc, add_node, rows_document
from cnr_store.format.grid import Grid, choose_grid, count_blocks
from cnr_store.format.manifest import Manifest, Part, decode_manifest, encode_manifest
from cnr_store.format.record import ArrayEntry, Record
from cnr_store.format.record_document import decode_record, encode_record, encode_void
from tests.nightly import histories

VERSION = "000003-0123abcd.00000042"
BASE = "000003-0123abcd.00000041"
RECORD = Record(
    id=VERSION,
    nonce="n",
    step=7,
    time=1.5,
    previous=BASE,
    needs=(BASE,),
    arrays={
        "tables/a/weight": ArrayEntry(
            "delta", (10, 4), "float32", BASE, 3, 99, {"id": "cnr_rows"}, ("b.weight",)
        )
    },
    nodes={"tables": {"zarr_format": 3, "node_type": "group"}},
    policy={"policy": "full"},
    restores=1,
    objects_bytes=1234,
    manifest_sha256="0" * 64,
    state_sha256="1" * 64,
    metadata={"digest": "0" * 64},
)

GRID = Grid(10, 4, 8, 4, 16, 4)
LISTED = replace(
    RECORD,
    requires=tuple(sorted(layout.FEATURES)),
    arrays={
        "tables/b/weight": ArrayEntry("delta", (10, 4), "float32", BASE, 3, 99, {"id": "cnr_rows"}),
        "tables/b/sum": ArrayEntry("whole", (10,), "bfloat16", None, 10, 98, {"id": "cnr_rows"}),
        "tables/a/weight": ArrayEntry("delta", (10, 4), "float32", BASE, 0, 0, {"id": "cnr_rows"}),
        "tables/c/weight": ArrayEntry("whole", (10, 4), "float32", None, 10, 97, {"id": "x", "n": 1}, ("d",)),
        "dense/model/e": ArrayEntry("dense", (2,), "int64", nbytes=20),
    },
    nodes={
        "tables/b/weight": rows_document((10, 4), "float32", GRID, []),
        "tables/b/sum": rows_document((10,), "bfloat16", Grid(10, 1, 8, 1, 16, 1), []),
        "tables/c/weight": rows_document((10, 4), "float32", GRID, []),
    },
)


@pytest.mark.parametrize("record", [RECORD, LISTED])
def test_record_round_trip(record: Record) -> None:
    data = encode_record(record)
    assert decode_record(data, VERSION) == record
    found = decode_record(data, VERSION)
    assert found is not None
    assert found.nbytes == 1234 + len(data)


def test_what_lists_can_say_stands_in_lists() -> None:
    cnr = json.loads(encode_record(LISTED))["attributes"]["cnr"]
    assert sorted(cnr["arrays"]) == ["dense/model/e", "tables/a/weight", "tables/c/weight"]
    codec = {"id": "cnr_rows"}
    assert cnr["tables"] == {
        "forms": [{"element": "bfloat16", "codec": codec}, {"element": "float32", "codec": codec}],
        "bases": [BASE],
        "form": [0, 1],
        "base": [None, 0],
        "bytes": [98, 99],
        "rows": [10, 3],
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "delta"])
@pytest.mark.parametrize("slot", ["exp_avg", "sum"])
def test_a_thousand_tables_with_a_slot_take_less_than_a_megabyte(slot: str, kind: str) -> None:
    rows = 100_000_000
    ids = None if kind == "whole" else np.arange(0, rows, 81)
    counts = None if ids is None else count_blocks(ids, rows)
    written, base = (rows, None) if ids is None else (len(ids), BASE)
    arrays, nodes = dict[str, ArrayEntry](), dict[str, Doc]()
    shapes = {"weight": (rows, 64), slot: (rows, 64) if slot == "exp_avg" else (rows,)}
    codecs: dict[str, RowCodec] = {"weight": UniformRows("adaptive", 4), slot: LosslessRows()}
    for name, shape in shapes.items():
        columns = (*shape, 1)[1]
        grid = choose_grid(rows, columns, 4, codecs[name].bytes_per_row(columns, "float32"), counts)
        doc = rows_document(shape, "float32", grid, [])
        config = codecs[name].get_config()
        for table in range(1000):
            path = layout.slot_path(f"model.sparse.embedding_bags.t_cat_{table:04d}", name)
            arrays[path] = ArrayEntry(kind, shape, "float32", base, written, 9_876_543_210 + table, config)
            add_node(nodes, path, doc)
    record = replace(LISTED, arrays=arrays, nodes=nodes)
    data = encode_record(record)
    assert decode_record(data, VERSION) == record
    assert len(data) < 930_000  # of 1,000,000, so that the record has room for what else it says


@pytest.mark.slow
@pytest.mark.parametrize("record", [RECORD, LISTED])
def test_every_flipped_byte_of_a_record_is_found(record: Record) -> None:
    data = encode_record(record)
    for position in range(len(data)):
        for mask in (0x01, 0x20, 0x80):
            altered = bytearray(data)
            altered[position] ^= mask
            with pytest.raises((CorruptionError, FormatError), match=VERSION):
                decode_record(bytes(altered), VERSION)


def test_every_cut_of_a_record_is_found() -> None:
    data = encode_record(RECORD)
    for length in range(len(data)):
        with pytest.raises(CorruptionError, match=VERSION):
            decode_record(data[:length], VERSION)


def test_a_record_at_another_versions_key() -> None:
    with pytest.raises(CorruptionError, match=f"it is the record of {VERSION}: objects were swapped"):
        decode_record(encode_record(RECORD), BASE)


def test_a_newer_format_or_feature_is_said_so() -> None:
    doc = json.loads(encode_record(RECORD))
    doc["attributes"]["cnr"]["format"] = 3
    with pytest.raises(FormatError, match="holds format 3; this release reads format 2: install a newer"):
        decode_record(json.dumps(doc).encode(), VERSION)
    with pytest.raises(FormatError, match="requires telepathy: install a newer cnr-store"):
        decode_record(encode_record(replace(RECORD, requires=("telepathy",))), VERSION)


@pytest.mark.parametrize("prefix", [layout.VERSIONS, layout.FOLDS])
def test_features_that_are_refused_by_name(prefix: str) -> None:
    record = replace(LISTED, nonce="ab" * 16, prefix=prefix)
    assert decode_record(encode_record(record), VERSION, prefix) == record
    newer = replace(record, requires=(*layout.FEATURES, "telepathy"))
    with pytest.raises(FormatError, match=f"{VERSION} requires telepathy: install a newer cnr-store"):
        decode_record(encode_record(newer), VERSION, prefix)


def test_a_void_record_is_no_version() -> None:
    assert decode_record(encode_void("me", "n", 1.5), VERSION) is None


parts = st.dictionaries(
    st.integers(0, 1 << 40), st.builds(Part, st.integers(0, 1 << 40), st.integers(0, 2**32 - 1)), max_size=20
)


@pytest.mark.slow
@settings(max_examples=histories(100))
@given(st.dictionaries(st.text(min_size=1, max_size=20), parts, max_size=4))
def test_manifest_round_trip(arrays: dict[str, dict[int, Part]]) -> None:
    manifest = Manifest(VERSION, arrays)
    assert decode_manifest(encode_manifest(manifest), VERSION) == manifest


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"",
        lambda data: zlib.compress(zlib.decompress(data).replace(b'"index":[1,2]', b'"index":[2,1]')),
        lambda data: zlib.compress(zlib.decompress(data).replace(b'"bytes":[3,5]', b'"bytes":[3]')),
        lambda data: zlib.compress(zlib.decompress(data).replace(b'"bytes":[3,5]', b'"bytes":[3,-5]')),
        lambda data: zlib.compress(zlib.decompress(data).replace(b"00000042", b"00000043")),
    ],
)
def test_a_damaged_manifest_is_refused(damage: object) -> None:
    data = encode_manifest(Manifest(VERSION, {"a": {1: Part(3, 4), 2: Part(5, 6)}}))
    with pytest.raises(CorruptionError, match=f"manifest of version {VERSION}"):
        decode_manifest(damage(data), VERSION)  # type: ignore[operator]  # a lambda above


@pytest.mark.slow
def test_a_manifest_that_inflates_without_end_is_refused() -> None:
    for text, level in ((b" " * (65 << 20), 0), (b" " * (80 << 20), 1), (b"[]," * (1 << 20), 9)):
        with pytest.raises(CorruptionError, match=r"larger than the [0-9]+ bytes"):
            decode_manifest(zlib.compress(text, level), VERSION)


@pytest.mark.slow
def test_a_manifest_that_compresses_too_well_is_stored_as_it_is() -> None:
    manifest = Manifest(VERSION, {f"{'a' * 2000}{i}": {0: Part(1, 2)} for i in range(1000)})
    data = encode_manifest(manifest)
    assert len(data) > 2_000_000
    assert decode_manifest(data, VERSION) == manifest
    many = Manifest(VERSION, {"a": {i: Part(1 << 25, 7) for i in range(100_000)}})
    assert len(encode_manifest(many)) < 300_000
    assert decode_manifest(encode_manifest(many), VERSION) == many


@pytest.mark.parametrize(
    "path",
    [
        "",
        "tables/a",
        "tables/a/b/c",
        "tables/a/../weight",
        "tables/../weight",
        "tables//weight",
        "tables/a/zarr.json",
        "tables/a%2fb/weight",
        "tables/%FF/weight",
        "tables/a/w~",
        "dense/model/a~",
        "dense/other/a",
        "dense/state/~",
        "other/a/b",
    ],
)
def test_paths_that_no_array_has(path: str) -> None:
    entry = ArrayEntry("whole" if path.startswith("tables") else "dense", (10, 4), "float32", rows=10)
    with pytest.raises(CorruptionError, match=f"record of version {VERSION}: malformed: .*array"):
        decode_record(encode_record(replace(RECORD, arrays={path: entry})), VERSION)


@given(st.text(min_size=1, max_size=16))
def test_names_become_one_safe_segment(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        return
    segment = layout.encode_name(name)
    assert layout.decode_name(segment) == name
    assert "/" not in segment
    assert segment not in (".", "..", layout.NODE)
    assert not segment.startswith((".", "__"))
    assert segment.isascii()


@pytest.mark.parametrize(
    "text",
    [
        "../x",
        "000003-0123abcd.42",
        "000003-0123ABCD.00000042",
        VERSION + "/x",
        "",
        VERSION + "\n",
        VERSION.replace("3", "٣"),
    ],
)
def test_what_is_no_version_id_makes_no_key(text: str) -> None:
    with pytest.raises(FormatError, match="is not a version id"):
        layout.version_key(text)


def test_seals_differ_by_place() -> None:
    places = [
        (VERSION, "a", 0, 0),
        (BASE, "a", 0, 0),
        (VERSION, "b", 0, 0),
        (VERSION, "a", 1, 0),
        (VERSION, "a", 0, 1),
    ]
    assert len({layout.seal(*place) for place in places}) == len(places)
    assert 0 not in {layout.seal(*place) for place in places}
