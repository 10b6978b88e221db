"""Loads kernels when it is imported: once in the process that forks ranks, rather than in each of them."""

from __future__ import annotations

from cnr_codecs import LatticeRows, UniformRows, compile_decoding, compile_encoding
from cnr_store.training.tracking.bitmap import compile_kernels

_CODECS = (UniformRows(bits=4), UniformRows(bits=8), LatticeRows(relative=True))

for _steps in (
    compile_decoding("float32"),
    *(compile_encoding(codec, 16, "float32") for codec in _CODECS),
    compile_kernels(),
):
    for _ in _steps:
        pass
