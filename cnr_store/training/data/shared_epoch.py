"""An epoch that several ranks share: where each rank of another number goes on in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch.utils.data import BatchSampler, DistributedSampler

from cnr_store.errors import OptionError


def sharding_of(batches: Any) -> dict[str, Any] | None:
    """How a sampler of batches deals an epoch out to ranks; None if that is not known.

    `DistributedSampler` shuffles alike on all ranks, and each takes every so many-th sample. When all have taken as
    many, these are the first ones of the shuffled epoch, whatever the number of ranks.
    """
    sampler: Any = batches.sampler if type(batches) is BatchSampler else None
    if type(sampler) is not DistributedSampler:
        return None
    dataset: Any = sampler.dataset
    return {
        "samples": len(dataset),
        "batch_size": batches.batch_size,
        "ranks": sampler.num_replicas,
        "shuffle": sampler.shuffle,
        "seed": sampler.seed,
    }


def divide(states: Sequence[Mapping[str, Any]], now: Mapping[str, Any], world: int) -> tuple[int, int]:
    """The epoch, and how many batches each rank has taken of it, when `world` ranks go on from the readers' states.

    `now`: the state of this rank's reader, which has taken nothing yet.
    """
    positions = {(state["epoch"], state["batch"]) for state in states}
    if len(positions) != 1:
        _refuse(
            f"they stand at different batches: (epoch, batch) is {', '.join(map(str, sorted(positions)))}"
        )
    epoch, batch = positions.pop()
    if any(type(number) is not int or number < 0 for number in (epoch, batch)):
        _refuse(f"epoch {epoch!r}, batch {batch!r} is no position")
    if not batch:
        return epoch, 0
    first, own = states[0]["sharding"], now["sharding"]
    if own is None or not isinstance(first, Mapping) or any(state["sharding"] != first for state in states):
        _refuse(
            "they stand in the middle of an epoch, and only what a DataLoader with torch's own DistributedSampler has "
            "taken is known to other ranks"
        )
    if first["ranks"] != len(states) or own["ranks"] != world:
        _refuse(
            f"the saved DistributedSampler had {first['ranks']} replicas on {len(states)} ranks, and this one has "
            f"{own['ranks']} on {world}"
        )
    if differing := [name for name in ("samples", "shuffle", "seed") if first[name] != own[name]]:
        _refuse(f"this DistributedSampler has another {' and '.join(differing)}")
    batches = now["loader"].get("batches")
    if batches is not None and batch == states[0]["loader"].get("batches"):
        return epoch, batches
    taken, together = batch * first["batch_size"] * len(states), own["batch_size"] * world
    if type(taken) is not int or taken < 1 or taken % together:
        _refuse(
            f"{taken!r} samples of the epoch were trained, which are not whole batches for {world} ranks that take "
            f"{together} at once"
        )
    return epoch, taken // together


def _refuse(why: str) -> NoReturn:
    raise OptionError(
        f"the readers can't go on with another number of ranks: {why}. Load a version that was saved between two "
        "epochs, or use as many ranks as saved it, or set the positions of the readers yourself"
    )
