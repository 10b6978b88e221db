"""An epoch that several ranks share: where each rank of another number goes on in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch.utils.data import BatchSampler, DistributedSampler

from cnr_store.errors import OptionError

_NUMBERS = ("samples", "batch_size", "ranks")


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


def position_of(states: Sequence[Any], fields: frozenset[str]) -> tuple[int, int]:
    """The epoch and the batch that the readers of all ranks stand at."""
    for rank, state in enumerate(states):
        if not isinstance(state, Mapping) or not state.keys() >= fields:
            _refuse(f"that of rank {rank} is no state of a TrackedReader")
    positions = {(state["epoch"], state["batch"]) for state in states}
    if len(positions) != 1:
        _refuse(
            f"they stand at different batches: (epoch, batch) is {', '.join(map(str, sorted(positions)))}"
        )
    epoch, batch = positions.pop()
    if any(type(number) is not int or number < 0 for number in (epoch, batch)):
        _refuse(f"epoch {epoch!r}, batch {batch!r} is no position")
    return epoch, batch


def divide(
    states: Sequence[Mapping[str, Any]],
    batch: int,
    sharding: Mapping[str, Any] | None,
    batches: int | None,
    world: int,
) -> int:
    """How many batches each rank has taken of an epoch of which each of other ranks has taken `batch`.

    `sharding`, `batches`: how this rank's loader deals an epoch out, and its batches of an epoch.
    `world`: how many ranks there are now.
    """
    saved = [state["sharding"] for state in states]
    first = saved[0]
    if sharding is None or not isinstance(first, Mapping) or any(each != first for each in saved):
        _refuse(
            "they stand in the middle of an epoch, and only what a DataLoader with torch's own DistributedSampler has "
            "taken is known to other ranks"
        )
    if first.keys() != sharding.keys() or any(
        type(first[name]) is not int or first[name] < 1 for name in _NUMBERS
    ):
        _refuse("what they say of the DistributedSampler is malformed")
    if first["ranks"] != len(states) or sharding["ranks"] != world:
        _refuse(
            f"the saved DistributedSampler had {first['ranks']} replicas on {len(states)} ranks, and this one has "
            f"{sharding['ranks']} on {world}"
        )
    differing = [name for name in ("samples", "shuffle", "seed") if first[name] != sharding[name]]
    if differing:
        _refuse(f"this DistributedSampler has another {' and '.join(differing)}")
    if batches is not None and batch == states[0]["loader"].get("batches"):
        return batches
    taken: int = batch * first["batch_size"] * len(states)
    together: int = sharding["batch_size"] * world
    if taken % together:
        _refuse(
            f"{taken} samples of the epoch were trained, which are not whole batches for {world} ranks that take "
            f"{together} at once"
        )
    return taken // together


def _refuse(why: str) -> NoReturn:
    raise OptionError(
        f"the readers can't go on with another number of ranks: {why}. Load a version that was saved between two "
        "epochs, or use as many ranks as saved it, or set the positions of the readers yourself"
    )
