"""Adaptive rows through Zarr against the bare codec, and two threads against one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numcodecs
import numpy as np
import zarr
from zarr.storage import MemoryStore

from benchmarks.codec_bench.contenders import ADAPTIVE_4
from benchmarks.codec_bench.machine import pinned
from benchmarks.codec_bench.rows import Rows, drawn
from benchmarks.codec_bench.sizes import Sizes
from benchmarks.codec_bench.timing import race

DIM = 64
_SERIALIZER: dict[str, Any] = {"name": "cnr.uniform", "configuration": {"scheme": "adaptive", "bits": 4}}
_PLAIN: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}


@dataclass(frozen=True)
class ZarrShare:
    """Shares of the bare codec's pace that zarr-python reaches: with the codec, and storing plain bytes without any,
    where its own copies and checks are all that it does.
    """

    chunk_bytes: int
    with_codec: float
    plain_bytes: float


def through_zarr(sizes: Sizes) -> dict[str, ZarrShare]:
    """By direction and raw bytes of a chunk; shards of four chunks."""
    found = {}
    for chunk_bytes in sizes.zarr_chunk_bytes:
        for way, share in _through_zarr(sizes, chunk_bytes).items():
            found[f"{way}, {chunk_bytes >> 20} MiB"] = share
    return found


def _through_zarr(sizes: Sizes, chunk_bytes: int) -> dict[str, ZarrShare]:
    rows, chunk_rows = _rows(sizes), chunk_bytes // (4 * DIM)
    pieces = _pieces(rows, chunk_rows)
    encoded = [ADAPTIVE_4.encode(piece) for piece in pieces]
    runs: dict[str, Callable[[], Any]] = {
        "bare encode": lambda: [ADAPTIVE_4.encode(piece) for piece in pieces],
        "bare decode": lambda: _decode_all(encoded, rows.shape, chunk_rows),
    }
    for name, serializer in (("codec", _SERIALIZER), ("plain", _PLAIN)):
        array = _array(rows, chunk_rows, serializer)
        runs[f"{name} encode"] = partial(array.__setitem__, slice(None), rows)
        runs[f"{name} decode"] = partial(array.__getitem__, slice(None))
    seconds = race(runs, sizes.rounds)
    return {
        way: ZarrShare(
            chunk_bytes,
            seconds[f"bare {way}"] / seconds[f"codec {way}"],
            seconds[f"bare {way}"] / seconds[f"plain {way}"],
        )
        for way in ("encode", "decode")
    }


def _array(rows: Rows, chunk_rows: int, serializer: dict[str, Any]) -> Any:
    array = zarr.create_array(
        MemoryStore(),
        shape=rows.shape,
        dtype="float32",
        chunks=(chunk_rows, DIM),
        shards=(4 * chunk_rows, DIM),
        fill_value=np.nan,
        serializer=serializer,
        compressors=[{"name": "crc32c"}],
        # Or Zarr would compare each chunk with the fill value before it is encoded.
        config={"write_empty_chunks": True},
    )
    array[:] = rows
    return array


def _decode_all(encoded: list[bytes], shape: tuple[int, ...], chunk_rows: int) -> Rows:
    """One new array of all rows, which is what reading through Zarr gives too."""
    out = np.empty(shape, np.float32)
    codec = numcodecs.get_codec({"id": "cnr_uniform"})
    for number, data in enumerate(encoded):
        codec.decode(data, out=out[number * chunk_rows : (number + 1) * chunk_rows])
    return out


def two_threads(sizes: Sizes) -> dict[str, float] | None:
    """How many times one thread's pace two threads reach, by direction; None where there is one core."""
    rows = _rows(sizes)
    pieces = _pieces(rows, sizes.zarr_chunk_bytes[0] // (4 * DIM))
    encoded = [ADAPTIVE_4.encode(piece) for piece in pieces]
    with pinned(2) as cores, ThreadPoolExecutor(1) as one, ThreadPoolExecutor(2) as two:
        if cores < 2:
            return None
        runs: dict[str, Callable[[], Any]] = {}
        for name, pool in (("one", one), ("two", two)):
            runs[f"{name} encode"] = _all(pool, ADAPTIVE_4.encode, pieces)
            runs[f"{name} decode"] = _all(pool, ADAPTIVE_4.decode, encoded)
        seconds = race(runs, sizes.rounds)
    return {way: seconds[f"one {way}"] / seconds[f"two {way}"] for way in ("encode", "decode")}


def _all(pool: ThreadPoolExecutor, function: Callable[[Any], Any], items: list[Any]) -> Callable[[], Any]:
    def run() -> None:
        for _ in pool.map(function, items):
            pass

    return run


def _rows(sizes: Sizes) -> Rows:
    return drawn("normal", sizes.zarr_bytes // (4 * DIM), DIM)


def _pieces(rows: Rows, chunk_rows: int) -> list[Rows]:
    return [rows[first : first + chunk_rows] for first in range(0, len(rows), chunk_rows)]
