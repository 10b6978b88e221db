"""`cnr warm`: compiles the kernels beforehand, for images of containers."""

from __future__ import annotations

import time
from itertools import chain
from pathlib import Path

import typer

from cnr_codecs import cache_folders, compile_all
from cnr_store.cli.options import AsJson
from cnr_store.cli.output import print_json, print_line, progress, say
from cnr_store.training.tracking.bitmap import compile_kernels


def warm(as_json: AsJson = False) -> None:
    """Compile all kernels in advance, so that no process compiles them at its first save or load.

    They are kept in NUMBA_CACHE_DIR, beside the package, or in the home folder,
    and are valid for this type of processor.
    """
    began = time.perf_counter()
    with progress("compiling") as on_progress:
        for done, _ in enumerate(chain(compile_all(), compile_kernels()), 1):
            if not _files():  # not even of the first: the others take long
                say(
                    "cnr: no kernel could be kept: set NUMBA_CACHE_DIR to a folder that can be written, with room"
                )
                raise typer.Exit(1)
            on_progress(done, None)
    seconds = time.perf_counter() - began
    folders, files = _folders(), _files()
    nbytes = sum(file.stat().st_size for file in files)
    kept = {"seconds": round(seconds, 1), "files": len(files), "bytes": nbytes}
    if as_json:
        print_json({**kept, "folders": [str(folder) for folder in folders]})
    else:
        print_line(f"compiled in {seconds:.1f} s: {len(files)} files, {nbytes / 1e6:.1f} MB, in")
        for folder in folders:
            print_line(f"  {folder}")


def _folders() -> list[Path]:
    """Where kernels are kept, as far as there is anything."""
    return [folder for folder in cache_folders() if folder.is_dir()]


def _files() -> list[Path]:
    return [file for folder in _folders() for file in folder.glob("*.nb[ci]")]
