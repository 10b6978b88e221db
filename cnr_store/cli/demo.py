"""`cnr demo`: its options; the demo itself is an example, which the wheel carries beside this package's rooms."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cnr_store.cli.options import (
    Policy,
    StorageOptions,
    check_bits_text,
    parse_bits,
    parse_options,
    require,
)
from cnr_store.policies.policy import check_policy

DemoUrl = Annotated[
    str | None,
    typer.Argument(metavar="URL", help="The store to write. By default, a temporary folder."),
]
Steps = Annotated[int | None, typer.Option(min=1, help="Training steps. By default, one epoch.")]
Every = Annotated[int, typer.Option(min=1, help="Steps between two saves.")]
Data = Annotated[
    Path | None,
    typer.Option(help="Folder with ml-100k.inter, .item and .user. By default, they are downloaded."),
]


Bits = Annotated[
    str | None,
    typer.Option(
        metavar="auto|2|3|4|8|32",
        help="Bits of a row's values, with lossless optimizer state. By default rows are relative integers on a "
        "lattice, and state has 3 bits of mantissa.",
        callback=check_bits_text,
    ),
]
Keep = Annotated[bool, typer.Option("--keep", help="Without URL: keep the store, in ./demo-run.")]


def demo(
    url: DemoUrl = None,
    options: StorageOptions = "{}",
    policy: Policy = "intermittent",
    bits: Bits = None,
    steps: Steps = None,
    every: Every = 200,
    data: Data = None,
    keep: Keep = False,
) -> None:
    """Train on MovieLens-100k, kill the training in the middle of a save, resume, and print what it cost.

    The training process does not know of the kill beforehand. An uninterrupted
    run is trained for comparison. The exit status is 1 if a check of the
    outcome fails.
    """
    require("the demo", "demo", "torch", "xarray")
    package = Path(__file__).parents[1]
    places = (package / "examples", package.parent / "examples")  # in a wheel, and in a checkout
    sys.path.insert(0, str(next(place for place in places if (place / "demo.py").is_file())))
    holds = import_module("demo").run_demo(
        Console(),
        url,
        storage_options=parse_options(options),
        policy=check_policy(policy),
        bits=None if bits is None else parse_bits(bits),
        steps=steps,
        every=every,
        data=data,
        keep=keep,
    )
    if not holds:
        raise typer.Exit(1)
