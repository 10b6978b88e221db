"""`cnr diff`, `export` and `serve`: what versions hold, for people and other tools."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from cnr_backends import open_backend
from cnr_store.catalog.catalog import Catalog
from cnr_store.cli.options import AsJson, StorageOptions, Url, require, storage_options, version_named
from cnr_store.cli.output import new_table, print_json, print_line, print_table, say
from cnr_store.reading import diff as comparing
from cnr_store.reading import export as exporting


class Format(StrEnum):
    """What `cnr export` writes."""

    safetensors = "safetensors"
    zarr = "zarr"


Older = Annotated[str, typer.Argument(metavar="OLDER", help="An id, a step, or latest.")]
Newer = Annotated[str, typer.Argument(metavar="[NEWER]", help="An id, a step, or latest.")]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="A path or any fsspec URL.")]
OfVersion = Annotated[str, typer.Option("--version", metavar="VERSION", help="An id, a step, or latest.")]
FormatOption = Annotated[
    Format | None,
    typer.Option(help="What to write; zarr for a target that ends in .zarr, else safetensors."),
]
TargetOptions = Annotated[
    str,
    typer.Option("--target-options", metavar="JSON", help="Options of the target's filesystem."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is at the target.")]
Host = Annotated[str, typer.Option(help="Address to listen at. There is no access control.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at.")]


def diff(
    url: Url, older: Older, newer: Newer = "latest", options: StorageOptions = "{}", as_json: AsJson = False
) -> None:
    """Show which arrays differ between two versions, in how many rows, and by how much."""
    found = comparing.diff(url, version_named(older), version_named(newer), **storage_options(options))
    if as_json:
        print_json([asdict(each) for each in found])
        return
    table = new_table("array", "status", "changed", "rows", "max abs")
    for each in found:
        largest = "-" if each.max_abs is None else f"{each.max_abs:.3g}"
        table.add_row(each.path, each.status, f"{each.rows_changed:,}", f"{each.rows:,}", largest)
    print_table(table)


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
    """Write a version's tables and dense tensors as one safetensors file, or as a plain Zarr group."""
    info = exporting.export(
        url,
        target,
        version_named(version),
        None if format is None else format.value,
        overwrite=overwrite,
        target_options=storage_options(target_options),
        **storage_options(options),
    )
    if as_json:
        print_json({"version": info.id, "step": info.step, "target": target})
    else:
        print_line(f"{info.id} (step {info.step}) written to {target}")


def serve(
    url: Url,
    version: OfVersion = "latest",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    options: StorageOptions = "{}",
) -> None:
    """Serve one version over HTTP as plain Zarr, read-only, until interrupted."""
    require("serving", "serve", "starlette", "uvicorn")
    from cnr_store.reading.server import serve as run

    opened = storage_options(options)
    record = Catalog(open_backend(url, **opened)).find(version_named(version))
    run(
        url,
        record.id,
        host=host,
        port=port,
        storage_options=opened,
        ready=lambda taken: say(f"{record.id} (step {record.step}) at http://{host}:{taken}/"),
    )
