"""Begins each save on all ranks alike, or on none."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch

from cnr_backends import BackendError
from cnr_store.errors import CheckpointError, OptionError, SaveError, listed
from cnr_store.format.state import dumps
from cnr_store.maintenance.folding.compact import CompactReport
from cnr_store.options import Overlap, check_choice
from cnr_store.policies.checks import integer
from cnr_store.ranks.decisions import named
from cnr_store.ranks.group import Document, Group
from cnr_store.training.devices.support import failing_saves
from cnr_store.training.distributed.pieces import is_dtensor
from cnr_store.training.model.names import parameter_names
from cnr_store.training.model.object_state import state_of
from cnr_store.training.model.trained_model import TrainedModel
from cnr_store.training.saving.agreement import (
    check_alike,
    check_dense,
    dense_digests,
    divide_dense,
    together,
)
from cnr_store.training.saving.auto_maintenance import BackgroundMaintenance
from cnr_store.training.saving.decays import merge_told
from cnr_store.training.saving.options import Options
from cnr_store.training.saving.pending_save import PendingSave
from cnr_store.training.saving.save_queue import SaveQueue
from cnr_store.training.saving.snapshot import Snapshot, add_fused, take_snapshot
from cnr_store.writing.lineage import Lineage

log = logging.getLogger("cnr_store")
_REBASED = "%s: %s was removed since this job loaded; the save builds on the fold of version %s"
_WHOLE = "%s: %s was removed since this job loaded; the save is whole"


@dataclass(frozen=True)
class Request:
    """What a caller asked of one save."""

    step: int
    reader: Any
    metadata: Any
    full: bool
    overlap: Overlap | None


_Ready = tuple[Request, Snapshot | int]
"""A save that this rank can begin: what was asked, checked, and its snapshot; or the step of the save that goes on."""


class Coordinator:
    """Begins saves.

    `follow_model`: checks that the model's tables are where they were.
    """

    def __init__(
        self,
        group: Group,
        trained: TrainedModel,
        options: Options,
        saves: SaveQueue,
        upkeep: BackgroundMaintenance,
        follow_model: Callable[[], None],
    ) -> None:
        self._group = group
        self._trained = trained
        self._options = options
        self._saves = saves
        self._upkeep = upkeep
        self._follow_model = follow_model
        self._folded: CompactReport | None = None
        self._skipped: int | None = None  # the step of the last save, if that was skipped

    def begin(self, request: Request) -> PendingSave:
        """Begin a save, or skip it, as all ranks do. See `Checkpointer.save`."""
        began = time.perf_counter()
        phase = f"save of step {request.step!r}"
        digests: list[str] = []  # which the first rank alone needs

        def merge(said: list[Document]) -> Document:
            digests.extend(digest for doc in said for digest in doc.get("state", ()))
            agreed = merge_said(phase, said)
            if (unloaded := self._saves.writer.unloaded) and self._options.job.unloaded == "raise":
                raise OptionError(
                    f"{phase}: {unloaded}. Nothing was written. Call resume() before the first save; or give another "
                    "URL, or job=cnr_store.Job(unloaded='warn'), to begin anew"
                )
            may_be_delta = agreed["skips"] is None and not request.full
            return {**agreed, **self._hold_bases(phase)} if may_be_delta else agreed

        try:
            (request, snapshot), agreed = together(
                self._group,
                phase,
                lambda: self._prepare(request),
                self._say,
                self._saves.progress,
                merge,
            )
        except Exception:
            raise
        except BaseException as error:  # an interrupt, before or after the others have begun
            self._saves.refuse(error)
            raise
        if agreed["skips"] is not None:
            self._saves.outage.miss(request.step)
            self._skipped = request.step
            return PendingSave.skip(request.step, agreed["skips"])
        assert isinstance(snapshot, Snapshot)  # or this rank skips, and so all do
        snapshot.part_digests, snapshot.full = digests, bool(request.full)
        pending, self._skipped = PendingSave(request.step), None
        pending.began = began
        snapshot.pending = pending
        team = self._saves.new_team(1 + agreed["number"])
        try:
            self._settle(snapshot, agreed)
        except BaseException as error:
            team.give_up(error)
            if not isinstance(error, CheckpointError):  # those are raised on all ranks
                self._group.break_off()
            raise
        self._saves.start(snapshot, team, may_hold=request.overlap == "wait")
        pending.stall_seconds = time.perf_counter() - began
        return pending

    def tell_of_last(self, latest: PendingSave | None) -> None:
        """Log, as no save comes any more, if the last one made no version. `latest` is the last that was begun."""
        step, outcome = self._skipped, "was skipped (with overlap='wait' it would have waited)"
        if step is None and latest is not None and latest.error is not None:
            step, outcome = latest.step, "failed"
        if step is not None and self._group.rank == 0:
            newest = self._saves.planner.lineage.version or "none"
            log.warning("the last save, of step %d, %s; the newest version is %s", step, outcome, newest)

    def _prepare(self, request: Request) -> _Ready:
        step = integer("step", request.step, minimum=0)
        overlap = self._options.limits.overlap if request.overlap is None else request.overlap
        check_choice("overlap", overlap, Overlap)
        request = replace(request, step=step, overlap=overlap)
        latest = self._saves.latest
        if overlap == "skip" and latest is not None and not latest.done():
            return request, latest.step
        self._saves.finish_latest(next_step=step)
        self._folded = self._upkeep.pop_folded() or self._folded
        self._trained.reshard()
        # Code of the caller, which may change the model.
        reader = state_of(request.reader)
        objects = {name: state_of(value) for name, value in self._options.objects.items()}
        self._follow_model()  # or the snapshot would take a tensor that replaced a table for a dense one
        self._trained.flush_caches()
        snapshot = take_snapshot(
            self._trained,
            objects,
            reader,
            request.metadata,
            self._options.job.rng,
            self._group.rank if self._group.world > 1 else None,
        )
        if self._group.rank == 0:
            self._options.codecs.warn_unknown_slots(self._trained.table_slots)
            self._saves.tracker.stepped.warn_of_strangers(self._trained.saved_parameters, objects)
        snapshot.unsafe = self._saves.tracker.whole_reasons()
        return request, snapshot

    def _say(self, ready: _Ready) -> Document:
        """What the other ranks must know of this one."""
        request, snapshot = ready
        said = {"step": request.step, "overlap": request.overlap, "full": bool(request.full)}
        if not isinstance(snapshot, Snapshot):
            return said | {"skips": snapshot}
        folded, lineage = self._folded, self._saves.planner.lineage
        is_alone, number = self._group.world == 1, self._saves.number
        # The second save compares, too, because optimizers may have no state at the first.
        compares_replicas = not is_alone and (number < 2 or number % _EVERY == 0)
        return {
            **said,
            "skips": None,
            "dense": None if is_alone else dense_digests(snapshot.dense),
            "state": [hashlib.sha256(dumps(part)).hexdigest() for part in snapshot.parts.values()],
            "moved": self._saves.tally.say(snapshot.arrays),
            "unsafe": dict(snapshot.unsafe),
            "refits": self._saves.planner.judge(snapshot.arrays),
            "off_grid": self._saves.planner.decays.off_grid,
            "decays": self._saves.planner.decays.told,
            "dense_bytes": snapshot.own_shared_bytes,
            "folded": None if folded is None else [folded.version, folded.bytes],
            "settings": {
                table.name: settings
                for table, sharded in self._trained.fused_tables
                if (settings := sharded.settings())
            },
            "number": number,
            "previous": lineage.version,
            "restores": lineage.restores,
            "spent": lineage.spent,
            "lineage": "" if is_alone else lineage.digest(),
            "replicas": sample_replicas(self._trained) if compares_replicas else None,
        }

    def _hold_bases(self, phase: str) -> Document:
        """See that nobody removes what this save may depend on; plan it anew if that was removed already.

        A run that has loaded holds nothing until it claims the store. Its first save does so before it is planned,
        while all rows are still in the model. Only the first rank asks. What storage refuses here, it refuses again
        where the save is written.
        """
        lineage, writer = self._saves.planner.lineage, self._saves.writer
        if writer.has_claimed or not lineage.lines:
            return {}
        with suppress(BackendError, CheckpointError), self._group.working(phase, self._saves.progress):
            lost, fold = writer.hold(lineage)
            named_versions = f"version {listed(lost, 1)}"
            if fold is not None:
                log.info(_REBASED, phase, named_versions, fold.id)
                return {"rebased": [fold.id, fold.nbytes]}
            if lost:
                log.warning(_WHOLE, phase, named_versions)
                return {"lost": f"{named_versions} was removed before this run's first save"}
        return {}

    def _settle(self, snapshot: Snapshot, agreed: Document) -> None:
        """Make this rank's snapshot what all ranks plan with."""
        planner = self._saves.planner
        if agreed["apart"]:
            # The outcome of a save was lost on the way to some ranks, or a load was cut short on one. All go on from
            # what the first rank knows.
            planner.continue_from(
                Lineage(agreed["previous"], restores=agreed["restores"], spent=agreed["spent"]), {}
            )
        elif agreed.get("lost"):
            planner.drop_bases(agreed["lost"])
        else:
            for fold in filter(None, (agreed["folded"], agreed.get("rebased"))):
                planner.apply_fold(*fold)
        self._saves.fold_bytes += 0 if agreed["folded"] is None else agreed["folded"][1]
        self._folded = None
        if agreed["moved"]:
            self._saves.tally.settle()
        snapshot.arrays = self._saves.tally.complete(snapshot.arrays)
        snapshot.unsafe, snapshot.dense_bytes = dict(agreed["unsafe"]), agreed["dense_bytes"]
        planner.refitted, planner.decays.agreed = agreed["refits"], agreed["decays"]
        if self._group.rank == 0:
            self._saves.tracker.warn(snapshot.unsafe)
        if self._trained.fused_position is not None:
            add_fused(snapshot, self._trained, agreed["settings"])
        divide_dense(snapshot, self._group)


