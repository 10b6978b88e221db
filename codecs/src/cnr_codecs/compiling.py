"""Compiles kernels before they are needed: each waits for the compiler at its first use, once in an installation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cnr_codecs.compressed import Followed
from cnr_codecs.elements import ELEMENTS, array_dtype, element_named, round_to_bfloat16
from cnr_codecs.kmeans.kmeans import KMeansRows
from cnr_codecs.lattice.floating import FloatingRows
from cnr_codecs.lattice.lattice import LatticeRows
from cnr_codecs.payload.coded import MAX_CODE, has_floating_codes
from cnr_codecs.payload.decode import decode_into
from cnr_codecs.payload.payload import ParameterType, Scheme, Segment, build
from cnr_codecs.payload.pending import Pending
from cnr_codecs.payload.rowset import RowSet
from cnr_codecs.payload.validate import parse
from cnr_codecs.protocol import RowCodec, Rows
from cnr_codecs.rows import LosslessRows
from cnr_codecs.uniform.uniform import UniformRows

_ROWS = 2


def compile_decoding(element: str) -> Iterator[None]:
    """Compile what decodes lossless and uniformly quantized rows, one kernel a step.

    Parameters
    ----------
    element
        The name of the rows' element type.
    """
    kind, dim = element_named(element), 8
    raw = np.zeros((_ROWS, dim), array_dtype(element))
    _decode(LosslessRows().encode_rows(raw, None, _ROWS, element=element), element, dim)
    yield
    if kind.quantizable:
        # The same kernel serves parameters that are float32.
        codes, values = np.zeros((_ROWS, dim // 2), np.uint8), np.zeros((2, _ROWS), "<f2")
        row_set = RowSet.first(_ROWS, _ROWS)
        segment = Segment(Scheme.ASYMMETRIC, 4, ParameterType.FLOAT16, row_set, values, codes)
        _decode(build(_ROWS, dim, kind, [segment]), element, dim)
        yield


def compile_encoding(codec: RowCodec, dim: int, element: str) -> Iterator[None]:
    """Compile what encodes rows with a codec, and decodes them, one kernel a step.

    Parameters
    ----------
    codec
        Any row codec.
    dim
        Columns of the rows: the codec may treat wide ones in another way.
    element
        The name of the rows' element type.
    """
    # Two rows of varied values run every kernel that full tables will run.
    rows = np.linspace(-1, 1, _ROWS * dim, dtype=array_dtype(element)).reshape(_ROWS, dim)
    rows = round_to_bfloat16(rows) if element == "bfloat16" else rows
    payload = codec.encode_rows(rows, None, _ROWS, element=element)
    yield
    _decode(payload, element, dim)
    yield
    own = codec.codec if isinstance(codec, Followed) else codec
    if isinstance(own, LatticeRows) and own.relative:
        _compile_relative(own, rows, element)
        yield


def _compile_relative(codec: LatticeRows, rows: Rows, element: str) -> None:
    codec, zeros, known = codec.with_step(0.5), np.zeros(rows.shape, np.int8), np.ones(len(rows), np.bool_)
    payload, *_ = codec.encode_over(rows, None, len(rows), zeros, known, element=element)
    far = np.full(rows.shape, MAX_CODE, np.int16)  # differences of more than 16 bits
    codec.encode_over(rows, None, len(rows), far, known, element=element)
    older = codec.encode_rows(np.zeros_like(rows), None, len(rows), element=element)
    out, need = np.empty_like(rows), np.ones(len(rows), np.uint8)
    pending = Pending(len(rows), rows.shape[1], out if element == "float32" else None)
    for each in (payload, older):
        decode_into(parse(each), out, need, 0, pending)
    pending.prove()


def compile_all() -> Iterator[None]:
    """Compile every kernel of this package."""
    for element in (element.name for element in ELEMENTS if element.quantizable):
        yield from compile_decoding(element)
        yield from compile_encoding(KMeansRows(2), 16, element)
        yield from compile_encoding(LatticeRows(), 16, element)
    schemes = (
        UniformRows(bits=4),
        UniformRows(bits=8),
        UniformRows("symmetric", 4),
        UniformRows(bits=4, bins=25),
    )
    codecs: list[tuple[RowCodec, int]] = [(codec, 16) for codec in schemes]
    # Few values of a row are clustered exactly, many by iteration.
    codecs += [(KMeansRows(2, exact=True), 16), (KMeansRows(2), 4096), (LatticeRows(relative=True), 16)]
    codecs += [(FloatingRows(23), 16)]
    for codec, dim in codecs:
        yield from compile_encoding(codec, dim, "float32")
    for kind in filter(has_floating_codes, ELEMENTS):
        yield from compile_encoding(FloatingRows(3), 16, kind.name)


def _decode(payload: bytes, element: str, dim: int) -> None:
    decode_into(parse(payload), np.empty((_ROWS, dim), array_dtype(element)), np.ones(_ROWS, np.uint8))
