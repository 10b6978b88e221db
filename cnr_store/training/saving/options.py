"""The options of a checkpointer, once they are checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from cnr_store.maintenance.collection.rules import Rules
from cnr_store.policies.policy import Costs, PolicyName
from cnr_store.training.model.arguments import OnFailure, Overlap
from cnr_store.training.saving.codec_choice import CodecChoice
from cnr_store.training.saving.pending_save import PendingSave


@dataclass(frozen=True)
class Options:
    """What a caller gave `Checkpointer`, checked. `Checkpointer` documents each option.

    Attributes
    ----------
    retention
        Of `keep_last` and `keep_every`.
    costs
        Of `keep_last` and `restores_per_save`.
    codecs
        Of `bits`, `codec`, `expected_restores` and `state_bits`.
    objects
        The option `state`.
    """

    retention: Rules
    workers: int
    max_chain: int | None
    snapshot_bytes: int
    overlap: Overlap
    on_done: Callable[[PendingSave], object] | None
    trusted_optimizers: Collection[type[Optimizer]]
    policy: PolicyName
    costs: Costs
    codecs: CodecChoice
    objects: Mapping[str, Any]
    rng: bool
    on_failure: OnFailure
    max_failures: int
    retry_seconds: float
    max_write_bytes_per_second: float | None
