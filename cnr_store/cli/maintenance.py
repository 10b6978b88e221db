"""`cnr verify`, `repair`, `compact`, `gc`, and `pin` and `tag` with their opposites: the maintenance of a store."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from cnr_store.catalog.claims import end_run as end_newest_run
from cnr_store.catalog.claims import newest_claim
from cnr_store.cli.facts import open_store
from cnr_store.cli.options import AsJson, StorageOptions, Url, VersionName, parse_options, parse_version
from cnr_store.cli.output import counted, plain, print_json, print_line, progress, say, time_text
from cnr_store.errors import OptionError
from cnr_store.format.layout import is_tag
from cnr_store.maintenance.collection import pins, retention, rules
from cnr_store.maintenance.folding import compact as folding
from cnr_store.maintenance.repairing import repair as repairing
from cnr_store.maintenance.verification import verify as verification
from cnr_store.maintenance.verification.report import Finding, VerifyReport
from cnr_store.options import KeepBest as KeepBestRule

DAMAGED, SUSPICIOUS = 3, 4
"""Exit status of `cnr verify` if anything is damaged; if nothing is, but something may be lost."""

Checked = Annotated[
    str | None,
    typer.Argument(metavar="[VERSION]", help="An id, a step, a tag, or latest. By default, the whole store."),
]
Deep = Annotated[
    bool, typer.Option("--deep", help="Read every byte. By default, check only existence and sizes.")
]
Workers = Annotated[int, typer.Option(min=1, help="Threads to use.")]
KeepLast = Annotated[int | None, typer.Option(min=1, help="Keep this many of the newest versions.")]
KeepEvery = Annotated[
    int | None,
    typer.Option(
        min=1, help="For each multiple of this many steps, keep the newest version at or before it."
    ),
]
KeepBest = Annotated[
    str | None,
    typer.Option(
        metavar="NAME:max|min:N",
        help="Keep the N versions with the best figure of this name in the metadata: auc:max:3.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; print what would be done.")]
EndRun = Annotated[
    bool,
    typer.Option("--end-run", help="First end a run that died. Shows the run, and asks."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Grace = Annotated[float, typer.Option(min=0, help="Seconds to keep the leftovers of a crashed save.")]


def verify(
    url: Url,
    version: Checked = None,
    deep: Deep = False,
    workers: Workers = 4,
    options: StorageOptions = "{}",
    as_json: AsJson = False,
) -> None:
    """Check a store for damaged or lost objects, and show which versions can be restored. Changes nothing.

    The exit status is 3 if anything is damaged, and 4 if something may be lost.
    """
    wanted = None if version is None else parse_version(version)
    with progress("verifying", of_bytes=True) as on_progress:
        report = verification.verify(
            url, wanted, deep=deep, workers=workers, progress=on_progress, **parse_options(options)
        )
    if as_json:
        print_json(asdict(report) | {"ok": report.ok})
    else:
        _print_report(report)
        if report.problems:
            print_line(_next_step(url, version, report))
    if report.problems or report.suspicious:
        raise typer.Exit(DAMAGED if report.problems else SUSPICIOUS)


def _print_report(report: VerifyReport) -> None:
    for finding in report.problems:
        print_line(f"damaged: {finding}{_extent(finding)}")
    for finding in report.suspicious:
        print_line(f"suspicious: {finding}")
    for left in report.leftovers:
        found = f"{counted(left.objects, 'object')}, {left.nbytes:,} bytes"
        print_line(f"leftover: {found} in {left.place}, such as {left.example}")
    extent = "every byte read" if report.deep else "existence and sizes only, --deep reads every byte"
    print_line(
        f"{len(report.restorable):,} of {counted(len(report.versions), 'version')} can be restored; "
        f"{counted(report.objects, 'object')}, {report.nbytes:,} bytes ({extent})"
    )
    if not report.ok and report.restorable:
        print_line(f"the newest that can be restored is {report.restorable[-1]}")


def _next_step(url: str, version: str | None, report: VerifyReport) -> str:
    """What to do about damage."""
    of_versions = any(finding.version for finding in report.problems)
    if of_versions and report.versions and report.versions[-1] not in report.restorable:
        named = "" if version is None else f" {version}"
        return (
            f"next: `cnr repair {url}{named}` shows what is lost, asks, and commits a sound version with older values "
            "for it; load(salvage=True) and resume(salvage=True) load these values into a model"
        )
    lost = [each for each in report.versions if each not in report.restorable]
    if of_versions and lost:
        return (
            "next: nothing, if only the newest version matters; load(version, salvage=True) restores what can be read "
            f"of a damaged one, and `cnr repair {url} {lost[-1]}` commits that as the newest version"
        )
    return "next: put back what is named above from a copy; the versions that can be restored do not need it"


def _extent(finding: Finding) -> str:
    """How much a finding concerns."""
    rows = counted(finding.row_count, "row") + " of these" * (finding.rows is not None)
    facts = [f"it concerns at most {rows}"] if finding.row_count else []
    if finding.versions:
        facts.append(
            f"{counted(len(finding.versions), 'version')} can't be restored, the first is {finding.versions[0]}"
        )
    return f" ({'; '.join(facts)})" if facts else ""


def repair(
    url: Url,
    version: VersionName = "latest",
    dry_run: DryRun = False,
    yes: Yes = False,
    workers: Workers = 4,
    options: StorageOptions = "{}",
    as_json: AsJson = False,
) -> None:
    """Commit a sound version in place of a damaged one, with older values for the lost rows.

    Shows what would be lost, and asks. Deletes nothing.
    With --dry-run the exit status is 3 if anything is damaged.
    """
    if not (dry_run or yes or sys.stdin.isatty()):
        raise typer.BadParameter(
            "this command asks before it writes, and there is no terminal: give --yes, or --dry-run to only look"
        )
    with progress("reading") as on_progress:
        found = repairing.Repair(
            url,
            parse_version(version),
            workers,
            on_progress,
            is_for_writing=not dry_run,
            **parse_options(options),
        )
    done = found.report
    if not as_json:
        _print_losses(done)
    if done.outcome == "repairable" and not dry_run:
        if not yes:
            typer.confirm("Commit a version with these values?", abort=True, err=True)
        done = found.commit()
    if as_json:
        salvaged = {name: lost.by_version.items() for name, lost in done.salvaged.items()}
        counts = {name: {version: len(rows) for version, rows in lost} for name, lost in salvaged.items()}
        print_json(asdict(done) | {"salvaged": counts})
    elif done.repaired is not None:
        print_line(
            f"{done.repaired}: repaired from {done.version}, {done.bytes:,} bytes; it is the latest version now"
        )
    if done.outcome == "repairable":
        raise typer.Exit(DAMAGED)


def _print_losses(found: repairing.RepairReport) -> None:
    for name in found.damaged:
        lost = found.salvaged.get(name)
        what = (
            "nothing is lost: its values are also stored elsewhere"
            if lost is None
            else f"older values for {lost}"
        )
        print_line(f"damaged: {name}: {what}")
    if found.outcome == "sound":
        print_line(f"{found.version}: nothing is damaged")


def compact(
    url: Url,
    version: VersionName = "latest",
    workers: Workers = 2,
    options: StorageOptions = "{}",
    as_json: AsJson = False,
) -> None:
    """Fold a version: store all its rows once more in one piece, so that a restore needs no other version."""
    with progress("folding") as on_progress:
        done = folding.compact(
            url, parse_version(version), workers=workers, progress=on_progress, **parse_options(options)
        )
    if as_json:
        print_json(asdict(done))
    elif done.outcome == "folded":
        print_line(
            f"{done.version}: folded {counted(len(done.arrays), 'array')} of up to {counted(done.links, 'link')}, "
            f"{counted(done.rows, 'row')}, {done.bytes:,} bytes, in {done.seconds:.1f} s"
        )
    else:
        print_line(f"{done.version}: {done.outcome}")


def gc(
    url: Url,
    keep_last: KeepLast = None,
    keep_every: KeepEvery = None,
    keep_best: KeepBest = None,
    dry_run: DryRun = False,
    end_run: EndRun = False,
    yes: Yes = False,
    grace_seconds: Grace = retention.GRACE_SECONDS,
    options: StorageOptions = "{}",
    as_json: AsJson = False,
) -> None:
    """Remove versions that no rule keeps, and leftovers of crashed saves. Without a rule, only leftovers.

    It always keeps the newest version, pinned and tagged versions, and each
    version that a kept one depends on. It also keeps the version that the
    newest run continues, until that run closes its checkpointer. Use --end-run
    for a run that died before it could.

    The exit status is 1 if leftovers remain although --grace-seconds is 0.
    """
    if end_run and dry_run:
        raise typer.BadParameter("--dry-run changes nothing: leave --end-run out")
    best = _parse_best(keep_best)
    if best is not None:
        catalog = open_store(url, parse_options(options))
        try:
            rules.check_figure(catalog, best[0])  # before a run is ended
        except OptionError as error:
            raise typer.BadParameter(str(error)) from error
    if end_run:
        _end_run(url, yes, parse_options(options))
    with progress("removing") as on_progress:
        done = retention.gc(
            url,
            keep_last,
            keep_every,
            best,
            dry_run=dry_run,
            grace_seconds=grace_seconds,
            progress=on_progress,
            **parse_options(options),
        )
    pinned = any(reason == "pinned" for reason in done.kept.values())
    reasons = pins.pin_reasons(url, **parse_options(options)) if pinned else {}
    if as_json:
        print_json(asdict(done) | {"pin_reasons": reasons})
    else:
        _print_removal(
            done, reasons, ruled=any(rule is not None for rule in (keep_last, keep_every, keep_best))
        )
    if done.stopped is not None:
        say(f"cnr: nothing was removed: {done.stopped}")
        raise typer.Exit(1)
    if done.left and not grace_seconds and not dry_run:
        say(f"cnr: {done.left_bytes:,} bytes of unfinished saves could not be removed, for the reasons above")
        raise typer.Exit(1)


def _parse_best(text: str | None) -> KeepBestRule | None:
    """The rule from NAME:max:N. `typer.BadParameter` if it is something else."""
    if text is None:
        return None
    name, mode, count = [*text.rsplit(":", 2), "", ""][:3]
    if not (name and mode in ("max", "min") and count.isascii() and count.isdecimal() and int(count)):
        raise typer.BadParameter(f"--keep-best {text}: give a figure, max or min, and a number: auc:max:3")
    return name, "max" if mode == "max" else "min", int(count)


def _end_run(url: str, yes: bool, options: dict[str, Any]) -> None:
    """Show who wrote last and when, ask, and end that run."""
    catalog = open_store(url, options)
    newest = newest_claim(catalog.backend)
    if newest is None or newest.is_over:
        say("no run is open, so there is none to end")
        return
    last = next((record for record in catalog.newest_first()), None)
    commit = (
        "nothing is committed" if last is None else f"the last commit is {last.id}, of {time_text(last.time)}"
    )
    say(f"writer {newest} claimed {catalog.backend.url} at {time_text(newest.time)}; {commit}")
    if not yes and not sys.stdin.isatty():
        raise typer.BadParameter("--end-run asks before it ends a run, and there is no terminal: give --yes")
    if not yes:
        typer.confirm("If that job still runs, it can't save any more. End it?", abort=True, err=True)
    end_newest_run(catalog.backend, newest)


def _print_removal(done: retention.GcReport, pinned: Mapping[str, Sequence[str]], *, ruled: bool) -> None:
    """Print what was removed and, if there is a rule, why each of the others was kept, or was `pinned`."""
    removed = "would be removed" if done.dry_run else "removed"
    for version, reason in done.kept.items() if ruled else ():
        why = "; ".join(map(plain, pinned.get(version, ()))) if reason == "pinned" else ""
        print_line(f"kept {version}: {reason}{why and f': {why}'}")
    for version in done.removed:
        print_line(f"{removed}: {version}")
    for attempt in done.leftovers:
        print_line(f"{removed}: {attempt}, left by an unfinished save")
    for attempt, reason in done.left.items():
        what = "fold" if attempt in done.kept else "save"
        print_line(f"left: {attempt}, of an unfinished {what}: {reason}")
    if done.left:
        print_line(f"{done.left_bytes:,} bytes left of unfinished saves")
    print_line(
        f"{counted(len(done.kept), 'version')} kept{'' if ruled else ', as there is no rule'}, "
        f"{len(done.removed):,} {removed}; {done.freed_bytes:,} bytes"
    )


TagName = Annotated[str, typer.Argument(metavar="NAME", help="1 to 100 characters of a-z, 0-9, _, . and -.")]
Reason = Annotated[str | None, typer.Option(metavar="TEXT", help="The reason, in one line; cnr ls shows it.")]


def pin(
    url: Url,
    version: VersionName = "latest",
    reason: Reason = None,
    options: StorageOptions = "{}",
    as_json: AsJson = False,
) -> None:
    """Keep a version regardless of the rules of retention."""
    pinned = pins.pin(url, parse_version(version), reason=reason, **parse_options(options))
    _print_done(f"{pinned}: pinned", as_json, version=pinned, pinned=True, reason=reason)


def unpin(url: Url, version: VersionName, options: StorageOptions = "{}", as_json: AsJson = False) -> None:
    """Let the rules of retention remove a pinned version again."""
    unpinned = pins.unpin(url, parse_version(version), **parse_options(options))
    _print_done(f"{unpinned}: not pinned any more", as_json, version=unpinned, pinned=False)


def tag(
    url: Url,
    name: TagName,
    version: VersionName = "latest",
    options: StorageOptions = "{}",
    as_json: AsJson = False,
) -> None:
    """Give a version a name, and keep it regardless of the rules of retention. An existing name is moved.

    NAME and VERSION may also stand the other way round where only one of them can be a name.
    """
    if not is_tag(name) and is_tag(version):
        name, version = version, name
        say(f"cnr: took {name} for NAME and {version} for VERSION")
    tagged = pins.tag(url, name, parse_version(version), **parse_options(options))
    _print_done(f"{tagged}: tagged {name}", as_json, version=tagged, tag=name)


def untag(url: Url, name: TagName, options: StorageOptions = "{}", as_json: AsJson = False) -> None:
    """Remove a tag. The rules of retention may then remove the version."""
    pins.untag(open_store(url, parse_options(options)).backend, name)
    _print_done(f"{name}: no tag any more", as_json, version=None, tag=name)


def _print_done(text: str, as_json: bool, **document: object) -> None:
    if as_json:
        print_json(document)
    else:
        print_line(text)