def merge_said(phase: str, said: list[Document]) -> Document:
    """What all ranks go by, from what each said."""
    check_alike(phase, said, ("step", "full", "overlap"))
    skips = next((doc["skips"] for doc in said if doc["skips"] is not None), None)
    if skips is not None:
        return {"skips": skips}
    check_dense(phase, said)
    check_replicas(phase, said)
    first = said[0]
    return {
        "skips": None,
        "number": max(doc["number"] for doc in said),
        "previous": first["previous"],
        "restores": first["restores"],
        "spent": first["spent"],
        "apart": any(doc["lineage"] != first["lineage"] for doc in said),
        "folded": first["folded"],
        "moved": any(doc["moved"] for doc in said),
        # Why tables are whole: the first reason of any rank.
        "unsafe": {name: why for doc in reversed(said) for name, why in doc["unsafe"].items()},
        "refits": first["refits"] | {path: why for doc in said for path, why in doc["off_grid"].items()},
        "decays": merge_told([doc["decays"] for doc in said]),
        "dense_bytes": first["dense_bytes"],
        "settings": {name: each for doc in said for name, each in doc["settings"].items()},
    }


_EVERY = 16
"""Saves."""

_TENSORS, _VALUES = 256, 8
_TOLERANCE = 0.05
"""Replicas may drift by the order in which a device adds: by far less than tensors differ that are no replicas."""


