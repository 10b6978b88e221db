"""Once every kernel is compiled, no codec waits for the compiler; and kernels stay within their arrays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cnr_codecs import FloatingRows, LatticeRows, RowCodec, UniformRows, cache_folders, compile_encoding
from cnr_codecs.kernels.packed import classify
from tests.paths import ROOT

_WARM = """
from cnr_codecs import compile_all
for _ in compile_all():
    pass
"""
_USE = """
import numba.core.event as events
import numpy as np
from cnr_codecs import *
from cnr_codecs.elements import round_to_bfloat16

compiled = []

class Listener(events.Listener):
    def on_start(self, event):
        compiled.append(event.data["dispatcher"].py_func.__name__)

    def on_end(self, event):
        pass

def rows_of(dim, element):
    values = np.random.default_rng(0).normal(size=(60, dim)).astype(np.float32)
    return round_to_bfloat16(values) if element == "bfloat16" else values.astype(array_dtype(element))

def decode(data, dim, element, count, pending=None):
    out = np.zeros((count, dim + 3), array_dtype(element))
    for place in (np.zeros((count, dim), out.dtype), out[:, 1 : dim + 1]):
        decode_into(parse(data), place, np.ones(count, np.uint8), 0, pending)

def use(codec, dim, element):
    values = rows_of(dim, element)
    for read_only in (False, True):
        values.flags.writeable = not read_only
        for offsets, rows in ((None, 60), (np.arange(60) * 3, 180), (np.arange(60) * 41, 3000)):
            decode(codec.encode_rows(values, offsets, rows, element=element), dim, element, rows)
    if getattr(codec, "relative", False):
        codes = np.zeros((60, dim), np.int8)
        newer, *_ = codec.encode_over(values, None, 60, codes, np.arange(60) % 3 > 0, element=element)
        for in_values in {False, element == "float32"}:
            out, need = np.zeros_like(values), np.ones(60, np.uint8)
            pending = Pending(60, dim, out if in_values else None)
            for data in (newer, codec.encode_rows(np.zeros_like(values), None, 60, element=element)):
                decode_into(parse(data), out, need, 0, pending)
            pending.prove()
        far = np.full((60, dim), 32767, np.int16)  # differences of more than 16 bits
        codec.encode_over(values, None, 60, far, np.ones(60, bool), element=element)

events.register("numba:compile", Listener())
uniform = [UniformRows(bits=bits) for bits in (2, 4, 8)]
uniform += [UniformRows("symmetric", 3), UniformRows(bits=2, bins=25)]
kmeans = [KMeansRows(3), KMeansRows(2, group="cluster"), KMeansRows(2, exact=True)]
lattice = [LatticeRows(), LatticeRows(step=0.5, relative=True)]
for dim in (1, 3, 16):
    for element in ("float32", "float16", "bfloat16"):
        for codec in (*uniform, *kmeans, *lattice, FloatingRows(2), FloatingRows(23), LosslessRows()):
            use(codec, dim, element)
    for codec in (FloatingRows(2), LosslessRows()):
        use(codec, dim, "float64")
print(*compiled)
"""


@pytest.mark.parametrize("codec", [UniformRows(), LatticeRows(), FloatingRows(2)], ids=repr)
def test_kernels_are_compiled_for_rows_of_any_element_type(codec: RowCodec) -> None:
    for element in ("float32", "float16", "bfloat16"):
        assert len(list(compile_encoding(codec, 16, element))) > 1


def test_relative_rows_are_compiled_for_differences_of_any_size() -> None:
    *_, _ = compile_encoding(LatticeRows(relative=True), 16, "float32")
    kinds = {str(signature[0].dtype) for signature in classify.signatures}
    assert kinds >= {"int16", "int32"}


def test_folders_of_compiled_kernels_are_known() -> None:
    assert cache_folders()


@pytest.mark.slow
@pytest.mark.nightly
def test_no_codec_waits_for_the_compiler_once_all_is_compiled(tmp_path: Path) -> None:
    def run(program: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout

    run(_WARM)
    assert run(_USE) == "\n"


_OUTSIDE = """
import numpy
from cnr_codecs.kernels.building.compiled import kernel

@kernel
def first(values):
    return values[0]

first(numpy.zeros(0, numpy.uint8))
"""


def _run_checked(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    checks = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(folder), "CNR_NIGHTLY_FACTOR": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **checks},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.nightly
def test_an_index_outside_is_seen(tmp_path: Path) -> None:
    assert "IndexError: index is out of bounds" in _run_checked(tmp_path, "-c", _OUTSIDE).stdout


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("folder", ["test_codecs", "test_store/training/tracking"])
def test_kernels_stay_within_their_arrays(tmp_path: Path, folder: str) -> None:
    """Only numba's check of every index sees it where nothing crashes."""
    quick = ("-q", "-p", "no:cacheprovider", "-m", "not slow and not server and not nightly")
    done = _run_checked(tmp_path, "-m", "pytest", f"tests/{folder}", *quick)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
