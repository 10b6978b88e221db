"""Lines of integers, coded in blocks that are decoded one by one.

The words of coded lines, all u16, are the models; of each block of `BLOCK_LINES` lines its bytes, as u32; then the
blocks. The reference of the tests writes the same words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.entropy.models import Frequencies, Words, model_words, normalize, read_models
from cnr_codecs.errors import PayloadError
from cnr_codecs.kernels import rans as kernels

Codes = npt.NDArray[np.signedinteger[Any]]

BLOCK_LINES = 2048
_STATE_BYTES = 4 * kernels.LANES


@dataclass(frozen=True, eq=False)
class CodedLines:
    """Coded integers."""

    words: Words  # uint16: the words, and `SLACK_WORDS` that don't count
    size: int  # how many integers there are
    line: int  # how many a line has. The last one may have fewer.
    frequencies: Frequencies  # the models
    # int64 (blocks + 1,): the words at which blocks begin, and where the last one ends
    edges: npt.NDArray[np.int64]

    @classmethod
    def encode(cls, codes: Codes, line: int) -> CodedLines:
        """Code integers, flat int16 or int32 of at least one, whose zigzag codes are below 2**18."""
        codes = np.ascontiguousarray(codes).view()
        codes.flags.writeable = False  # kernels are compiled for read-only codes and words alone
        classes = np.empty(-(-codes.size // line), np.uint8)
        counts = np.zeros(kernels.LANES * kernels.CLASSES * kernels.TOKENS, np.int64)
        kernels.classify(codes, line, classes, counts)
        by_model = counts.reshape(kernels.LANES, kernels.CLASSES, kernels.TOKENS).sum(axis=0)
        frequencies = normalize(by_model)
        blocks = _encode_blocks(codes, line, classes, frequencies)
        sizes = np.array([2 * len(block) for block in blocks], "<u4")
        head = [model_words(frequencies), sizes.view("<u2")]
        slack = np.zeros(kernels.SLACK_WORDS, np.uint16)
        first = sum(len(part) for part in head)
        edges = first + np.concatenate([[0], np.cumsum(sizes.astype(np.int64) // 2)])
        words = np.concatenate([*head, *blocks, slack])
        words.flags.writeable = False
        return cls(words, codes.size, line, frequencies, edges)

    @classmethod
    def parse(cls, data: bytes, size: int, line: int, where: str) -> CodedLines:
        """Return the coded lines whose words are `data`. What blocks hold is proven when they are decoded."""
        if len(data) % 2:
            raise PayloadError(f"{where}: {len(data)} bytes of coded rows are no whole number of words")
        words = np.frombuffer(data + bytes(2 * kernels.SLACK_WORDS), "<u2").astype(np.uint16, copy=False)
        held = words[: -kernels.SLACK_WORDS]
        frequencies, place = read_models(held, where)
        blocks = -(-size // (line * BLOCK_LINES))
        sizes = held[place : place + 2 * blocks]
        if len(sizes) != 2 * blocks:
            raise PayloadError(f"{where}: the sizes of {blocks} blocks are cut off")
        nbytes = sizes[::2].astype(np.int64) + (sizes[1::2].astype(np.int64) << 16)
        first = place + 2 * blocks
        if (
            (nbytes % 2).any()
            or (nbytes < _STATE_BYTES).any()
            or int(nbytes.sum()) != 2 * (len(held) - first)
        ):
            raise PayloadError(
                f"{where}: its blocks are said to take {int(nbytes.sum())} bytes, they have {2 * (len(held) - first)}"
            )
        edges = first + np.concatenate([[0], np.cumsum(nbytes // 2)])
        return cls(words, size, line, frequencies, edges)

    @property
    def data(self) -> memoryview:
        """The words as they are stored."""
        return self.words[: -kernels.SLACK_WORDS].astype("<u2", copy=False).data.cast("B")

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in memory once it is decoded."""
        return self.words.nbytes + self.edges.nbytes + (4 * kernels.CLASSES << kernels.PRECISION)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self.edges) - 1

    def decode_block(self, number: int, out: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], int]:
        """Decode a block into `out`, int32 with room for it. The GIL is released.

        Return its integers, a view of `out`, and the greatest zigzag code of those that are large; 0 without any.
        """
        first = number * self.line * BLOCK_LINES
        codes = out[: min(self.line * BLOCK_LINES, self.size - first)]
        begin, end = int(self.edges[number]), int(self.edges[number + 1])
        most = kernels.decode_block(self.words, begin, end, self._table, self._known, self.line, codes)
        if most < 0:
            raise PayloadError(
                f"block {number} of {self.blocks} is damaged: it doesn't decode to {codes.size} codes"
            )
        return codes, most

    @cached_property
    def _table(self) -> npt.NDArray[np.uint32]:
        table = np.zeros(kernels.CLASSES << kernels.PRECISION, np.uint32)
        kernels.decoder_table(self.frequencies, table)
        return table

    @cached_property
    def _known(self) -> npt.NDArray[np.uint8]:
        known: npt.NDArray[np.uint8] = np.any(self.frequencies, axis=1).astype(np.uint8)
        return known


def _encode_blocks(
    codes: Codes, line: int, classes: npt.NDArray[np.uint8], frequencies: Frequencies
) -> list[Words]:
    table = np.zeros(kernels.CLASSES * kernels.TOKENS * 4, np.uint64)
    kernels.encoder_table(frequencies, table)
    lines = min(len(classes), BLOCK_LINES)
    words = np.empty(2 * min(lines * line, codes.size) + lines + 2 * kernels.LANES, np.uint16)
    blocks = []
    for first in range(0, len(classes), BLOCK_LINES):
        held = classes[first : first + BLOCK_LINES]
        block = codes[first * line : (first + len(held)) * line]
        blocks.append(words[kernels.encode_block(block, line, held, table, words) :].copy())
    return blocks


def block_room(coded: CodedLines) -> npt.NDArray[np.int32]:
    """Return new memory for any one block."""
    return np.empty(min(coded.line * BLOCK_LINES, coded.size), np.int32)
