"""How many bytes deltas really took of those that codecs estimated, by which the next are estimated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cnr_store.policies.past import SINCE, Since

_MIN_BYTES = 16 << 10
"""Of smaller deltas, heads and indexes are a large share."""

_NEAR = 0.1
"""An estimate that is off by no more stays: that of codes of fixed widths, beside which stand heads and indexes."""


@dataclass
class DeltaBytes:
    """By what a delta covers, the share of the codecs' estimate that the last one took in this process.

    Sums of all arrays, which every rank of a job knows, so that all decide alike.
    """

    # The version noted last stands beside the shares, so that an interrupt never counts it twice.
    _noted: tuple[str, Mapping[Since, float]] = field(default=("", {}))

    def note(self, version: str, policy: Mapping[str, Any], nbytes: int) -> None:
        """Take down what a version took. A second call changes nothing.

        Parameters
        ----------
        policy
            In its record: the fields of a `Decision`.
        nbytes
            Of its arrays.
        """
        offer, since = policy.get("offer"), policy.get("since")
        if offer is None or policy.get("full") or since not in SINCE or version == self._noted[0]:
            return
        offered = offer[f"{since}_bytes"]
        if min(offered, nbytes) >= _MIN_BYTES:
            self._noted = version, {**self._noted[1], since: self.share(since) * nbytes / offered}

    def share(self, since: Since) -> float:
        """Of such deltas; where there was none, of the others, so that the two differ by their rows alone; else 1.

        It is 1 where the estimate was near.
        """
        shares = self._noted[1]
        share = shares.get(since, next(iter(shares.values()), 1.0))
        return 1.0 if abs(share - 1) <= _NEAR else share
