"""What a row codec is, and how one is made from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from cnr_codecs.errors import CodecConfigError
from cnr_codecs.followed import Followed
from cnr_codecs.kmeans import KMeansRows
from cnr_codecs.rows import LosslessRows, Offsets, Rows
from cnr_codecs.uniform import UniformRows


@runtime_checkable
class RowCodec(Protocol):
    """Turns rows of a chunk into a payload, which says itself how it is decoded.

    Implementations are immutable, and may be used by many threads at once.
    """

    def get_config(self) -> dict[str, Any]:
        """The configuration that makes an equal codec: {"id": ..., option: value}."""
        ...

    def zarr_codec(self) -> dict[str, Any]:
        """The entry of a Zarr v3 array's `codecs`: {"name": ..., "configuration": {...}}."""
        ...

    def bytes_per_row(self, dim: int, element: str) -> float:
        """Expected encoded bytes of a row of `dim` values of an element type, without its share of the row
        set.

        Raises:
            RowsError: the codec doesn't store that element type.
        """
        ...

    def encode_rows(
        self, values: Rows, offsets: Offsets | None, rows: int, *, element: str, seal: int = 0
    ) -> bytes:
        """The payload of a chunk of `rows` rows, of which it holds these.

        Args:
            values: (n, dim), of the element type's array dtype.
            offsets: (n,) integers: where in the chunk each row belongs, strictly increasing; None for rows
            0 to n - 1.
            rows: rows of the chunk, at least 1.
            element: the element type's name, such as "float32".
            seal: 64 bits that bind the payload to its place; 0 for none.

        Raises:
            RowsError: an argument is not as said above, or the codec doesn't store that element type.
        """
        ...


_CODECS: dict[str, type[UniformRows] | type[KMeansRows] | type[LosslessRows]] = {
    "cnr_uniform": UniformRows,
    "cnr_kmeans": KMeansRows,
    "cnr_rows": LosslessRows,
}


def row_codec(config: str | Mapping[str, Any] | RowCodec) -> RowCodec:
    """The row codec of a name, such as "cnr_uniform", or a configuration, {"id": "cnr_uniform", "bits": 4}.

    The configuration's "then", if there, lists numcodecs' configurations of what follows; see `Followed`. A row
    codec is returned as it is.

    Raises:
        CodecConfigError: the name is unknown, or it doesn't take these options.
    """
    if isinstance(config, RowCodec):
        return config
    if isinstance(config, str):
        config = {"id": config}
    if not isinstance(config, Mapping):
        raise CodecConfigError(
            f"expected a codec's name, configuration or object, got {type(config).__name__}"
        )
    options = dict(config)
    name = options.pop("id", None)
    if name not in _CODECS:
        raise CodecConfigError(f"unknown codec {name!r}; use one of {', '.join(_CODECS)}")
    then = options.pop("then", None)
    try:
        codec = _CODECS[name](**options)
    except TypeError as error:
        raise CodecConfigError(f"codec {name} doesn't take these options: {error}") from error
    return codec if then is None else Followed(codec, then)
