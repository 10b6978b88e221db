"""`cnr report`: how the saves of a store went, as one page."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from cnr_backends import open_backend
from cnr_store.catalog.catalog import Catalog
from cnr_store.cli.maintenance import DAMAGED
from cnr_store.cli.options import AsJson, StorageOptions, Url, parse_options
from cnr_store.cli.output import counted, print_json, print_line, say, size_text
from cnr_store.cli.report.figures import read_figures
from cnr_store.cli.report.page import page
from cnr_store.reading.atomic_output import new_file

Output = Annotated[
    str,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Where to write the page. An existing file is replaced."
    ),
]


def report(
    url: Url, output: Output = "report.html", options: StorageOptions = "{}", as_json: AsJson = False
) -> None:
    """Write one HTML page about a store: bytes, chains, changed rows, stalls, restores, decisions and health.

    The page needs no network. With --json the figures are printed and no page
    is written. The exit status is 3 if a commit record is damaged.
    """
    figures = read_figures(Catalog(open_backend(url, **parse_options(options))))
    if as_json:
        print_json(asdict(figures))
    else:
        written = page(figures)
        with new_file(output, overwrite=True, options={}) as file:
            file.write(written)
        print_line(f"{output}: {counted(len(figures.versions), 'version')}, {size_text(len(written))}")
    for error in figures.errors:
        say(f"cnr: {error}")
    if figures.errors:
        raise typer.Exit(DAMAGED)
