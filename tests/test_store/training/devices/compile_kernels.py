"""Compiles each kernel for GPUs, which none need be there for, and prints what floating-point instructions it has.

A process of its own: where Triton interprets kernels it can't compile them.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compiled

from cnr_store.training.devices.kernels import codes, decode, flagging, lattice, ranges, search, walk

ROWS = ("*fp32", "*i64", "i64", "i64")
OUT = ("*fp32", "*fp16", "*u8")
SOME = {"all_rows": False, "as_bfloat16": False}
ALL = {"all_rows": True, "as_bfloat16": True}
LANES = {"rows": 128, "block": 16}
JOBS: list[tuple[Any, tuple[str, ...], dict[str, Any]]] = [
    (flagging.flag_rows, ("*i32", "i64", "i64", "*i32", "*i32"), {"block": 1024}),
    (
        flagging.flag_bags,
        ("*i64", "i32", "*i64", "i32", "i32", "*i64", "*i32", "*i64", "*i32"),
        {"halvings": 5, "block": 1024},
    ),
    (
        ranges.encode_ranges,
        (*ROWS, "fp32", *OUT, "*u8"),
        {"dim": 64, "bits": 4, "is_symmetric": False, "rows": 32, "block": 64, **SOME},
    ),
    (
        ranges.encode_ranges,
        ("*i16", *ROWS[1:], "fp32", *OUT, "*u8"),
        {"dim": 3, "bits": 3, "is_symmetric": True, "rows": 128, "block": 4, **ALL},
    ),
    (
        ranges.encode_ranges,
        ("*fp16", *ROWS[1:], "fp32", *OUT, "*u8"),
        {"dim": 1, "bits": 8, "is_symmetric": False, "rows": 128, "block": 1, **SOME},
    ),
    (
        search.search_lines,
        (*ROWS, "fp32", "fp32", "*fp32", *OUT),
        {"dim": 64, "bits": 4, "trial_count": 26, **LANES, **SOME},
    ),
    (
        walk.walk_ranges,
        (*ROWS, "fp32", *OUT),
        {"dim": 64, "bits": 4, "bins": 45, "steps": 22, **LANES, **SOME},
    ),
    (codes.encode_given, (*ROWS, "*fp32", "*u8"), {"dim": 64, "bits": 4, "rows": 64, "block": 32, **SOME}),
    (
        lattice.encode_lattice,
        (*ROWS, "fp32", "i32", "*i16", "*u8"),
        {"dim": 64, "rows": 32, "block": 64, **SOME},
    ),
    (
        lattice.encode_floating,
        (*ROWS, "i32", "i32", "*i16", "*u8"),
        {"dim": 64, "shift": 20, "rows": 32, "block": 64, **SOME},
    ),
    (
        lattice.encode_floating,
        ("*fp16", *ROWS[1:], "i32", "i32", "*i16", "*u8"),
        {"dim": 17, "shift": 16, "rows": 64, "block": 32, **SOME},
    ),
    (
        lattice.encode_floating,
        ("*i16", *ROWS[1:], "i32", "i32", "*i16", "*u8"),
        {"dim": 1, "shift": 22, "rows": 128, "block": 1, **ALL},
    ),
    (
        lattice.sum_squares,
        ("*fp32", "i64", "i64", "*fp64"),
        {"dim": 64, "rows": 1 << 16, "lanes": 64, "in_one_piece": True, "as_bfloat16": False},
    ),
    (
        lattice.sum_squares,
        ("*i16", "i64", "i64", "*fp64"),
        {"dim": 3, "rows": 1 << 16, "lanes": 64, "in_one_piece": False, "as_bfloat16": True},
    ),
    (
        decode.decode_rows,
        ("*u8", "*fp16", "*i64", "i64", "i64", "*fp32"),
        {"dim": 64, "bits": 4, "is_symmetric": False, "rows": 32, "block": 64, "as_bfloat16": False},
    ),
    (
        decode.decode_rows,
        ("*u8", "*fp32", "*i64", "i64", "i64", "*i16"),
        {"dim": 17, "bits": 3, "is_symmetric": True, "rows": 64, "block": 32, "as_bfloat16": True},
    ),
    (
        decode.decode_integers,
        ("*i16", "*i64", "i64", "i64", "fp32", "*fp16"),
        {"dim": 64, "shift": 0, "rows": 32, "block": 64, "as_bfloat16": False},
    ),
    (
        decode.decode_integers,
        ("*i16", "*i64", "i64", "i64", "fp32", "*fp32"),
        {"dim": 1, "shift": 20, "rows": 128, "block": 1, "as_bfloat16": False},
    ),
    (
        decode.decode_integers,
        ("*i16", "*i64", "i64", "i64", "fp32", "*i16"),
        {"dim": 17, "shift": 16, "rows": 64, "block": 32, "as_bfloat16": True},
    ),
]
_FLOATING = re.compile(r"\b[a-z]+\.[a-z0-9.]*f(?:32|64)\b")
_LOADS = re.compile(r"(?:ld|st|mov|atom|shfl|selp)\.")


def main(capability: int) -> None:
    for function, types, constants in JOBS:
        given = iter(types)
        names = function.arg_names
        signature = {name: "constexpr" if name in constants else next(given) for name in names}
        source = ASTSource(
            function, signature, {(names.index(name),): each for name, each in constants.items()}
        )
        made = compiled(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
        assert made.asm["cubin"]
        found = {each for each in _FLOATING.findall(made.asm["ptx"]) if not _LOADS.match(each)}
        print(function.__name__, *sorted(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
