"""What an update yields: blocks of rows, and what is known of their arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class Block(NamedTuple):
    """Some rows of a table, or a dense tensor.

    Attributes
    ----------
    name
        The array's, as in `cnr_store.state_dict`.
    rows
        Of a table the row numbers, int64 (n,) ascending. None for a dense tensor, which comes whole.
    values
        Of a table (n, dim), of a dense tensor in its shape. In the dtype of `ArrayInfo`.
    """

    name: str
    rows: np.ndarray[Any, Any] | None
    values: np.ndarray[Any, Any]


@dataclass(frozen=True)
class ArrayInfo:
    """A table or dense tensor of a version.

    Attributes
    ----------
    shape, dtype
        As `cnr_store.state_dict` returns them: tables of bfloat16 as float32, dense tensors of a type that numpy
        lacks as unsigned integers that hold their bits.
    element
        The type it has in the model, such as ``"bfloat16"``.
    is_table
        Whether it is stored, and yielded, by rows.
    aliases
        Further names of a tied tensor. Its blocks come under the first name only.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    element: str
    is_table: bool
    aliases: tuple[str, ...]
