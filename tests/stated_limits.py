"""What `docs/format.md` says of sizes and counts, made of the constants that the code goes by."""

from __future__ import annotations

from collections.abc import Callable

from cnr_codecs import most_packed_bytes
from cnr_codecs.compressed import MAX_FOLLOWERS
from cnr_codecs.payload.coded import MAX_CODE, MAX_DIFFERENCE, NARROW_DIM, NARROW_LINE
from cnr_codecs.payload.packed import BASES, BLOCK_CODES, FOURS, ONE_BYTE, TWOS
from cnr_codecs.payload.payload import HEADER, MAX_SEGMENTS, MAX_U32, VERSION
from cnr_codecs.payload.validate import SCALE_SPARE_BITS, STEP_BITS
from cnr_store.format import (
    arrays,
    grid,
    layout,
    manifest,
    record_document,
    state,
    state_arrays,
    validate,
)
from cnr_store.policies import checks, past
from cnr_store.training.model.object_state import MAX_METADATA_BYTES

_WORDS = ("no", "one", "two", "three", "four", "five")
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def _size(nbytes: int) -> str:
    """A size in the largest unit that it is a whole number of."""
    exponent = next(power for power in (3, 2, 1) if nbytes % (1 << 10 * power) == 0)
    return f"{nbytes >> 10 * exponent} {' KMG'[exponent]}iB"


def _power(value: int) -> str:
    """A power of two, or one less."""
    exponent = (value + 1).bit_length() - 1
    assert value in (1 << exponent, (1 << exponent) - 1)
    text = f"2{str(exponent).translate(_SUPERSCRIPTS)}"
    return text if value == 1 << exponent else f"{text} − 1"


def _packed(decoded_bytes: int) -> str:
    """By what the bytes of a stage may exceed those of the chunk decoded."""
    spare = most_packed_bytes(1, 0, "uint8")
    quarters = (most_packed_bytes(1, decoded_bytes, "uint8") - spare) * 4 // decoded_bytes
    return f"{quarters}/4 of the chunk's decoded bytes and {_size(spare)}"


def _greatest(accepted: Callable[[int], object]) -> int:
    """The greatest number that is accepted; all below it are."""
    low, high = 0, 1 << 64
    while high - low > 1:
        middle = (low + high) // 2
        try:
            low, high = (middle, high) if accepted(middle) else (low, middle)
        except ValueError:
            high = middle
    return low


def _is_attempt(number: int) -> bool:
    return layout.VersionId.parse(str(layout.VersionId(layout.ClaimId(1, "0123abcd"), number))) is not None


_MAX_AXIS = _greatest(lambda n: validate.sizes([n], "shape", 0, (1,)))
_MAX_VALUES = _greatest(lambda n: validate.sizes([1 << 27, n], "shape", 0, (2,))) << 27
_MAX_ATTEMPT = _greatest(_is_attempt)

_DIGITS = {width: base - 1 for width, (base, _) in BASES.items()} | {ONE_BYTE: 255}
_BYTES = {width: base**count for width, (base, count) in BASES.items()}

