"""`cnr export`, `import` and `serve`: versions for other tools, and from them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from cnr_backends import open_backend
from cnr_store.catalog.catalog import open_record
from cnr_store.cli.options import (
    AsJson,
    OfVersion,
    StorageOptions,
    Url,
    Width,
    parse_bits,
    parse_options,
    parse_version,
    require,
)
from cnr_store.cli.output import counted, plain, print_json, print_line, say, size_text
from cnr_store.reading import export as reading


class Format(StrEnum):
    """Formats of `cnr export`."""

    safetensors = "safetensors"
    zarr = "zarr"
    parquet = "parquet"


Target = Annotated[str, typer.Argument(metavar="TARGET", help="A path, or any fsspec URL.")]
FormatOption = Annotated[
    Format | None,
    typer.Option(
        help="By default, zarr or parquet if TARGET ends in .zarr or .parquet, otherwise safetensors.",
    ),
]
TargetOptions = Annotated[
    str,
    typer.Option(
        "--target-options", metavar="JSON", help="Options of the filesystem of TARGET, as in fsspec."
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing TARGET.")]
Source = Annotated[
    str, typer.Argument(metavar="FILE", help="A local file, written by torch.save or safetensors.")
]
Step = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="The step of the new version. By default, that of an entry beside the state dict (step, global_step or "
        "iteration), else of the file's name (step-1200.pt, 1200.pt), else 0.",
    ),
]
Tables = Annotated[
    list[str] | None,
    typer.Option(
        "--table",
        metavar="NAME",
        help="The name of a table, or a pattern. By default, weights of 10,000 rows or more.",
    ),
]
Key = Annotated[
    str | None, typer.Option(help="The entry of the file that holds the state dict, such as model.")
]
Host = Annotated[str, typer.Option(help="Address to listen on. There is no access control.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")]


def export(
    url: Url,
    target: Target,
    version: OfVersion = "latest",
    format: FormatOption = None,  # noqa: A002
    overwrite: Overwrite = False,
    target_options: TargetOptions = "{}",
    options: StorageOptions = "{}",
    as_json: AsJson = False,
) -> None:
    """Write a version as one safetensors file or plain Zarr group, or its tables as a folder of Parquet files."""
    info = reading.export(
        url,
        target,
        parse_version(version),
        None if format is None else format.value,
        overwrite=overwrite,
        target_options=parse_options(target_options),
        **parse_options(options),
    )
    if as_json:
        print_json({"version": info.id, "step": info.step, "target": target})
    else:
        print_line(f"{info.id} (step {info.step}) written to {target}")


def import_(
    source: Source,
    url: Url,
    step: Step = None,
    bits: Width = "auto",
    tables: Tables = None,
    key: Key = None,
    options: StorageOptions = "{}",
    as_json: AsJson = False,
) -> None:
    """Write the state dict in FILE as a version, with quantized tables. FILE is from torch.save or safetensors.

    No code from the file is run.
    """
    from cnr_store.training.importing.import_file import import_file, taken_text

    # Opened here, since options of a filesystem may be called as those of a file are: S3 has a key, too.
    with open_backend(url, storage_options=parse_options(options)) as backend:
        info = import_file(source, backend, step, parse_bits(bits), tables=tables or None, key=key)
        taken = taken_text(open_record(backend, info.id)[1])
    if as_json:
        print_json({"version": info.id, "step": info.step, "bytes": info.bytes, "rows": info.rows})
    else:
        print_line(f"{info.id} (step {info.step}): {counted(info.rows, 'row')}, {size_text(info.bytes)}")
        print_line(plain(taken))


def serve(
    url: Url,
    version: OfVersion = "latest",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    options: StorageOptions = "{}",
) -> None:
    """Serve one version over HTTP as plain Zarr, read-only, until interrupted."""
    require("serving", "serve", "starlette", "uvicorn")
    from cnr_store.reading.server import serve as run_server

    opened = parse_options(options)
    _, record = open_record(url, parse_version(version), **opened)
    run_server(
        url,
        record.id,
        host=host,
        port=port,
        storage_options=opened,
        ready=lambda bound: say(f"{record.id} (step {record.step}) at http://{host}:{bound}/"),
    )
