"""Options that commands share, and the parsing and checking of their values."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from cnr_store.errors import OptionError
from cnr_store.policies.policy import check_policy
from cnr_store.policies.widths import check_bits

Url = Annotated[str, typer.Argument(metavar="URL", help="The store: a folder, s3://..., or any fsspec URL.")]

OWN_PARAMETERS = frozenset(
    {
        *("deep", "dry_run", "end_run", "format", "grace_seconds", "ids", "keep_best", "keep_every"),
        *("keep_last", "name", "newer", "older", "overwrite", "progress", "reason", "tables", "target"),
        *("target_options", "url", "version", "versions", "workers"),
    }
)
"""Named parameters of the library's functions, which a storage option must not be called."""


def _check_storage_options(text: str) -> str:
    taken = sorted(OWN_PARAMETERS.intersection(parse_options(text)))
    if taken:
        raise typer.BadParameter(f"{', '.join(taken)}: these are not options of a filesystem")
    return text


def _check_policy(name: str) -> str:
    try:
        return check_policy(name)
    except OptionError as error:
        raise typer.BadParameter(str(error)) from error


def check_bits_text(text: str | None) -> str | None:
    """The text of a width, if there is such a width."""
    if text is not None:
        parse_bits(text)
    return text


StorageOptions = Annotated[
    str,
    typer.Option(
        "--storage-options",
        metavar="JSON",
        help='Options of the filesystem, as in fsspec: {"endpoint_url": "..."}.',
        callback=_check_storage_options,
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        help="Policy of the saves: full, one-shot, consecutive, intermittent or auto.",
        callback=_check_policy,
    ),
]
Width = Annotated[
    str,
    typer.Option(
        metavar="auto|2|3|4|8|32", help="Bits per stored value; 32 is lossless.", callback=check_bits_text
    ),
]
OfVersion = Annotated[
    str, typer.Option("--version", metavar="VERSION", help="An id, a step, a tag, or latest.")
]
VersionName = Annotated[str, typer.Argument(metavar="VERSION", help="An id, a step, a tag, or latest.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def parse_options(text: str) -> dict[str, Any]:
    """A filesystem's options from JSON text. `typer.BadParameter` if it is not a JSON object."""
    try:
        options = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}") from error
    if not isinstance(options, dict):
        raise typer.BadParameter(f'give a JSON object, like {{"anon": true}}, not {text}')
    return options


def parse_version(text: str) -> str | int:
    """A version as the library takes it: digits are a step, unless there are too many for a number."""
    try:
        return int(text) if text.isascii() and text.isdecimal() else text
    except ValueError:
        return text


def parse_bits(text: str) -> int | str:
    """A width of quantized values as the library takes it. `typer.BadParameter` if there is no such width."""
    bits = int(text) if (len(text) == 1 and text.isascii() and text.isdecimal()) or text == "32" else text
    try:
        check_bits(bits)
    except OptionError as error:
        raise typer.BadParameter(
            f"there is no width {text}: give auto, 2, 3, 4, 8, or 32 (lossless)"
        ) from error
    return bits


def require(what: str, extra: str, *modules: str) -> None:
    """Check that the libraries of a command are installed; the error names the extra that installs them."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise OptionError(f"{what} needs {' and '.join(missing)}: pip install 'cnr-store[{extra}]'")
