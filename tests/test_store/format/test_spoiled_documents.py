"""Spoiled records and manifests are refused by errors of our tree, or read as what they were."""

from __future__ import annotations

import hashlib
import json
import random
import re
import resource
import secrets
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from cnr_store.errors import CheckpointError
from cnr_store.format.manifest import decode_manifest
from cnr_store.format.record_document import decode_record
from tests.nightly import FACTOR, NIGHT
from tests.paths import ROOT

STORES = ROOT / "tests" / "test_store" / "golden" / "stores"
DOCUMENTS = 10_000 if NIGHT else 1_500
MOST_GROWN_BYTES = 256 << 20
VALUES: tuple[Any, ...] = (None, True, -1, 0, 2**62, 2**63, 1e308, 0.5, "", "..", "/", "\x00", [], {}, [[]])
DIGEST = re.compile(rb'"digest":"[0-9a-f]{64}"')


@dataclass(frozen=True)
class Documents:
    """What golden stores hold: bytes, the version that they are of, and the folder that they lie in."""

    records: tuple[tuple[bytes, str, str], ...]
    manifests: tuple[tuple[bytes, str], ...]


@pytest.fixture(scope="module")
def documents() -> Documents:
    records, manifests = [], []
    for path in sorted(STORES.glob("*/store.zip")):
        with zipfile.ZipFile(path) as packed:
            for name in packed.namelist():
                match name.split("/"):
                    case [("versions" | "folds") as prefix, version, "zarr.json"]:
                        records.append((packed.read(name), version, prefix))
                    case ["versions", version, "manifest"]:
                        manifests.append((packed.read(name), version))
    return Documents(tuple(records), tuple(manifests))


def spoil_bytes(data: bytes, draw: random.Random) -> bytes:
    """Bytes with some flipped, cut, doubled or put in."""
    found = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        at = draw.randrange(len(found) + 1)
        way = draw.randrange(4)
        if way == 0 and at < len(found):
            found[at] ^= 1 << draw.randrange(8)
        elif way == 1:
            del found[at : at + draw.choice([1, 2, 50, len(found)])]
        elif way == 2:
            found[at:at] = draw.randbytes(draw.choice([1, 4, 100]))
        else:
            found[at:at] = found[max(0, at - 40) : at]
    return bytes(found)


def spoil_values(doc: Any, draw: random.Random) -> Any:
    """A document with one value, or one member, replaced, lost or under another name."""
    places = list(_places(doc))
    holder, key = draw.choice(places)
    way = draw.random()
    if way < 0.7:
        holder[key] = draw.choice([*VALUES, _value(*draw.choice(places))])
    elif way < 0.85 or isinstance(holder, list):
        del holder[key]
    else:
        holder[draw.choice(["", "..", "a/b", str(key) + "x"])] = holder.pop(key)
    return doc


def _value(holder: Any, key: Any) -> Any:
    return json.loads(json.dumps(holder[key]))


def _places(doc: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in list(doc.items()) if isinstance(doc, dict) else list(enumerate(doc)):
        yield doc, key
        if isinstance(value, dict | list):
            yield from _places(value)


def with_digest(doc: Any) -> bytes:
    """A record's bytes with the digest that a forger would compute."""
    data = json.dumps(doc, separators=(",", ":")).encode()
    zeros = b'"digest":"' + b"0" * 64 + b'"'
    blank = DIGEST.sub(zeros, data, count=1)
    return blank.replace(zeros, b'"digest":"' + hashlib.sha256(blank).hexdigest().encode() + b'"', 1)


def check_refused(read: Callable[[], Any], exact: Any, counts: Counter[str], *, forged: bool) -> None:
    """Only errors of our tree; and unless a forger was at work, no other values."""
    try:
        found = read()
    except CheckpointError:
        counts["refused"] += 1
        return
    counts["read"] += 1
    assert forged or found == exact


def refused(documents: Documents, count: int, seed: int) -> Counter[str]:
    draw, counts = random.Random(seed), Counter[str]()
    for number in range(count):
        if number % 4 == 0:
            packed, version = draw.choice(documents.manifests)
            exact = decode_manifest(packed, version)
            data = spoil_bytes(packed, draw)
            if number % 8 == 0:
                doc = spoil_values(json.loads(zlib.decompress(packed)), draw)
                data = zlib.compress(json.dumps(doc).encode())
            # What a manifest says is proven by its digest in the record.
            check_refused(lambda: decode_manifest(data, version), exact, counts, forged=True)  # noqa: B023
            continue
        data, version, prefix = draw.choice(documents.records)
        same = decode_record(data, version, prefix)
        forged = number % 4 == 1
        data = with_digest(spoil_values(json.loads(data), draw)) if forged else spoil_bytes(data, draw)
        check_refused(lambda: decode_record(data, version, prefix), same, counts, forged=forged)  # noqa: B023
    return counts


def check_memory(documents: Documents, count: int, seed: int) -> None:
    refused(documents, 200, seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts = refused(documents, count, seed)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < MOST_GROWN_BYTES
    assert counts["refused"] > count / 2
    assert counts["read"] > count / 50, "forgeries went no deeper than the digest"


@pytest.mark.slow
def test_spoiled_documents_are_refused(documents: Documents) -> None:
    check_memory(documents, DOCUMENTS, 20261122)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_a_million_spoiled_documents_are_refused(documents: Documents) -> None:
    check_memory(documents, 100_000 * FACTOR, secrets.randbits(32))
