"""Proofs of the policy in a commit record: what decided between whole and delta, and what each rank wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.json import encode

from cnr_store.format.layout import MAX_RANKS
from cnr_store.format.validate import Percent, Time, proven
from cnr_store.policies.checks import MOST, Natural
from cnr_store.policies.past import Past
from cnr_store.policies.policy import Offer

MAX_RANKS_LISTED = 64
"""One by one; of more, only the least, the mean and the most is stored."""

_World = Annotated[int, Meta(ge=0, le=MAX_RANKS)]
_Number = Annotated[float, Meta(ge=0, le=MOST)]


class _Reason(Struct):
    count: Natural
    tables: list[str]
    bytes: Natural = 0
    delta_bytes: Natural = 0


class _Spread(Struct):
    min: _Number
    mean: _Number
    max: _Number


class _Budget(Struct):
    percent: Percent
    rms_step: Percent


class _Policy(Struct):
    """The members that writers go by, or that are shown to people one by one."""

    full: bool = True
    offer: Offer | None = None
    past: Past | None = None
    seconds: dict[str, Time] = {}
    ranks: dict[str, _World | list[_Number] | dict[str, Any]] | None = None  # by rank, or as `_Spread`
    whole: dict[str, _Reason] = {}
    budget: _Budget | None = None


def prove_policy(doc: Mapping[str, Any]) -> None:
    """Prove a policy."""
    policy: _Policy = proven(doc, _Policy, "policy")
    if encode(policy.past, order="sorted") != encode(doc.get("past"), order="sorted"):
        raise ValueError("policy.past lacks some member of sums, or has others")
    for reason in policy.whole.values():
        if reason.count < len(reason.tables):
            raise ValueError(f"policy.whole counts {reason.count} tables and names {len(reason.tables)}")
    if policy.ranks is None:
        return
    world = proven(policy.ranks.pop("world", None), _World, "policy.ranks.world")
    for name, numbers in policy.ranks.items():
        ranks = numbers if isinstance(numbers, list) else proven(numbers, _Spread, f"policy.ranks.{name:.60}")
        if isinstance(ranks, list) and (len(ranks) != world or world > MAX_RANKS_LISTED):
            raise ValueError(f"policy.ranks.{name:.60} lists {len(ranks)} ranks of {world}")
