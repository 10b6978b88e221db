"""The codecs as numcodecs codecs: `numcodecs.get_codec({"id": "cnr_uniform", "scheme": "adaptive", "bits": 4})`."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from numcodecs.abc import Codec
from numcodecs.compat import ensure_ndarray

from cnr_codecs.dense import decode_dense
from cnr_codecs.elements import array_dtype, element_of
from cnr_codecs.errors import PayloadError, RowsError
from cnr_codecs.kmeans.kmeans import GroupName, KMeansRows
from cnr_codecs.lattice.floating import DEFAULT_MANTISSA_BITS, FloatingRows
from cnr_codecs.lattice.lattice import LatticeRows
from cnr_codecs.payload.head import DEFAULT_MAX_DECODED_BYTES
from cnr_codecs.payload.payload import Payload
from cnr_codecs.payload.plain import decode_plain
from cnr_codecs.payload.validate import parse
from cnr_codecs.protocol import RowCodec
from cnr_codecs.rows import LosslessRows
from cnr_codecs.uniform.uniform import SchemeName, UniformRows

# `encode` stores all rows, and one bit a float32 value is its densest code. A payload that expands more was not made
# here, and would let a few bytes take much memory.
_MAX_EXPANSION = 32


class _NumcodecsCodec(Codec):  # type: ignore[misc]  # numcodecs ships no types
    """What the codecs share. They encode arrays (rows, dim) or (rows,) to payloads, on the calling thread."""

    rows_codec: RowCodec

    def encode(self, buf: Any) -> bytes:
        """Return the payload of an array (rows, dim), or (rows,), which counts as dim 1."""
        values = ensure_ndarray(buf)
        if values.ndim == 1:
            values = values[:, None]
        if values.ndim != 2 or values.size == 0:
            raise RowsError(f"expected an array (rows, dim) or (rows,) with values, got shape {values.shape}")
        element = element_of(values.dtype)
        native = np.ascontiguousarray(values, array_dtype(element))
        return self.rows_codec.encode_rows(native, None, len(native), element=element)

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Return the array (rows, dim) of a payload, or `out`, filled: any writable buffer of as many bytes."""
        data = _payload_bytes(buf)
        limit = max(DEFAULT_MAX_DECODED_BYTES, _MAX_EXPANSION * data.nbytes)
        if out is None:
            chunk = decode_plain(data, limit)
            return decode_dense(parse(data, max_decoded_bytes=limit)) if chunk is None else chunk
        target = ensure_ndarray(out)
        limit = max(limit, target.nbytes)
        if not target.flags.carray or decode_plain(data, limit, target.reshape(-1)) is None:
            _fill(target, parse(data, max_decoded_bytes=limit))
        return out

    def get_config(self) -> dict[str, Any]:
        """Return the configuration that `numcodecs.get_codec` takes."""
        return self.rows_codec.get_config()

    def __repr__(self) -> str:
        options = {name: value for name, value in self.get_config().items() if name != "id"}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in options.items())})"


def _payload_bytes(buf: Any) -> npt.NDArray[np.uint8]:
    if type(buf) is bytes and buf:  # as `encode` makes them: the rest takes a microsecond
        return np.frombuffer(buf, np.uint8)
    try:
        data = ensure_ndarray(buf)
    except (TypeError, ValueError) as error:
        raise PayloadError(
            f"payload: expected contiguous bytes, got {type(buf).__name__}: {error}"
        ) from error
    if data.dtype.hasobject or not data.flags.c_contiguous:
        raise PayloadError(
            f"payload: expected contiguous bytes, got an array of {data.dtype} with strides {data.strides}"
        )
    flat: npt.NDArray[np.uint8] = data.reshape(-1).view(np.uint8)
    return flat


def _fill(target: npt.NDArray[Any], payload: Payload) -> None:
    """Decode into an array of the payload's dtype, of any byte order and layout, or into contiguous bytes."""
    dtype = array_dtype(payload.element)
    expected = payload.rows * payload.dim * dtype.itemsize
    if target.nbytes != expected or not target.flags.writeable:
        raise RowsError(
            f"out has {target.nbytes} bytes; the payload needs {expected}, writable, for "
            f"{payload.rows} x {payload.dim} {dtype} values"
        )
    if target.flags.carray and (target.dtype == dtype or target.dtype.itemsize == 1):
        chunk = target.reshape(-1).view(dtype).reshape(payload.rows, payload.dim)
        if chunk.flags.aligned:
            decode_dense(payload, chunk)
        else:
            chunk[...] = decode_dense(payload)
    elif target.dtype.newbyteorder("=") == dtype:
        target[...] = decode_dense(payload).reshape(target.shape)
    else:
        raise RowsError(f"out must be {dtype} or contiguous bytes for this payload, got {target.dtype}")


class UniformCodec(_NumcodecsCodec):
    """Uniform quantization of each row. The options are those of `cnr_codecs.UniformRows`."""

    codec_id: ClassVar[str] = "cnr_uniform"

    def __init__(
        self,
        scheme: SchemeName = "adaptive",
        bits: int = 4,
        bins: int | None = None,
        ratio: float | None = None,
    ) -> None:
        self.rows_codec = UniformRows(scheme, bits, bins, ratio)


class KMeansCodec(_NumcodecsCodec):
    """k-means of each row or group of rows. The options are those of `cnr_codecs.KMeansRows`."""

    codec_id: ClassVar[str] = "cnr_kmeans"

    def __init__(
        self,
        bits: int = 4,
        group: GroupName = "row",
        exact: bool = False,
        block_rows: int | None = None,
        clusters: int | None = None,
    ) -> None:
        self.rows_codec = KMeansRows(bits, group, exact, block_rows, clusters)


class LatticeCodec(_NumcodecsCodec):
    """Rows as integers on one step. The options are those of `cnr_codecs.LatticeRows`."""

    codec_id: ClassVar[str] = "cnr_lattice"

    def __init__(self, rms_step: float | None = None, step: float | None = None) -> None:
        self.rows_codec = LatticeRows(rms_step, step)


class FloatingCodec(_NumcodecsCodec):
    """Values with fewer bits of their mantissa. The options are those of `cnr_codecs.FloatingRows`."""

    codec_id: ClassVar[str] = "cnr_floating"

    def __init__(self, mantissa_bits: int = DEFAULT_MANTISSA_BITS) -> None:
        self.rows_codec = FloatingRows(mantissa_bits)


class RowsCodec(_NumcodecsCodec):
    """Rows stored bit for bit."""

    codec_id: ClassVar[str] = "cnr_rows"

    def __init__(self) -> None:
        self.rows_codec = LosslessRows()
