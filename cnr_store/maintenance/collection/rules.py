"""Which versions are kept: what the rules ask for, and what pins, writers and kept versions need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cnr_store.catalog.catalog import Catalog
from cnr_store.catalog.version_info import find_figures
from cnr_store.errors import OptionError, option
from cnr_store.maintenance.collection.store_snapshot import StoreSnapshot
from cnr_store.options import KeepBest, check_best
from cnr_store.policies.checks import integer


@dataclass(frozen=True)
class Rules:
    """Which versions are kept. Without a rule, all are."""

    keep_last: int | None = None  # how many of the newest, as `versions` lists them
    # A number of steps; the newest version at or before each multiple of it is kept
    keep_every: int | None = None
    # A figure of the metadata, ``"max"`` or ``"min"``, and how many versions: those in which it is best. Of equal ones
    # the newest count, and of one step with equal ones the newest alone. Versions without a finite number of this name
    # do not count.
    keep_best: KeepBest | None = None

    def __post_init__(self) -> None:
        for name, count in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if count is not None:
                integer(name, count, minimum=1)
        if self.keep_best is not None:
            check_best("keep_best", self.keep_best)

    @property
    def remove_nothing(self) -> bool:
        return self.keep_last is None and self.keep_every is None and self.keep_best is None

    def asked_for(self, snapshot: StoreSnapshot) -> Iterator[tuple[str, str]]:
        """(id, reason) of each version that a rule keeps. Tombstoned ones do not count: they may vanish."""
        listed = [known for name, known in snapshot.versions.items() if name not in snapshot.tombstoned]
        if self.remove_nothing:
            yield from ((known.id, "no rule") for known in listed)
        if self.keep_last is not None:
            yield from (
                (known.id, option("keep_last", self.keep_last)) for known in listed[-self.keep_last :]
            )
        if self.keep_every is not None:
            newest = {-(-known.step // self.keep_every): known.id for known in listed}
            yield from ((version, option("keep_every", self.keep_every)) for version in newest.values())
        if self.keep_best is not None:
            figure, mode, count = self.keep_best
            sign = 1 if mode == "max" else -1
            # The end of a fit may be saved once more: of one step with one figure, the newest counts.
            having = {
                (known.step, known.figures[figure]): known for known in listed if figure in known.figures
            }.values()
            best = sorted(having, key=lambda known: (sign * known.figures[figure], known.id))[-count:]
            yield from ((known.id, f"{figure} is {known.figures[figure]:.6g}") for known in best)


def check_figure(catalog: Catalog, name: str) -> None:
    """Check that some version has a figure, as a rule for one that is misspelled keeps nothing."""
    versions = [find_figures(record.metadata) for record in catalog.oldest_first()]
    if versions and not any(name in figures for figures in versions):
        known = ", ".join(sorted({each for figures in versions for each in figures})) or "none at all"
        raise OptionError(
            f"keep-best {name}: no version has the figure {name!r} in its metadata: there are {known}"
        )


def choose(
    snapshot: StoreSnapshot, rules: Rules, not_seen: Iterable[str] = (), committed_since: Iterable[str] = ()
) -> dict[str, str]:
    """The versions to keep, oldest first, with reasons.

    Those `not_seen` by the job, and those `committed_since`, are kept whatever the rules say.
    """
    kept: dict[str, str] = {}
    _keep(snapshot, kept, [(version, "the newest") for version in list(snapshot.versions)[-1:]])
    _keep(snapshot, kept, [(version, "pinned") for version in sorted(snapshot.pinned)])
    _keep(snapshot, kept, [(version, f"tagged {name}") for name, version in snapshot.tagged.items()])
    _keep(snapshot, kept, rules.asked_for(snapshot))
    _keep(snapshot, kept, _writer_needs(snapshot))
    _keep(snapshot, kept, [(version, "of another job") for version in not_seen])
    _keep(snapshot, kept, [(version, "came meanwhile") for version in sorted(committed_since)])
    return dict(sorted(kept.items()))


def _keep(snapshot: StoreSnapshot, kept: dict[str, str], wanted: Iterable[tuple[str, str]]) -> None:
    """Add the wanted versions that are committed, and every version that they depend on."""
    wanted = [(version, reason) for version, reason in wanted if version in snapshot.versions]
    kept |= {version: reason for version, reason in wanted if version not in kept}
    todo = [version for version, _ in wanted]
    while todo:
        above = todo.pop()
        for version in snapshot.depends_on(above) - kept.keys():
            kept[version] = f"needed by {above}"
            todo.append(version)


def _writer_needs(snapshot: StoreSnapshot) -> Iterator[tuple[str, str]]:
    """(id, reason) of what the newest writer's next version may depend on. A closed or ended one has none."""
    newest = snapshot.newest
    if newest is None or newest.is_over:
        return
    own = (name for name in snapshot.versions if name.startswith(f"{newest.id}."))
    head = max(own, default=newest.base)
    if head is not None:
        reason = f"writer {newest.id} goes on from it"
        yield head, reason
        # Also what a fold made needless: its writer may not have heard of the fold yet.
        yield from (
            (need, reason) for need in (snapshot.versions[head].needs if head in snapshot.versions else ())
        )
