"""Quality of binary predictions on held-out samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

_SMALLEST = 1e-12


def auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Chance that a positive sample scores above a negative one, ties counting half (Mann-Whitney).

    `labels` (n,) of 0 and 1, `scores` (n,). NaN if one of the two classes is missing.
    """
    positive = np.asarray(labels, np.float64) > 0.5
    _, place, counts = np.unique(np.asarray(scores, np.float64), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    rank = ((ends - counts + 1 + ends) / 2)[place]
    n, p = len(positive), int(positive.sum())
    if p in (0, n):
        return float("nan")
    return float((rank[positive].sum() - p * (p + 1) / 2) / (p * (n - p)))


def log_loss(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """Mean of -log of the probability given to what happened, in nats; (n,) and (n,)."""
    truth = np.asarray(labels, np.float64)
    p = np.clip(np.asarray(probabilities, np.float64), _SMALLEST, 1 - _SMALLEST)
    return float(-np.mean(truth * np.log(p) + (1 - truth) * np.log1p(-p)))
