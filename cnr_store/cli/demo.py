"""`cnr demo`: options only; the demo itself is loaded when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cnr_store.cli.options import Policy, StorageOptions, Width, require, storage_options, width

DemoUrl = Annotated[
    str | None,
    typer.Argument(metavar="URL", help="Where the checkpoints go. A temporary folder if left out."),
]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Training steps; every training sample once if left out.")
]
Every = Annotated[int, typer.Option(min=1, help="Steps between two saves.")]
Data = Annotated[Path | None, typer.Option(help="Folder with ml-100k.inter, .item and .user.")]
Keep = Annotated[bool, typer.Option("--keep", help="Without URL: keep the store, in ./demo-run.")]


def demo(
    url: DemoUrl = None,
    options: StorageOptions = "{}",
    policy: Policy = "intermittent",
    bits: Width = "auto",
    steps: Steps = None,
    every: Every = 200,
    data: Data = None,
    keep: Keep = False,
) -> None:
    """Train on MovieLens-100k, kill the training in the middle of a save, resume, and show what it cost.

    The training process knows nothing of the kill. An uninterrupted run is trained for comparison. The exit status
    is 1 if any check of the outcome fails.
    """
    require("the demo", "demo", "torch", "xarray")
    from cnr_store.demo.run import DemoOptions, run_demo

    asked = DemoOptions(
        url=url,
        storage_options=storage_options(options),
        policy=policy,
        bits=width(bits),
        steps=steps,
        every=every,
        data=data,
        keep=keep,
    )
    if not run_demo(asked, Console()):
        raise typer.Exit(1)
