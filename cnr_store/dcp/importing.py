"""Imports a checkpoint that `torch.distributed.checkpoint` wrote into files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from cnr_backends import open_backend
from cnr_store.catalog.catalog import Url
from cnr_store.catalog.claims import check_no_live_writer
from cnr_store.catalog.version_info import VersionInfo
from cnr_store.dcp.writer import Writer
from cnr_store.policies.checks import integer
from cnr_store.policies.widths import Bits
from cnr_store.training.saving.codec_choice import CodecOption


class _FlatPlanner(DefaultSavePlanner):
    """Saves a flat state dict under the names that it has in a nested one."""

    def __init__(self, paths: Mapping[str, Sequence[str | int]] | None) -> None:
        super().__init__(flatten_state_dict=False)
        self._paths = paths

    def create_local_plan(self) -> SavePlan:
        return replace(super().create_local_plan(), planner_data=self._paths)


def import_checkpoint(
    path: str | os.PathLike[str],
    url: Url,
    step: int = 0,
    *,
    tables: Sequence[str] = (),
    bits: Bits | None = None,
    codec: CodecOption = None,
    workers: int = 2,
    **storage_options: Any,
) -> VersionInfo:
    """Store a checkpoint that DCP's `FileSystemWriter` wrote, of any number of ranks, as a version.

    Import only what you trust: the checkpoint's metadata and its values that are no tensors are pickles, which torch
    loads, and loading a pickle runs whatever code is in it. What is stored holds none. One process reads the whole
    checkpoint into its memory.

    Parameters
    ----------
    path
        The checkpoint's folder.
    url, storage_options
        The store: an fsspec URL, a path, or a Zarr store, and options of its filesystem. The version becomes the
        latest. No run may be live there.
    step
        The step that the version gets.
    tables, bits, codec, workers
        As in `Writer`.

    Returns
    -------
    The new version.

    Raises
    ------
    torch.distributed.checkpoint.CheckpointException
        The checkpoint can't be read, or not be stored: a value in it is more than JSON holds exactly, an option is out
        of range, or writing failed. Nothing was stored.
    SupersededError
        A run is or may be live there. Nothing was stored.
    """
    step = integer("step", step, minimum=0)
    writer = Writer(
        url, tables=tables, bits=bits, codec=codec, workers=workers, no_dist=True, **storage_options
    )
    writer._writer.of_run = False
    check_no_live_writer(open_backend(url, **storage_options))
    metadata = FileSystemReader(path).read_metadata()
    state: dict[str, Any] = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        if isinstance(each, TensorStorageMetadata)
        else None
        for name, each in metadata.state_dict_metadata.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    load(state, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)
    try:
        save(
            state,
            checkpoint_id=str(step),
            storage_writer=writer,
            planner=_FlatPlanner(metadata.planner_data),
            no_dist=True,
        )
        return writer.version
    finally:
        writer.close()