def sample_replicas(trained: TrainedModel) -> dict[str, dict[str, list[float]]]:
    """A few values of the parameters that each rank has whole, by name, to compare with those of other ranks.

    Where each rank steps on its own and only the parameters are averaged, as by LocalSGD, each has optimizer state of
    its own, and a version would mix that of several ranks. Others spread their state over ranks.

    Those of a parameter stand under "", and those of its optimizer state by their keys: none of what has another shape.
    """
    spread = {
        table.key for table in trained.tables if table.sharded is not None and not table.sharded.replicated
    }
    names = parameter_names(trained.model)
    found: dict[str, dict[str, list[float]]] = {}
    for parameter in trained.model.parameters():
        name = names.get(id(parameter))
        if name is None or name in spread or not _is_plain(parameter):
            continue
        states = [optimizer.state.get(parameter, {}) for optimizer in trained.optimizers]
        found[name] = {"": _values(parameter)} | {
            slot: _values(value) if _is_plain(value) and value.shape[:1] == parameter.shape[:1] else []
            for state in states
            for slot, value in state.items()
            if isinstance(slot, str)
        }
        if len(found) == _TENSORS:
            break
    return found


def check_replicas(phase: str, said: Sequence[Document]) -> None:
    """Check that all ranks say alike values, as far as they said any."""
    samples: list[Mapping[str, Mapping[str, list[float]]]] = [doc.get("replicas") or {} for doc in said]
    for name, first in samples[0].items():
        ours = {rank: sample[name] for rank, sample in enumerate(samples) if name in sample}
        for slot in {slot: None for each in ours.values() for slot in each}:
            what = f"optimizer state {slot!r} of parameter {name!r}" if slot else f"parameter {name!r}"
            if lacking := [rank for rank, each in ours.items() if slot not in each]:
                raise SaveError(
                    f"{phase}: {what} is not on {named(lacking)}: an optimizer that spreads its state over the ranks "
                    "can't be saved, and nothing was written. Give each rank an optimizer with the state of all that "
                    "it has"
                )
            if differing := [rank for rank, each in ours.items() if not _alike(first[slot], each[slot])]:
                raise SaveError(
                    f"{phase}: {what} has other values on {named(differing)} than on rank 0, so one of them would be "
                    "lost: nothing was written. Train replicas that are kept alike with their optimizer state, as "
                    "DistributedDataParallel does and LocalSGD does not, or shard tables by TorchRec or FSDP2"
                )


def _is_plain(tensor: object) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(tensor, torch.Tensor)
        and not is_dtensor(tensor)
        and tensor.is_floating_point()
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and type(tensor.data) is torch.Tensor
        and tensor.numel() > 0
    )


def _values(tensor: torch.Tensor) -> list[float]:
    """So many of a tensor's values, from its first to its last."""
    numbers = torch.linspace(0, tensor.numel() - 1, min(_VALUES, tensor.numel()), dtype=torch.float64)
    with failing_saves(tensor.device, "values that ranks compare"):
        places = torch.unravel_index(numbers.round().long().to(tensor.device), tensor.shape)
        values: list[float] = tensor.detach()[places].reshape(-1).to(torch.float64).cpu().tolist()
    return values


def _alike(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    if len(ours) != len(theirs):
        return False
    largest = max(map(abs, (*ours, *theirs)), default=0.0)
    # NaN and infinity are alike to nothing and to everything: they tell nothing of replicas.
    return not any(abs(one - other) > _TOLERANCE * largest for one, other in zip(ours, theirs, strict=True))
