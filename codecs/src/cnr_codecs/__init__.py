"""Row-wise codecs for embedding tables: they encode rows of a chunk to bytes, for numcodecs and Zarr v3 too."""

from cnr_codecs.compiling import compile_all, compile_decoding, compile_encoding
from cnr_codecs.compressed import Compressors, Followed, most_packed_bytes, row_codec, zarr_codecs
from cnr_codecs.elements import Element, array_dtype, element_of, fill_value
from cnr_codecs.errors import (
    CodecConfigError,
    CodecError,
    ParentError,
    PayloadError,
    PayloadLimitError,
    RowsError,
    UnsupportedPayloadError,
)
from cnr_codecs.kernels.building.compiled import cache_folders
from cnr_codecs.kmeans.kmeans import KMeansRows
from cnr_codecs.lattice.floating import FloatingRows
from cnr_codecs.lattice.lattice import LatticeRows
from cnr_codecs.lattice.steps import lattice_step
from cnr_codecs.payload.decode import decode_into, present_rows
from cnr_codecs.payload.head import reseal, rows_written
from cnr_codecs.payload.moving import merge_segments, split_segments, take_rows
from cnr_codecs.payload.payload import ParameterType, Payload, Scheme, Segment
from cnr_codecs.payload.payload import build as build_payload
from cnr_codecs.payload.pending import Pending
from cnr_codecs.payload.rowset import RowSet, RowSetKind
from cnr_codecs.payload.validate import parse
from cnr_codecs.protocol import ChunksCodec, RowCodec, pack
from cnr_codecs.report import CodecReport, choose_search, error_report
from cnr_codecs.rows import LosslessRows, check_rows, raw_segment
from cnr_codecs.uniform.uniform import UniformRows

__version__ = "0.1.0"

__all__ = [
    "RowCodec",
    "ChunksCodec",
    "UniformRows",
    "KMeansRows",
    "LatticeRows",
    "FloatingRows",
    "LosslessRows",
    "Followed",
    "row_codec",
    "zarr_codecs",
    "Compressors",
    "most_packed_bytes",
    "choose_search",
    "lattice_step",
    "error_report",
    "CodecReport",
    "parse",
    "present_rows",
    "rows_written",
    "decode_into",
    "reseal",
    "Payload",
    "Pending",
    "Segment",
    "Scheme",
    "ParameterType",
    "RowSet",
    "RowSetKind",
    "Element",
    "build_payload",
    "take_rows",
    "merge_segments",
    "split_segments",
    "check_rows",
    "raw_segment",
    "pack",
    "element_of",
    "array_dtype",
    "fill_value",
    "compile_decoding",
    "compile_encoding",
    "compile_all",
    "cache_folders",
    "CodecError",
    "CodecConfigError",
    "RowsError",
    "PayloadError",
    "ParentError",
    "PayloadLimitError",
    "UnsupportedPayloadError",
]
