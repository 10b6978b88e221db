"""Entropy coding in readable Python. The kernels write and read the same words, which tests check.

A line is a class, then its codes. Code c has the zigzag code z = 2c, or -2c - 1 if c is negative. A z below 32 is its
own token. Any other z has an exponent e = floor(log2(z)), the token 32 + 2 (e - 5) + h, where h is the bit below the
highest one of z, and e - 1 open bits, the lowest ones of z.

Symbol s of a model owns `frequency` of 4,096 slots from slot `start` on. A state x of 32 bits takes a symbol in as

    x -> (x // frequency) * 4096 + start + x % frequency

and n open bits as x -> x * 2**n + bits. Before, if x would outgrow 32 bits, its lower half leaves as a word. A decoder
does the reverse from the last symbol to the first, so an encoder goes through the symbols backwards, and its words
come out in reverse. Code j of a line belongs to state j mod 4, the line's class to state 0. States begin with 2**16.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from cnr_codecs.entropy.lines import BLOCK_LINES
from cnr_codecs.entropy.models import Frequencies, model_words, normalize, read_models
from cnr_codecs.kernels.rans import CLASSES, DIRECT, LANES, START, TOKENS

_SLOTS = 4096


def class_of(line: Sequence[int]) -> int:
    """Return 0 for zeros alone, else 1 plus the least i >= 0 with a mean magnitude below 2**(i - 3); 7 at most."""
    total = sum(map(abs, line))
    if total == 0:
        return 0
    return next((1 + i for i in range(CLASSES - 2) if 8 * total < len(line) << i), CLASSES - 1)


def token_of(code: int) -> tuple[int, int, int]:
    """Return a code's token, its open bits, and their number."""
    z = 2 * code if code >= 0 else -2 * code - 1
    if z < DIRECT:
        return z, 0, 0
    exponent = z.bit_length() - 1
    return DIRECT + 2 * (exponent - 5) + (z >> exponent - 1 & 1), z & (1 << exponent - 1) - 1, exponent - 1


def encode(codes: Sequence[int], line: int) -> bytes:
    """Return the words of coded lines."""
    lines = [codes[first : first + line] for first in range(0, len(codes), line)]
    counts = np.zeros((CLASSES, TOKENS), np.int64)
    for each in lines:
        held = class_of(each)
        counts[0, held] += 1
        if held:
            for code in each:
                counts[held, token_of(code)[0]] += 1
    frequencies = normalize(counts)
    blocks = [
        _encode_block(lines[first : first + BLOCK_LINES], frequencies)
        for first in range(0, len(lines), BLOCK_LINES)
    ]
    sizes = struct.pack(f"<{len(blocks)}I", *map(len, blocks))
    return model_words(frequencies).astype("<u2").tobytes() + sizes + b"".join(blocks)


def _encode_block(lines: Sequence[Sequence[int]], frequencies: Frequencies) -> bytes:
    starts = np.cumsum(frequencies, axis=1, dtype=np.int64) - frequencies
    states, words = [START] * LANES, list[int]()

    def push(lane: int, frequency: int, start: int, slots: int) -> None:
        x = states[lane]
        if x >= frequency * (1 << 32) // slots:
            words.append(x & 0xFFFF)
            x >>= 16
        states[lane] = x // frequency * slots + start + x % frequency

    for line in reversed(lines):
        held = class_of(line)
        for j in reversed(range(len(line) if held else 0)):
            token, rest, bits = token_of(line[j])
            if bits:
                push(j % LANES, 1, rest, 1 << bits)
            push(j % LANES, int(frequencies[held, token]), int(starts[held, token]), _SLOTS)
        push(0, int(frequencies[0, held]), int(starts[0, held]), _SLOTS)
    return struct.pack(f"<{LANES}I{len(words)}H", *states, *reversed(words))


def decode(data: bytes, size: int, line: int) -> npt.NDArray[np.int64]:
    """Return the codes of coded lines, which must be sound."""
    frequencies, held = read_models(np.frombuffer(data, "<u2"), "reference")
    place, blocks = 2 * held, -(-size // (line * BLOCK_LINES))
    sizes = struct.unpack_from(f"<{blocks}I", data, place)
    place += 4 * blocks
    codes: list[int] = []
    for nbytes in sizes:
        count = min(line * BLOCK_LINES, size - len(codes))
        codes += _decode_block(data[place : place + nbytes], count, line, frequencies)
        place += nbytes
    assert place == len(data)
    return np.array(codes, np.int64)


def _decode_block(data: bytes, size: int, line: int, frequencies: Frequencies) -> list[int]:
    states = list(struct.unpack_from(f"<{LANES}I", data))
    words = iter(struct.unpack_from(f"<{(len(data) - 4 * LANES) // 2}H", data, 4 * LANES))
    symbols = [np.repeat(np.arange(TOKENS), row) for row in frequencies]
    starts = np.cumsum(frequencies, axis=1, dtype=np.int64) - frequencies

    def refill(lane: int, x: int) -> None:
        states[lane] = x if x >= START else x << 16 | next(words)

    def pop(lane: int, model: int) -> int:
        x = states[lane]
        symbol = int(symbols[model][x % _SLOTS])
        frequency, start = int(frequencies[model, symbol]), int(starts[model, symbol])
        refill(lane, frequency * (x // _SLOTS) + x % _SLOTS - start)
        return symbol

    def codes_of(count: int) -> Iterator[int]:
        held = pop(0, 0)
        for lane in (j % LANES for j in range(count)):
            z = pop(lane, held) if held else 0
            if z >= DIRECT:
                bits, x = 4 + (z - DIRECT) // 2, states[lane]
                z = 2 + z % 2 << bits | x % (1 << bits)
                refill(lane, x >> bits)
            yield z >> 1 if z % 2 == 0 else -(z + 1 >> 1)

    found = [code for first in range(0, size, line) for code in codes_of(min(line, size - first))]
    assert states == [START] * LANES
    assert next(words, None) is None
    return found
