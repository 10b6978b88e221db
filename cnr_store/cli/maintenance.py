"""`cnr verify`, `compact`, `gc`, `pin` and `unpin`: looking after a store."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from cnr_store.cli.options import AsJson, StorageOptions, Url, VersionName, storage_options, version_named
from cnr_store.cli.output import print_json, print_line, progress, say
from cnr_store.maintenance.collection import pins, retention
from cnr_store.maintenance.folding import compact as folding
from cnr_store.maintenance.verification import verify as proving
from cnr_store.maintenance.verification.report import VerifyReport

DAMAGED = 3
"""Exit status of `cnr verify` where something is damaged."""

Checked = Annotated[
    str | None,
    typer.Argument(metavar="[VERSION]", help="An id, a step, or latest; the whole store if left out."),
]
Deep = Annotated[
    bool, typer.Option("--deep", help="Read every byte, not only what exists and how large it is.")
]
Workers = Annotated[int, typer.Option(min=1, help="Threads.")]
KeepLast = Annotated[int | None, typer.Option(min=1, help="Keep so many of the newest versions.")]
KeepEvery = Annotated[
    int | None, typer.Option(min=1, help="Keep one version of every so many steps: the newest up to it.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; say what would be removed.")]
Grace = Annotated[float, typer.Option(min=0, help="Leave what crashed saves left alone for so many seconds.")]


def verify(
    url: Url,
    version: Checked = None,
    deep: Deep = False,
    workers: Workers = 4,
    options: StorageOptions = "{}",
    as_json: AsJson = False,
) -> None:
    """Check a store: what is damaged or lost, and which versions can be restored. Nothing is changed.

    The exit status is 3 if anything is damaged.
    """
    wanted = None if version is None else version_named(version)
    with progress("verifying", of_bytes=True) as report:
        found = proving.verify(
            url, wanted, deep=deep, workers=workers, progress=report, **storage_options(options)
        )
    if as_json:
        print_json(asdict(found) | {"ok": found.ok})
    else:
        _print_findings(found)
    if not found.ok:
        raise typer.Exit(DAMAGED)


def _print_findings(found: VerifyReport) -> None:
    for finding in found.problems:
        print_line(f"damaged: {finding}")
    for finding in found.suspicious:
        print_line(f"suspicious: {finding}")
    for left in found.leftovers:
        print_line(
            f"leftover: {left.objects:,} objects, {left.nbytes:,} bytes in {left.place}, such as {left.example}"
        )
    looked = "every byte read" if found.deep else "existence and sizes only, --deep reads every byte"
    print_line(
        f"{len(found.restorable):,} of {len(found.versions):,} versions can be restored; {found.objects:,} objects, "
        f"{found.nbytes:,} bytes ({looked})"
    )
    if not found.ok and found.restorable:
        print_line(f"the newest that can be restored is {found.restorable[-1]}")


def compact(
    url: Url,
    version: VersionName = "latest",
    workers: Workers = 2,
    options: StorageOptions = "{}",
    as_json: AsJson = False,
) -> None:
    """Fold a version: store its rows once more in one piece, so that reading it touches no other version."""
    with progress("folding") as report:
        done = folding.compact(
            url, version_named(version), workers=workers, progress=report, **storage_options(options)
        )
    if as_json:
        print_json(asdict(done))
    elif done.outcome == "folded":
        print_line(
            f"{done.version}: folded {len(done.arrays)} arrays of up to {done.links} links, {done.rows:,} rows, "
            f"{done.bytes:,} bytes, in {done.seconds:.1f} s"
        )
    else:
        print_line(f"{done.version}: {done.outcome}")


def gc(
    url: Url,
    keep_last: KeepLast = None,
    keep_every: KeepEvery = None,
    dry_run: DryRun = False,
    grace_seconds: Grace = retention.GRACE_SECONDS,
    options: StorageOptions = "{}",
    as_json: AsJson = False,
) -> None:
    """Remove versions that no rule keeps, and what crashed saves left. Without a rule only the latter.

    Always kept: the newest version, pinned ones, and whatever a kept version leans on.
    """
    with progress("removing") as report:
        done = retention.gc(
            url,
            keep_last,
            keep_every,
            dry_run=dry_run,
            grace_seconds=grace_seconds,
            progress=report,
            **storage_options(options),
        )
    if as_json:
        print_json(asdict(done))
    else:
        _print_removal(done, ruled=keep_last is not None or keep_every is not None)
    if done.stopped is not None:
        say(f"cnr: nothing was removed: {done.stopped}")
        raise typer.Exit(1)


def _print_removal(done: retention.GcReport, *, ruled: bool) -> None:
    """What went, and, where a rule chose, why each of the others stayed."""
    removed = "would be removed" if done.dry_run else "removed"
    for version, reason in done.kept.items() if ruled else ():
        print_line(f"kept {version}: {reason}")
    for version in done.removed:
        print_line(f"{removed}: {version}")
    for attempt in done.leftovers:
        print_line(f"{removed}: {attempt}, left by a save that did not end")
    print_line(
        f"{len(done.kept):,} versions kept{'' if ruled else ', as there is no rule'}, {len(done.removed):,} {removed}; "
        f"{done.freed_bytes:,} bytes"
    )


def pin(url: Url, version: VersionName = "latest", options: StorageOptions = "{}") -> None:
    """Keep a version whatever retention's rules say."""
    print_line(f"{pins.pin(url, version_named(version), **storage_options(options))}: pinned")


def unpin(url: Url, version: VersionName, options: StorageOptions = "{}") -> None:
    """Let retention have a version again."""
    print_line(f"{pins.unpin(url, version_named(version), **storage_options(options))}: not pinned any more")
