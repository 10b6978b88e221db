"""From bits to row numbers, on the device that holds them."""

from __future__ import annotations

import torch

from cnr_store.training.devices.flags import WORD_ROWS

# Words that are looked at together. Each that is not 0 takes 128 bytes while its bits are read.
_PIECE_WORDS = 1 << 19


def rows_of(words: torch.Tensor) -> torch.Tensor:
    """The rows whose bits are set in `words`, ascending, int64 ``(n,)``. It waits for the device."""
    bits = torch.arange(WORD_ROWS, dtype=torch.int32, device=words.device)
    found = []
    for first in range(0, words.numel(), _PIECE_WORDS):
        piece = words[first : first + _PIECE_WORDS]
        # Most words of a table of which little changed are 0.
        held = piece.nonzero()[:, 0]
        places = ((piece[held][:, None] >> bits) & 1).nonzero()
        found.append((held[places[:, 0]] + first) * WORD_ROWS + places[:, 1])
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=words.device)


def chunk_edges(ids: torch.Tensor, rows: int, chunk_rows: int) -> torch.Tensor:
    """Where the rows of each chunk begin among ascending `ids`, and where the last one's end: int64 ``(chunks + 1,)``.

    The differences are the rows of each chunk. `rows` are those of the table.
    """
    chunks = -(-rows // chunk_rows)
    return torch.searchsorted(ids, torch.arange(chunks + 1, device=ids.device) * chunk_rows)
