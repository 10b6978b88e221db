"""Checks of numbers that callers pass."""

from __future__ import annotations

import math
from contextlib import suppress
from numbers import Integral, Real
from typing import Annotated, Any

from msgspec import Meta

from cnr_store.errors import OptionError, option

MOST = 1 << 62
Natural = Annotated[int, Meta(ge=0, le=MOST)]


def number(name: str, value: Any, maximum: float = math.inf) -> float:
    """A finite number of at least 0 and at most `maximum`, given in any real type."""
    if not isinstance(value, bool) and isinstance(value, Real):
        with suppress(OverflowError):  # an integer beyond all floats
            as_float = float(value)
            if 0 <= as_float <= maximum and as_float < math.inf:
                return as_float
    bound = "" if maximum == math.inf else f" and at most {maximum:g}"
    raise OptionError(f"{_given(name, value)}; give a number of at least 0{bound}")


def integer(name: str, value: Any, minimum: int = 0) -> int:
    """An integer of at least `minimum` and at most 2**62, given in any integer type."""
    if not isinstance(value, bool) and isinstance(value, Integral) and minimum <= int(value) <= MOST:
        return int(value)
    hint = f", as with {name}.item()" if getattr(value, "ndim", None) == 0 else ""
    raise OptionError(f"{_given(name, value)}: give an integer of at least {minimum} and at most 2**62{hint}")


def _given(name: str, value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return f"{name}=(an integer of {value.bit_length()} bits)"  # Python refuses to print those of 4,300 digits
    return option(name, value) if name.isidentifier() else f"{name}={value!r}"
