"""`cnr simulate`: what policies cost, without training."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from cnr_store.cli.options import AsJson
from cnr_store.cli.output import new_table, print_json, print_table
from cnr_store.policies.policy import MAX_CHAIN, POLICIES
from cnr_store.policies.simulation import SimulatedSave, Trace
from cnr_store.policies.simulation import simulate as run_policy

Rows = Annotated[int, typer.Option(min=1, help="Rows of all tables.")]
Saves = Annotated[int, typer.Option(min=1, help="Saves to simulate.")]
Accesses = Annotated[int, typer.Option(min=1, help="Lookups between two saves.")]
Exponent = Annotated[float, typer.Option(help="Exponent of Zipf's law: how fast popularity falls.")]
KeepLast = Annotated[int | None, typer.Option(min=1, help="Versions kept. By default, all.")]
MaxChain = Annotated[int, typer.Option(min=1, help="Versions that reading one may take before it is folded.")]
RowBytes = Annotated[float, typer.Option(min=0, help="Encoded bytes of a row with its optimizer state.")]
Chosen = Annotated[str | None, typer.Option("--policy", help="Show each save of this policy.")]


def simulate(
    rows: Rows = 100_000,
    saves: Saves = 20,
    accesses: Accesses = 100_000,
    exponent: Exponent = 1.05,
    row_bytes: RowBytes = 68.0,
    keep_last: KeepLast = None,
    max_chain: MaxChain = MAX_CHAIN,
    policy: Chosen = None,
    as_json: AsJson = False,
) -> None:
    """Compare what the policies would write, keep and restore, on rows looked up by Zipf's law.

    "written" and "kept" count the bytes of folds, which "folds" shows by themselves.
    """
    trace = Trace.zipf(rows, saves, accesses, exponent)
    names = POLICIES if policy is None else (policy,)
    simulated = {
        name: run_policy(trace, name, keep_last=keep_last, row_bytes=row_bytes, max_chain=max_chain)
        for name in names
    }
    if as_json:
        print_json({name: [asdict(save) for save in saved] for name, saved in simulated.items()})
    elif policy is None:
        _print_summary(simulated)
    else:
        _print_saves(simulated[policy])


def _print_summary(simulated: dict[str, list[SimulatedSave]]) -> None:
    table = new_table("policy", "written", "folds", "kept", "chain", "restore")
    for name, saved in simulated.items():
        chain, restore = max(save.chain for save in saved), max(save.restore_bytes for save in saved)
        folds = sum(save.fold_bytes for save in saved)
        sizes = (saved[-1].written_bytes, folds, saved[-1].kept_bytes, chain, restore)
        table.add_row(name, *(f"{size:,}" for size in sizes))
    print_table(table)


def _print_saves(saved: list[SimulatedSave]) -> None:
    table = new_table("save", "bytes", "fold", "written", "kept", "chain", "decision")
    for save in saved:
        sizes = (save.save, save.bytes, save.fold_bytes, save.written_bytes, save.kept_bytes, save.chain)
        kind = "full" if save.decision.full else f"since {save.decision.since}"
        table.add_row(*(f"{size:,}" for size in sizes), f"{kind}: {save.decision.reason}")
    print_table(table)
