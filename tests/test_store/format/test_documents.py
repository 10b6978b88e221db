"""Zarr documents are those that zarr makes, in the order in which it writes their members."""

from __future__ import annotations

import asyncio
import json
import math
import warnings
from typing import Any

import numpy as np
import pytest
from zarr.api.asynchronous import create_array
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from cnr_codecs import Followed, LosslessRows, array_dtype, fill_value, zarr_codecs
from cnr_store.format import arrays
from cnr_store.format.grid import Grid
from cnr_store.format.state_arrays import NUMBER_TYPES

CHECKSUM = {"name": "crc32c"}
FOLLOWERS = [
    [],
    [{"id": "zstd", "level": 7, "checksum": True}],
    [{"id": "blosc", "cname": "zstd", "clevel": 7, "shuffle": 0, "blocksize": 1024}, {"id": "lz4"}],
]


def made_by_zarr(**arguments: Any) -> str:
    async def make() -> bytes:
        store = MemoryStore()
        await create_array(store, name="a", **arguments)
        stored = await store.get("a/zarr.json", default_buffer_prototype())
        assert stored is not None
        return stored.to_bytes()

    with warnings.catch_warnings(action="ignore"):  # lz4 is in no specification
        return json.dumps(json.loads(asyncio.run(make())))


@pytest.mark.parametrize("then", FOLLOWERS, ids=len)
@pytest.mark.parametrize("shape", [(100, 8), (100,)])
@pytest.mark.parametrize("element", ["float32", "bfloat16", "float16", "int32", "uint8", "bool"])
def test_documents_of_rows(element: str, shape: tuple[int, ...], then: list[dict[str, Any]]) -> None:
    columns, fill = (*shape, 1)[1], fill_value(element)
    followers = zarr_codecs(Followed(LosslessRows(), then))[1:] if then else []
    found = arrays.rows_document(shape, element, Grid(100, columns, 16, columns, 64, columns), followers)
    expected = json.loads(
        made_by_zarr(
            shape=shape,
            chunks=(16, columns)[: len(shape)],
            shards=(64, columns)[: len(shape)],
            dtype=array_dtype(element).str,
            fill_value=math.nan if np.isnan(fill) else fill,
            serializer={"name": "cnr.rows"},
            compressors=[*followers, CHECKSUM],
            dimension_names=("row", "dim")[: len(shape)],
        )
    )
    # In short: what is the same for all is left out, and shards of such chunks have a short form.
    assert (expected.pop("attributes"), expected.pop("storage_transformers")) == ({}, [])
    expected["chunk_key_encoding"] = {"name": "default"}
    if not then:
        chunk = {"chunk_shape": expected["codecs"][0]["configuration"]["chunk_shape"]}
        expected["codecs"] = [{"name": "cnr.rows", "configuration": chunk}]
    assert json.dumps(found) == json.dumps(expected)


@pytest.mark.parametrize("dtype", NUMBER_TYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_documents_of_dense_arrays(shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    grid, codec = arrays.dense_grid(shape, dtype), {"name": "bytes", "configuration": {"endian": "little"}}
    options = {"shape": shape, "shards": None, "dtype": dtype.str, "serializer": codec}
    expected = made_by_zarr(chunks=grid.chunk, fill_value=0, compressors=[CHECKSUM], **options)
    found = arrays.dense_document(grid, "x")
    assert found.pop("dimension_names") == [f"x.{axis}" for axis in range(len(shape))]
    assert json.dumps(found) == expected
    if shape and dtype.kind != "c":
        chunks, fill = (16, *shape[1:]), math.nan if dtype.kind == "f" else 0
        names, plain = ("row", "dim")[: len(shape)], arrays.plain_rows_document(shape, dtype, 16)
        made = made_by_zarr(chunks=chunks, fill_value=fill, compressors=[], dimension_names=names, **options)
        assert plain == json.loads(made)
