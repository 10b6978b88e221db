"""The command `cnr`: its commands and exit status."""

from __future__ import annotations

import codecs
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from cnr_backends import BackendError
from cnr_codecs import CodecError, cache_folders, compile_all
from cnr_store.cli.demo import demo
from cnr_store.cli.export import export, import_, serve
from cnr_store.cli.inspection import cat, diff, du, info
from cnr_store.cli.listing import ls
from cnr_store.cli.maintenance import compact, gc, pin, repair, tag, unpin, untag, verify
from cnr_store.cli.options import AsJson
from cnr_store.cli.output import plain, print_json, print_line, progress, say
from cnr_store.cli.report.page import report
from cnr_store.cli.report.watch import watch
from cnr_store.cli.simulate import simulate
from cnr_store.errors import CheckpointError, for_shell
from cnr_store.format import layout
from cnr_store.training.tracking.bitmap import compile_kernels

_NARROW = 60
"""Columns of a terminal. With fewer, the tables of help would cut the names of options, so it is plain text."""
_ASCII = str.maketrans("×…", "x~")
_SPELLED = "cnr_spelled"
"""The name of `_spell` among the handlers of errors in encoding."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"cnr {metadata.version('cnr-store')}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the release and exit."),
    ] = False,
) -> None:
    """Options of the command itself."""


def warm(as_json: AsJson = False) -> None:
    """Compile all kernels in advance, so that no process compiles them at its first save or load.

    They are kept in NUMBA_CACHE_DIR, beside the package, or in the home folder,
    and are valid for this type of processor.
    """
    began = time.perf_counter()
    with progress("compiling") as on_progress:
        for done, _ in enumerate(chain(compile_all(), compile_kernels()), 1):
            if not _kernel_files():  # not even of the first: the others take long
                say(
                    "cnr: no kernel could be kept: set NUMBA_CACHE_DIR to a folder that can be written, with room"
                )
                raise typer.Exit(1)
            on_progress(done, None)
    seconds = time.perf_counter() - began
    folders, files = _kernel_folders(), _kernel_files()
    nbytes = sum(file.stat().st_size for file in files)
    kept = {"seconds": round(seconds, 1), "files": len(files), "bytes": nbytes}
    if as_json:
        print_json({**kept, "folders": [str(folder) for folder in folders]})
    else:
        print_line(f"compiled in {seconds:.1f} s: {len(files)} files, {nbytes / 1e6:.1f} MB, in")
        for folder in folders:
            print_line(f"  {folder}")


def _kernel_folders() -> list[Path]:
    """Where kernels are kept, as far as there is anything."""
    return [folder for folder in cache_folders() if folder.is_dir()]


def _kernel_files() -> list[Path]:
    return [file for folder in _kernel_folders() for file in folder.glob("*.nb[ci]")]


app = typer.Typer(
    name="cnr",
    help="Inspect, check, clean up and export a store of recommendation model checkpoints, or run a demo.",
    callback=_options,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    # Only an unforeseen error ends with a traceback, and Python's own says enough.
    pretty_exceptions_enable=False,
)
for command in (
    *(demo, ls, info, cat, du, verify, repair, diff, compact, gc, pin, unpin, tag, untag),
    *(export, import_, serve, report, watch, simulate, warm),
):
    app.command(command.__name__.rstrip("_"))(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 success, 1 an error, 2 wrong usage, 3 damage, 4 what may be damage."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors=_SPELLED)  # a terminal may know fewer letters than names use
    token = for_shell.set(True)
    app.rich_markup_mode = "markdown" if get_terminal_size().columns >= _NARROW else None
    try:
        try:
            app(args=None if arguments is None else list(arguments), prog_name="cnr")
        finally:
            for_shell.reset(token)
            if sys.stdout is not None:  # it was closed
                sys.stdout.flush()  # here, since at exit nobody could tell that it failed
    except (CheckpointError, BackendError, CodecError) as error:
        _fail(f"{error}{_advice(sys.argv[1:] if arguments is None else list(arguments))}")
    except BrokenPipeError:  # whoever reads has had enough
        _drop_output()
        sys.exit(1)
    except OSError as error:  # storage raises BackendError: this is standard output, or a file that was named
        _drop_output()
        _fail(str(error) if error.filename else f"the output could not be written: {error}")


def _advice(arguments: Sequence[str]) -> str:
    """What to do if the second argument is a store of this machine and the first is none; of `import` otherwise."""
    with suppress(OSError, ValueError):  # no file can have such a name, or there are fewer
        first, second = (Path(each, layout.ROOT_KEY).is_file() for each in arguments[1:3])
        if arguments[0] == "import":
            return "; the file comes first, then the store's URL" if first and not second else ""
        if second and not first and "://" not in arguments[1] and not arguments[1].startswith("-"):
            return "; the store's URL comes first"
    return ""


def _spell(error: UnicodeError) -> tuple[str, int]:
    """What stands for letters that a terminal does not know: others as wide, or their numbers."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    unknown = error.object[error.start : error.end].translate(_ASCII)
    return unknown.encode("ascii", "backslashreplace").decode("ascii"), error.end


codecs.register_error(_SPELLED, _spell)


def _fail(message: str) -> NoReturn:
    lines = "\n".join(map(plain, message.split("\n")))
    Console(stderr=True, soft_wrap=True).print(Text(f"cnr: {lines}", style="red"))
    sys.exit(1)


def _drop_output() -> None:
    """Let nothing more be written to standard output: Python tries again at exit, and would complain."""
    with suppress(OSError, ValueError):  # it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
