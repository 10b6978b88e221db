"""A version as xarray sees it."""

from __future__ import annotations

import time

import xarray as xr
from rich.console import Console
from rich.text import Text
from zarr.abc.store import Store

_ROWS = 3


def print_tree(store: Store, console: Console) -> None:
    """Open a version lazily, print its tree, and read a few rows of its largest table."""
    begun = time.perf_counter()
    with xr.open_datatree(store, engine="zarr", consolidated=False, chunks=None) as tree:  # type: ignore[arg-type]
        opened = time.perf_counter() - begun
        console.print(Text(f"newest version through xarray, opened in {opened * 1000:.0f} ms:", style="bold"))
        console.print(Text(str(tree)), soft_wrap=True)
        tables = {
            name: node.to_dataset()["weight"] for name, node in tree.children["tables"].children.items()
        }
        name = max(tables, key=lambda name: tables[name].size)
        begun = time.perf_counter()
        rows = tables[name][:_ROWS].load()
        read = time.perf_counter() - begun
        count, first = tables[name].sizes["row"], rows.values[0, :4]
        line = f"{len(rows)} of its {count:,} rows read in {read * 1000:.0f} ms; the first begins {first}"
        console.print(f"tables/{name}/weight: {line}", markup=False, highlight=False, soft_wrap=True)
