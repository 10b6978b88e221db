"""`cnr simulate`: what policies cost, without training."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from cnr_store.cli.options import AsJson
from cnr_store.cli.output import print_json, print_line, table
from cnr_store.policies.policy import MAX_CHAIN, POLICIES, check_policy
from cnr_store.policies.simulation import Interval, SimulatedSave, Trace, best_interval
from cnr_store.policies.simulation import simulate as run_policy

Rows = Annotated[int, typer.Option(min=1, help="Number of rows in all tables.")]
Saves = Annotated[int, typer.Option(min=1, help="Saves to simulate.")]
Accesses = Annotated[int, typer.Option(min=1, help="Row lookups between two saves.")]
Exponent = Annotated[
    float, typer.Option(help="Exponent of Zipf's law, by which the popularity of rows falls.")
]
KeepLast = Annotated[int | None, typer.Option(min=1, help="Number of versions to keep. By default, all.")]
MaxChain = Annotated[int, typer.Option(min=1, help="Longest chain of versions before a fold.")]
RowBytes = Annotated[float, typer.Option(min=0, help="Stored bytes of a row with its optimizer state.")]
DeltaRowBytes = Annotated[
    float | None,
    typer.Option(
        min=0, help="The same in a delta; fewer for relative rows. By default, equal to --row-bytes."
    ),
]
Failure = Annotated[
    float | None,
    typer.Option(min=0.001, help="Hours between two failures. Prints only how often to save."),
]
Stall = Annotated[float, typer.Option(min=0, help="Milliseconds for which a save stops training.")]
Write = Annotated[float, typer.Option(min=0, help="Seconds that the background write of a save takes.")]
Restore = Annotated[float, typer.Option(min=0, help="Seconds from a failure to the first new step.")]
Chosen = Annotated[str | None, typer.Option("--policy", help="Show each save of this policy only.")]


def simulate(
    rows: Rows = 100_000,
    saves: Saves = 20,
    accesses: Accesses = 100_000,
    exponent: Exponent = 1.05,
    row_bytes: RowBytes = 68.0,
    delta_row_bytes: DeltaRowBytes = None,
    keep_last: KeepLast = None,
    max_chain: MaxChain = MAX_CHAIN,
    policy: Chosen = None,
    failure_hours: Failure = None,
    stall_ms: Stall = 50.0,
    write_seconds: Write = 10.0,
    restore_seconds: Restore = 120.0,
    as_json: AsJson = False,
) -> None:
    """Compare how many bytes each policy would write, keep and read at a restore. Nothing is trained.

    Rows are looked up by Zipf's law. "written" and "kept" include the bytes
    of folds, which "folds" also shows separately.

    With --failure-hours it prints instead how often to save, so that saves,
    repeated steps and restores take the least time.
    """
    if failure_hours is not None:
        _print_interval(
            best_interval(3600 * failure_hours, stall_ms / 1000, restore_seconds, write_seconds),
            failure_hours,
            f"a save holds training for {stall_ms:g} ms and is written in {write_seconds:g} s, "
            f"a restore takes {restore_seconds:g} s",
            as_json,
        )
        return
    trace = Trace.zipf(rows, saves, accesses, exponent)
    names = POLICIES if policy is None else (check_policy(policy),)
    simulated: dict[str, list[SimulatedSave]] = {
        name: run_policy(
            trace,
            name,
            keep_last=keep_last,
            row_bytes=row_bytes,
            delta_row_bytes=delta_row_bytes,
            max_chain=max_chain,
        )
        for name in names
    }
    if as_json:
        print_json({name: [asdict(save) for save in saved] for name, saved in simulated.items()})
    elif policy is None:
        sizes = f"{row_bytes:g} bytes" + (
            f", {delta_row_bytes:g} in a delta" if delta_row_bytes is not None else ""
        )
        print_line(
            f"{saves:,} saves of {rows:,} rows of {sizes}, {accesses:,} lookups between two of them, "
            f"of which the n-th most popular row gets a share like 1/n^{exponent:g}:"
        )
        _print_summary(simulated)
    else:
        _print_saves(simulated[policy])


def _print_interval(found: Interval, failure_hours: float, given: str, as_json: bool) -> None:
    if as_json:
        print_json(asdict(found))
        return
    seconds = found.seconds
    every = f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.0f} minutes"
    print_line(
        f"with a failure every {failure_hours:g} hours, save every {every}: saves, repeated steps and restores "
        f"then take {100 * found.lost:.2g} % of the time, if {given}"
    )


def _print_summary(simulated: dict[str, list[SimulatedSave]]) -> None:
    cells = {
        "policy": list(simulated),
        "written": [f"{saved[-1].written_bytes:,}" for saved in simulated.values()],
        "folds": [f"{sum(save.fold_bytes for save in saved):,}" for saved in simulated.values()],
        "kept": [f"{saved[-1].kept_bytes:,}" for saved in simulated.values()],
        "chain": [f"{max(save.chain for save in saved):,}" for saved in simulated.values()],
        "restore": [f"{max(save.restore_bytes for save in saved):,}" for saved in simulated.values()],
    }
    print_line(table(cells, ("folds", "kept", "chain")))


def _print_saves(saved: list[SimulatedSave]) -> None:
    sizes = ("save", "save"), ("bytes", "bytes"), ("fold", "fold_bytes"), ("written", "written_bytes")
    cells = {
        name: [f"{getattr(save, attribute):,}" for save in saved]
        for name, attribute in (*sizes, ("kept", "kept_bytes"), ("chain", "chain"))
    }
    kinds = ["full" if save.decision.full else f"since {save.decision.since}" for save in saved]
    reasons = [f"{kind}: {save.decision.reason}" for kind, save in zip(kinds, saved, strict=True)]
    print_line(table(cells | {"decision": reasons}))
