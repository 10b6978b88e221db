"""What commands look like: `python -m tools.screenshots` writes `cnr ls` and `cnr report` into docs/pictures.

Both show a store that a short training run makes. Its times are those of the machine, so no test compares the bytes.
The report needs Chromium (see `tools.browser`).
"""

from __future__ import annotations

import re
import tempfile
from io import StringIO
from pathlib import Path

import torch
from rich.console import Console

import cnr_store
from cnr_backends import open_backend
from cnr_store.catalog.catalog import Catalog
from cnr_store.cli.listing import totals_text, versions_table
from cnr_store.cli.report.figures import read_figures
from cnr_store.cli.report.page import page
from tools.browser import screenshot

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
_SAVES, _STEPS, _BATCH = 12, 20, 64
_COLUMNS = 112
_REPORT_SIZE = (1000, 1120)


def train(url: str) -> None:
    """Train a small model on ids of which few are frequent, and save it now and then."""
    torch.manual_seed(0)
    sizes = {"users": 60_000, "products": 20_000, "shops": 2_000}
    tables = {name: torch.nn.EmbeddingBag(rows, 16, sparse=True) for name, rows in sizes.items()}
    model = torch.nn.ModuleDict({**tables, "top": torch.nn.Linear(16, 1)})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    with cnr_store.Checkpointer(url, model, optimizer, bits=4, state_bits="m3") as checkpointer:
        for save in range(_SAVES):
            for _ in range(_STEPS if save else 1):
                ids = {name: (torch.rand(_BATCH, 4) ** 4 * rows).long() for name, rows in sizes.items()}
                pooled = torch.stack([tables[name](each) for name, each in ids.items()]).sum(0)
                loss = (model["top"](pooled) - 1).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            checkpointer.save(1000 * (save + 1), metadata={"loss": round(loss.item(), 4)}).result()
    cnr_store.tag(url, "best", 11_000)
    cnr_store.pin(url, 6000, reason="launch")


def listing(url: str) -> str:
    """What `cnr ls` prints of a store, as SVG that asks no other host for a font."""
    console = Console(
        record=True, width=_COLUMNS, force_terminal=True, color_system="truecolor", file=StringIO()
    )
    versions = read_figures(Catalog(open_backend(url))).versions
    console.print(versions_table(versions, console))
    console.print(totals_text(versions, len(versions)), highlight=False, soft_wrap=True)
    svg = console.export_svg(title="cnr ls checkpoints", unique_id="ls")
    return re.sub(r"@font-face\s*\{[^}]*\}", "", svg)


def main() -> None:
    """Write both."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"{folder}/checkpoints"
        train(url)
        (FOLDER / "ls.svg").write_text(listing(url), encoding="utf-8")
        html, shown = Path(folder, "report.html"), Path(folder, "report.png")
        html.write_bytes(page(read_figures(Catalog(open_backend(url)))).replace(url.encode(), b"checkpoints"))
        if said := screenshot(html, shown, *_REPORT_SIZE):
            raise RuntimeError(f"the page says {said}")
        (FOLDER / "report.png").write_bytes(shown.read_bytes())


if __name__ == "__main__":
    main()
