"""Quantizes the rows of a snapshot on their device, where that can be done."""

from __future__ import annotations

import logging
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from cnr_codecs.protocol import RowCodec
from cnr_store.training.devices import support
from cnr_store.training.devices.encode import can_encode, encode, least_bytes
from cnr_store.writing.plan import EncodedRows

log = logging.getLogger("cnr_store")


def encode_staged(
    path: str, codec: RowCodec | None, tensor: torch.Tensor, ids: npt.NDArray[np.int64] | None, room: int
) -> EncodedRows | None:
    """Quantize rows of an array where they are, as they are now.

    Parameters
    ----------
    path
        Of the array, for the log.
    codec
        None if its rows are needed as they are.
    tensor, ids
        What holds them; which ones, None for all.
    room
        Bytes that they may take in host memory.

    Returns
    -------
    None if the host has to: they are in its memory, or the device can't. The log says why, once for each array.
    """
    if not support.is_elsewhere(tensor.device):
        return None
    if tensor.ndim == 1:  # state of one number a row
        tensor = tensor[:, None]
    if codec is None:
        return _left_to_host(path, "ranks share its rows, and it is whole or in columns")
    if not can_encode(codec, tensor, ids is None):
        return _left_to_host(path, f"no kernel takes {codec.get_config().get('id')} for {tensor.dtype} there")
    if least_bytes(codec, tensor, len(tensor) if ids is None else len(ids)) > room:
        return _left_to_host(path, "they exceed snapshot_bytes")
    try:
        found = encode(codec, tensor, None if ids is None else torch.from_numpy(ids))
    except Exception as error:  # noqa: BLE001 - Triton raises what its compilers and drivers do
        # Whatever it was, memory that was short among others: if the device is lost, the host's way says so.
        log.warning(
            "%s: its rows could not be quantized on %s (%s: %s), so the host does",
            *(path, tensor.device, type(error).__name__, error),
        )
        return None
    return found if found.nbytes <= room else _left_to_host(path, "they exceed snapshot_bytes")


@lru_cache(maxsize=1024)
def _left_to_host(path: str, why: str) -> None:
    log.debug("%s: the host quantizes its rows: %s", path, why)
