"""Models: how often each class of lines occurs, and in each class each token.

A model is up to `MAX_TOKENS` frequencies that sum to 4,096. Model 0 is that of the classes. A class without lines has
no model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.errors import PayloadError
from cnr_codecs.kernels.rans import CLASSES, PRECISION, TOKENS

Counts = npt.NDArray[np.int64]
Frequencies = npt.NDArray[np.uint16]
Words = npt.NDArray[np.uint16]

# Tokens of zigzag codes below 2**18: differences of codes of 16 bits.
MAX_TOKENS = 58
_TOTAL = 1 << PRECISION


def normalize(counts: Counts) -> Frequencies:
    """Return the frequencies (CLASSES, TOKENS) of the models whose symbols were counted, int64 (CLASSES, TOKENS)."""
    return np.stack([_normalize_model(row) for row in counts])


def _normalize_model(counts: Counts) -> Frequencies:
    """Round each share of 4,096, at least to 1, then move those by a unit where that costs the fewest bits."""
    total = int(counts.sum())
    if total == 0:
        return np.zeros(len(counts), np.uint16)
    shares = np.where(counts > 0, np.maximum(1, (2 * _TOTAL * counts + total) // (2 * total)), 0)
    while (excess := int(shares.sum()) - _TOTAL) != 0:
        # The logarithms of neighbouring frequencies differ by nearly 2 / (2f + 1), so no logarithm is needed.
        if excess < 0:
            shares[np.argmax(counts / (2 * shares + 1))] += 1
        else:
            costs = np.where(shares > 1, counts / np.maximum(2 * shares - 1, 1), np.inf)
            shares[np.argmin(costs)] -= 1
    return shares.astype(np.uint16)


def model_words(frequencies: Frequencies) -> Words:
    """Return the models as they are stored: of each the number of its frequencies, then these."""
    parts: list[npt.NDArray[Any]] = []
    for row in frequencies:
        held = int(np.flatnonzero(row)[-1]) + 1 if row.any() else 0
        parts += [np.array([held], np.uint16), row[:held]]
    return np.concatenate(parts)


def read_models(words: Words, where: str) -> tuple[Frequencies, int]:
    """Return the frequencies that are stored at the beginning of `words`, and how many words they take."""
    frequencies, place = np.zeros((CLASSES, TOKENS), np.uint16), 0
    for model in range(CLASSES):
        most = MAX_TOKENS if model else CLASSES
        held = int(words[place]) if place < len(words) else -1
        row = words[place + 1 : place + 1 + max(held, 0)]
        if not 0 <= held <= most or len(row) != held:
            raise PayloadError(f"{where}: model {model} is cut off, or has more than {most} frequencies")
        total = int(row.sum(dtype=np.int64))
        if total != (_TOTAL if held or model == 0 else 0):
            raise PayloadError(f"{where}: the frequencies of model {model} sum to {total}, not to {_TOTAL}")
        frequencies[model, :held] = row
        place += 1 + held
    return frequencies, place
