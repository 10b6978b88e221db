"""Writes stored rows into a table on a device: packed codes cross to it, and become values there."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from cnr_codecs.payload.payload import Scheme, Segment
from cnr_store.training.devices.support import kernels_on

Places = npt.NDArray[np.int64]
_UNIFORM = (Scheme.ASYMMETRIC, Scheme.SYMMETRIC)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def can_decode(segment: Segment, target: torch.Tensor) -> bool:
    """Whether `decode` takes a segment for a table. If not, the host decodes it."""
    is_plain = target.ndim == 2 and target.stride(1) == 1 and target.dtype in _DTYPES
    return segment.scheme in _UNIFORM and is_plain and kernels_on(target.device) is not None


def decode(segment: Segment, places: Places, target: torch.Tensor) -> None:
    """Write the rows of a segment into a table, on the stream that is current.

    The segment must be validated: the kernel trusts it. No place may be given twice.

    Parameters
    ----------
    segment
        As `can_decode` takes it.
    places
        (count,): which row of the table each of the segment's rows is; -1 for rows that are not wanted.
    target
        (rows, dim), of the element type of the payload.

    Raises
    ------
    ValueError
        A place is no row of the table, or the codes are not as wide as its rows.
    """
    wanted, width = np.flatnonzero(places >= 0), (int(target.shape[1]) * segment.bits + 7) // 8
    if (
        len(places) != len(segment.codes)
        or places.max(initial=-1) >= len(target)
        or segment.codes.shape[1] != width
    ):
        raise ValueError(
            f"codes of shape {segment.codes.shape} can't be written to {len(places)} places of a table of shape "
            f"{tuple(target.shape)}, whose rows take {width} bytes"
        )
    codes, parameters = segment.codes, segment.parameters
    if len(wanted) < len(places):
        codes, parameters, places = codes[wanted], parameters[:, wanted], places[wanted]
    packed, stored, ids = (
        torch.from_numpy(np.array(each, order="C")).to(target.device) for each in (codes, parameters, places)
    )
    is_symmetric = segment.scheme is Scheme.SYMMETRIC
    with torch.no_grad():
        kernels_on(target.device).decode_uniform(
            packed, stored, segment.bits, is_symmetric, ids, target.detach()
        )
