"""Entropy-codes lines of integers with interleaved rANS states. The entropy reference of the tests defines the words.

`codes` (int16 or int32, contiguous) holds lines of `line` codes, one after the other; the last line may be shorter.
Class 0 is that of lines of zeros; each other class has a model of its own. Models are rows of a table of
(`CLASSES`, `TOKENS`): row 0 has the frequencies of the classes, row k those of the tokens of class k.

Numbers are unsigned where numba would else look for negative indices or mix signs, and states are in an array: a
helper function that takes arrays would count references to them for every code.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cnr_codecs.kernels.building.compiled import kernel

CLASSES, TOKENS, LANES = 8, 64, 4
# The frequencies of a model sum to 2**PRECISION.
PRECISION = 12
# A zigzag code below DIRECT is its own token. The others have two tokens for each power of two.
DIRECT = 32
# What a state begins with. No state is below it.
START = 1 << 16
# `decode_block` counts words after it has read them, and reads at most so many beyond the last.
SLACK_WORDS = 8

_0, _1, _2, _3, _4, _5, _6, _7, _8 = (np.uint64(number) for number in range(9))
_12, _16, _20, _23, _32, _44, _127 = (np.uint64(number) for number in (12, 16, 20, 23, 32, 44, 127))
_MODELS = np.uint64(CLASSES * TOKENS)
_DIRECT, _START = np.uint64(DIRECT), np.uint64(START)
_BYTE, _SLOT, _WORD = np.uint64(0xFF), np.uint64(0xFFF), np.uint64(0xFFFF)


@kernel
def classify(codes: Any, line: int, classes: Any, counts: Any) -> None:
    """Find the class of each line, uint8 (lines,), and count classes and tokens.

    `counts` is int64 (LANES * CLASSES * TOKENS,), all 0 before. The sum over its lanes is a table of models' counts.
    """
    for i in range(classes.size):
        first = i * line
        last = min(first + line, codes.size)
        total = np.int64(0)
        for j in range(np.uintp(first), np.uintp(last)):
            total += abs(np.int64(codes[j]))
        held: Any = 0
        limit = last - first
        if total > 0:
            # The least k with mean magnitude < 2**(k - 4). The last class takes what is above.
            held = 1
            while held < CLASSES - 1 and 8 * total >= limit:
                held += 1
                limit *= 2
        classes[i] = held
        counts[held] += 1
        if held == 0:
            continue
        row = np.uint64(held * TOKENS)
        for j in range(np.uint64(first), np.uint64(last)):
            wide = np.int64(codes[j])
            z = np.uint64((wide << 1) ^ (wide >> 63))
            if z >= _DIRECT:
                exponent = (np.uint64(np.float32(z).view(np.uint32)) >> _23) - _127
                z = _DIRECT + ((exponent - _5) << _1) + ((z >> (exponent - _1)) & _1)
            # A counter that is raised twice in a row would wait for itself, so each lane has its own.
            counts[(j & _3) * _MODELS + row + z] += 1


@kernel
def encoder_table(frequencies: Any, table: Any) -> None:
    """Fill `table`, uint64 (CLASSES * TOKENS * 4,), from frequencies, uint16 (CLASSES, TOKENS).

    A symbol has four numbers: its first slot; 2**PRECISION less its frequency; the state from which on a word must
    leave before; and a reciprocal, with which every state below that is divided by the frequency exactly.
    """
    for k in range(CLASSES):
        slot: Any = 0
        for t in range(TOKENS):
            held = np.int64(frequencies[k, t])
            if held > 0:
                place = 4 * (k * TOKENS + t)
                table[place] = np.uint64(slot)
                table[place + 1] = np.uint64((1 << PRECISION) - held)
                table[place + 2] = np.uint64(held << 20)
                table[place + 3] = np.uint64(((1 << 44) + held - 1) // held)
                slot += held


@kernel
def encode_block(codes: Any, line: int, classes: Any, table: Any, words: Any) -> Any:
    """Write a block's states and words to the end of `words` (uint16), and return where they begin.

    Symbols are coded from the last to the first, since a decoder takes the last one first. `words` has room for two
    words a code and one a line besides the states.
    """
    state = np.empty(LANES, np.uint64)
    for k in range(LANES):
        state[k] = _START
    place, size, width = np.uint64(words.size), np.uint64(codes.size), np.uint64(line)
    i = np.uint64(classes.size)
    while i > _0:
        i -= _1
        held, first = np.uint64(classes[i]), i * width
        j = min(width, size - first) if held > _0 else _0
        while j > _0:
            j -= _1
            wide = np.int64(codes[first + j])
            z = np.uint64((wide << 1) ^ (wide >> 63))
            x = state[j & _3]
            if z >= _DIRECT:
                # The bits that the token leaves open take as many bits of the state.
                exponent = (np.uint64(np.float32(z).view(np.uint32)) >> _23) - _127
                bits = exponent - _1
                full = np.uint64(x >= (_1 << (_32 - bits)))
                words[place - _1] = np.uint16(x & _WORD)
                place -= full
                x >>= full << _4
                x = (x << bits) | (z & ((_1 << bits) - _1))
                z = _DIRECT + ((exponent - _5) << _1) + ((z >> bits) & _1)
            symbol = ((held << _6) + z) << _2
            full = np.uint64(x >= table[symbol + _2])
            words[place - _1] = np.uint16(x & _WORD)
            place -= full
            x >>= full << _4
            quotient = (x * table[symbol + _3]) >> _44
            state[j & _3] = x + table[symbol] + quotient * table[symbol + _1]
        symbol, x = held << _2, state[0]
        full = np.uint64(x >= table[symbol + _2])
        words[place - _1] = np.uint16(x & _WORD)
        place -= full
        x >>= full << _4
        quotient = (x * table[symbol + _3]) >> _44
        state[0] = x + table[symbol] + quotient * table[symbol + _1]
    for k in range(LANES):
        x = state[LANES - 1 - k]
        words[place - _1] = np.uint16(x >> _16)
        words[place - _2] = np.uint16(x & _WORD)
        place -= _2
    return np.int64(place)


@kernel
def decoder_table(frequencies: Any, table: Any) -> None:
    """Fill `table`, uint32 (CLASSES << PRECISION,), from frequencies, uint16 (CLASSES, TOKENS).

    A slot has its symbol; from bit 8 on the symbol's frequency less 1; and from bit 20 on its place in the symbol.
    """
    for k in range(CLASSES):
        slot: Any = k << PRECISION
        for t in range(TOKENS):
            held = np.int64(frequencies[k, t])
            for place in range(held):
                table[slot + place] = np.uint32(t | (held - 1) << 8 | place << 20)
            slot += held


@kernel
def decode_block(words: Any, begin: int, end: int, table: Any, known: Any, line: int, codes: Any) -> Any:
    """Decode a block to `codes` (int32), which it fills. Return the greatest zigzag code from `DIRECT` on, or 0.

    Return -1 if words `begin` to `end` of `words` (uint16) are no such block. `known`, uint8 (CLASSES,), says which
    models there are. Behind `end`, `words` goes on for `SLACK_WORDS` or more, whatever they hold.
    """
    if end - begin < 2 * LANES:
        return -1
    state = np.empty(LANES, np.uint64)
    place, stop = np.uint64(begin), np.uint64(end)
    for k in range(LANES):
        state[k] = np.uint64(words[place]) | (np.uint64(words[place + _1]) << _16)
        place += _2
    size, width, first, most = np.uint64(codes.size), np.uint64(line), _0, _0
    while first < size:
        last = min(first + width, size)
        x = state[0]
        entry = np.uint64(table[x & _SLOT])
        x = (((entry >> _8) & _SLOT) + _1) * (x >> _12) + (entry >> _20)
        low = np.uint64(x < _START)
        state[0] = (x << (low << _4)) | (np.uint64(words[place]) & (_0 - low))
        place += low
        held = entry & _BYTE
        if place > stop or held > _7 or known[held] == 0:
            return -1
        if held == _0:
            for j in range(first, last):
                codes[j] = np.int32(0)
            first = last
            continue
        row = held << _12
        for j in range(last - first):
            x = state[j & _3]
            entry = np.uint64(table[row + (x & _SLOT)])
            x = (((entry >> _8) & _SLOT) + _1) * (x >> _12) + (entry >> _20)
            low = np.uint64(x < _START)
            x = (x << (low << _4)) | (np.uint64(words[place]) & (_0 - low))
            place += low
            z = entry & _BYTE
            if z >= _DIRECT:
                bits = _4 + ((z - _DIRECT) >> _1)
                z = ((_2 + (z & _1)) << bits) | (x & ((_1 << bits) - _1))
                x >>= bits
                low = np.uint64(x < _START)
                x = (x << (low << _4)) | (np.uint64(words[place]) & (_0 - low))
                place += low
                most = max(most, z)
            if place > stop:
                return -1
            state[j & _3] = x
            codes[first + j] = np.int32(z >> _1) ^ -np.int32(z & _1)
        first = last
    for k in range(LANES):
        if state[k] != _START:
            return -1
    return np.int64(most) if place == stop else -1