PHRASES = (
    f"the caller's; at most {_size(MAX_METADATA_BYTES)}; without references",
    f"The record has at most {_size(record_document.MAX_RECORD_BYTES)}.",
    f"numbers are integers from 0 to {_power(checks.MOST)}, times before the year 10000.",
    f"The text has at most {_size(manifest.MAX_MANIFEST_BYTES)}, and at most {_size(manifest._max_inflated(0))} and "
    f"{manifest.MAX_RATIO} times the stream's bytes",
    f"of at most {_size(state.MAX_DOCUMENT_BYTES)}. The tree that it stands for",
    f"stride is at most {state_arrays.SPARSEST} times the number of elements.",
    f"Integers have at most {state.MAX_INTEGER_BITS:,} bits.",
    f"is at most {state.MAX_DEPTH} levels deep.",
    f"Of more than {record_document.MAX_RANKS_LISTED} ranks, `bytes` and `seconds` are objects",
    f"a list of 1 to {layout.MAX_RANKS:,} digests",
    f"Arrays of more than {_size(state_arrays.INLINE_BYTES)} stand beside the state",
    f"a row codec, at most {_WORDS[MAX_FOLLOWERS]} codecs from bytes to bytes",
    f"a shard holds 1 to {grid.MAX_CHUNKS_PER_SHARD:,} inner chunks",
    f"a chunk of more than one row takes at most {_size(grid.MAX_CHUNK_DECODED_BYTES)} when decoded",
    f"columns are cut into at most {arrays.MAX_COLUMN_CHUNKS:,} chunks",
    f"in all columns of the array, take at most {_size(arrays.MAX_BLOCK_BYTES)}.",
    f"has more bytes than {_packed(1 << 20)};",
    f"chunks of at most {_size(arrays.MAX_DENSE_CHUNK_BYTES)} (or one index of the first axis)",
    f"An array has at most {arrays.MAX_DIMENSIONS} dimensions.",
    f"The header has {HEADER.size} bytes",
    f"| segments | 0 to {MAX_SEGMENTS:,} |",
    f"| 4 | u8 | version | {VERSION}. ",
    *(
        f"| {width} | 0 to {_DIGITS[width]} | {_power(BLOCK_CODES[width])} |"
        for width in (FOURS, TWOS, ONE_BYTE)
    ),
    f"below 2¹⁶, 2²⁴, 2³² | {', '.join(map(_power, BLOCK_CODES[ONE_BYTE + 1 :]))} |",
    f"bytes of {_BYTES[FOURS]} or more at width 1 and of {_BYTES[TWOS]} or more at width 2.",
    f"The centers are integers from 0 to {MAX_DIFFERENCE + 1:,}, of the lines",
    f"A code is an integer of magnitude {MAX_CODE:,} or less",
    f"up to dim {NARROW_DIM} those of ⌊{NARROW_LINE} / dim⌋ rows",
    f"Their magnitudes are {MAX_DIFFERENCE:,} or less.",
    f"of {STEP_BITS} significant bits (the lowest {24 - STEP_BITS} bits of the float32 are 0)",
    f"at most {24 - int(SCALE_SPARE_BITS).bit_count()} significant bits: the lowest "
    f"{int(SCALE_SPARE_BITS).bit_count()} bits of the float32 are 0",
)
"""In its prose."""

ROWS = {
    "rows and columns of a chunk": f"{_power(MAX_U32)} each",
    "a chunk of more than one row, decoded": _size(grid.MAX_CHUNK_DECODED_BYTES),
    "inner chunks of a shard": f"{grid.MAX_CHUNKS_PER_SHARD:,}",
    "segments of a payload": f"{MAX_SEGMENTS:,}",
    "bytes of a payload's head, and of a segment's body": f"{_power(MAX_U32)} each",
    "size along an axis of an array": _power(_MAX_AXIS),
    "values of an array": _power(_MAX_VALUES),
    "TABLE, SLOT, NAME": f"{layout.MAX_SEGMENT_BYTES} bytes in a key, {layout.MAX_NAME_BYTES:,} in a plain path",
    "record": _size(record_document.MAX_RECORD_BYTES),
    "manifest, inflated": _size(manifest.MAX_MANIFEST_BYTES),
    "state, without the arrays beside it": _size(state.MAX_DOCUMENT_BYTES),
    "metadata": _size(MAX_METADATA_BYTES),
    "levels of a state": f"{state.MAX_DEPTH}",
    "ranks that save a version": f"{layout.MAX_RANKS:,}",
    "generations": f"{layout.MAX_GENERATION:,}",
    "`excess_bytes` of a policy": f"{past.MAX_EXCESS} numbers",
    "attempts of a claim": f"{_MAX_ATTEMPT:,}",
}
"""Of its table of limits."""
