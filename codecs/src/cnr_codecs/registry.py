"""Makes row codecs from their names and configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cnr_codecs.compressed import Followed
from cnr_codecs.errors import CodecConfigError
from cnr_codecs.kmeans.kmeans import KMeansRows
from cnr_codecs.lattice.floating import FloatingRows
from cnr_codecs.lattice.lattice import LatticeRows
from cnr_codecs.protocol import RowCodec
from cnr_codecs.rows import LosslessRows
from cnr_codecs.uniform.uniform import UniformRows

_Codec = UniformRows | KMeansRows | LatticeRows | FloatingRows | LosslessRows
_KINDS: tuple[type[_Codec], ...] = (UniformRows, KMeansRows, LatticeRows, FloatingRows, LosslessRows)
_CODECS = {f"cnr_{kind._name}": kind for kind in _KINDS}


def row_codec(config: str | Mapping[str, Any] | RowCodec) -> RowCodec:
    """Return the row codec of a name or of a configuration, such as {"id": "cnr_uniform", "bits": 4}.

    Parameters
    ----------
    config
        A name, such as "cnr_uniform", or a configuration. Its entry "then", if any, lists the numcodecs
        configurations that follow the row codec; see `Followed`. A row codec is returned as it is.

    Raises
    ------
    CodecConfigError
        The name is unknown, or the codec doesn't take these options.
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
