"""Proofs of the policy in a commit record: what decided between whole and delta, and what each rank wrote."""

from __future__ import annotations

from cnr_store.format import validate
from cnr_store.format.arrays import Doc
from cnr_store.format.layout import MAX_RANKS

_SUMS = {"full_bytes", "deltas", "deltas_bytes", "first_bytes", "last_bytes"}
_PAST = {
    "written",
    "intermittent",
    "folds_bytes",
    "links",
    "beneath_bytes",
    "excess_bytes",
    "older_excess_bytes",
}
MAX_EXCESS = 64
MAX_RANKS_LISTED = 64
"""One by one; of more, only the least, the mean and the most is stored."""


def prove_policy(policy: Doc) -> Doc:
    """A policy whose members that writers go by, or that are shown to people one by one, are proven.

    Raises
    ------
    ValueError, KeyError
        What is malformed.
    """
    past = policy.get("sizes_bytes", [])
    if type(policy.get("full", True)) is not bool or not isinstance(past, list):
        raise ValueError("policy.full or policy.sizes_bytes is of another type")
    for size in past:
        validate.natural(size, "policy.sizes_bytes")
    deltas, offer = policy.get("deltas", []), policy.get("offer")
    if policy.get("past") is not None:
        _prove_past(validate.members(policy["past"], "policy.past"))
    if not isinstance(deltas, list) or len(deltas) > max(len(past) - 1, 0):
        raise ValueError("policy.deltas is no list of deltas among policy.sizes_bytes")
    for delta in deltas:
        if not isinstance(delta, list) or len(delta) != 2:
            raise ValueError(f"policy.deltas has {validate.shown(delta)}")
        validate.one_of(delta[0], "policy.deltas", ("baseline", "previous"))
        validate.natural(delta[1], "policy.deltas")
    if offer is not None:
        for name in ("baseline_bytes", "previous_bytes"):
            validate.natural(validate.members(offer, "policy.offer")[name], f"policy.offer.{name}")
    for name, seconds in validate.members(policy.get("seconds", {}), "policy.seconds").items():
        validate.seconds(seconds, f"policy.seconds.{name}")
    if policy.get("ranks") is not None:
        _prove_ranks(validate.members(policy["ranks"], "policy.ranks"))
    for tables in validate.members(policy.get("whole", {}), "policy.whole").values():
        named = validate.texts(validate.members(tables, "policy.whole")["tables"], "policy.whole.tables")
        if validate.natural(tables["count"], "policy.whole.count") < len(named):
            raise ValueError(f"policy.whole counts {tables['count']} tables and names {len(named)}")
    return policy


def _prove_past(past: Doc) -> None:
    """The sums that a policy sees, member by member: a writer goes on from them."""
    if past.keys() != _PAST:
        raise ValueError(f"policy.past has {len(past)} members, not {', '.join(sorted(_PAST))}")
    for name in ("written", "intermittent"):
        sums = validate.members(past[name], f"policy.past.{name}")
        if sums.keys() != _SUMS:
            raise ValueError(f"policy.past.{name} has {len(sums)} members, not {', '.join(sorted(_SUMS))}")
        for member, value in sums.items():
            validate.natural(value, f"policy.past.{name}.{member}")
    for member in ("folds_bytes", "links", "beneath_bytes"):
        validate.natural(past[member], f"policy.past.{member}")
    excess, older = past["excess_bytes"], past["older_excess_bytes"]
    if not isinstance(excess, list) or len(excess) > MAX_EXCESS:
        raise ValueError(f"policy.past.excess_bytes is {validate.shown(excess)}, not a list of numbers")
    for value in [*excess, *([] if older is None else [older])]:
        if type(value) is not int or abs(value) > validate.MOST:
            raise ValueError(f"policy.past has an excess of {validate.shown(value)}")


def _prove_ranks(ranks: Doc) -> None:
    """What each rank wrote, or the least, the mean and the most."""
    world = validate.natural(ranks["world"], "policy.ranks.world", MAX_RANKS)
    for name, numbers in ranks.items():
        if name == "world":
            continue
        if isinstance(numbers, dict):
            values = [numbers[each] for each in ("min", "mean", "max")]
        else:
            values = validate.items(numbers, f"policy.ranks.{name}")
            if len(values) != world or world > MAX_RANKS_LISTED:
                raise ValueError(f"policy.ranks.{name} lists {len(values)} ranks of {world}")
        for value in values:
            if type(value) not in (int, float) or not 0 <= value <= validate.MOST:
                raise ValueError(f"policy.ranks.{name} has {validate.shown(value)}, not a number")
