"""Durable object storage for checkpoints: objects under keys, on local disks, S3 and more."""

from cnr_backends.backend import Backend, WrapperBackend
from cnr_backends.backend_store import BackendStore, zarr_store
from cnr_backends.errors import (
    ArgumentError,
    BackendError,
    KeyNameError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooShortError,
    OpenError,
    ShardError,
    StorageError,
    StorageFullError,
)
from cnr_backends.opening import open_backend
from cnr_backends.shards import ShardIndex, build_shard, check_chunk, index_nbytes, parse_index
from cnr_backends.transfer import Transfer

__version__ = "0.1.0"

__all__ = [
    "open_backend",
    "Backend",
    "WrapperBackend",
    "BackendStore",
    "zarr_store",
    "Transfer",
    "build_shard",
    "index_nbytes",
    "parse_index",
    "check_chunk",
    "ShardIndex",
    "BackendError",
    "OpenError",
    "KeyNameError",
    "ArgumentError",
    "ObjectNotFoundError",
    "ObjectExistsError",
    "StorageError",
    "StorageFullError",
    "ObjectTooShortError",
    "ShardError",
]
