"""The options of a checkpointer, once they are checked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import Optimizer

from cnr_store.errors import OptionError
from cnr_store.format.state import dumps
from cnr_store.maintenance.collection.rules import Rules
from cnr_store.options import Failures, Job, Limits, Retention, Tracking
from cnr_store.policies.policy import Costs, PolicyName
from cnr_store.ranks.group import Document, Group
from cnr_store.training.model.trained_model import TrainedModel
from cnr_store.training.saving.agreement import check_alike
from cnr_store.training.saving.codec_choice import CodecChoice
from cnr_store.training.saving.pending_save import PendingSave

CONSTRUCT = "construct"
"""What ranks that compare their options are doing."""


@dataclass(frozen=True)
class Options:
    """What a caller gave `Checkpointer`, checked. `Checkpointer` documents each option."""

    policy: PolicyName
    codecs: CodecChoice  # of `budget`, `bits`, `codec`, `state_bits` and `expected_restores`
    objects: Mapping[str, Any]  # the option `state`
    on_done: Callable[[PendingSave], object] | None
    rules: Rules  # of `keep_last` and `retention`
    trusted: Collection[type[Optimizer]]  # of `tracking`
    retention: Retention
    failures: Failures
    limits: Limits
    tracking: Tracking
    job: Job

    @property
    def costs(self) -> Costs:
        return Costs(self.rules.keep_last, self.job.restores_per_save).limited(self.retention.max_chain)

    @property
    def audits_all(self) -> bool:
        """Whether saves compare all tables."""
        return self.tracking.audit == "all"

    def agree(self, group: Group, url: str, trained: TrainedModel) -> None:
        """Compare what all ranks were given, and tell each where TorchRec's optimizer stood among it.

        A rank that holds no table of that optimizer can't tell.

        `url`: of the store, without secrets.
        """
        if group.world == 1:
            return

        def judge(documents: list[Document]) -> Document:
            memory = next((doc["url"] for doc in documents if doc["url"].startswith("memory:")), None)
            if memory is not None:
                raise OptionError(
                    f"{memory} lies in the memory of one process, and there are {group.world} ranks: give a URL of a "
                    "place that all of them reach"
                )
            check_alike(CONSTRUCT, documents, list(given), OptionError)
            return {"fused": next((doc["fused"] for doc in documents if doc["fused"] is not None), None)}

        listed = [[table.name, table.rows, table.dim] for table in trained.tables]
        given = {
            "url": url,
            "tables": hashlib.sha256(dumps(listed)).hexdigest()[:16],
            "policy": self.policy,
            **self.codecs.settings,
            "state": repr(sorted(self.objects)),
            "keep_last": self.rules.keep_last,
            "retention": repr(self.retention),
            "failures": repr(replace(self.failures, retry_seconds=0)),
            "limits.overlap": self.limits.overlap,
            "limits.exact_parents": self.limits.exact_parents,
            "tracking.exclude": repr(trained.excluded.patterns),
            "tracking.audit": "all" if self.audits_all else "samples",
            "job": repr(replace(self.job, group=None)),
        }
        said = {**given, "fused": trained.fused_position}
        trained.fused_position = group.decide(CONSTRUCT, said, judge)["fused"]
