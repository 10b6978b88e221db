"""Bytes of relative rows beside adaptive codes at equal error, and of other coders on the same integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numcodecs import Zstd

from benchmarks.relative_bench.stores import (
    Moves,
    Setting,
    Volumes,
    Workload,
    adaptive,
    lattice,
    volumes,
)
from cnr_codecs import LatticeRows, lattice_step

Make = Callable[[], Workload]
WIDTHS = (2, 3, 4, 8)
SHARES = (0.5, 0.35, 0.2)
CODED_SHARES = (0.35, 0.2)
LEVELS = (3, 19)
STATE = "m3"
_CODE_LIMIT, _CODED_INTERVALS = 127, 2


def at_equal_error(make: Make, *, first: bool = True, has_state: bool) -> dict[str, Any]:
    """Deltas of every width beside relative ones of the same mean error, of plain shares, and with narrow state.

    Parameters
    ----------
    make
        Gives the training, the same at each call.
    first
        Whether there is a save before the first interval.
    has_state
        Whether the optimizer has state beside rows.
    """
    moves = Moves.of(make(), first=first)
    errors = {bits: moves.adaptive_error(bits) for bits in WIDTHS}
    shares = {bits: moves.share_with_error(error) for bits, error in errors.items()}
    settings = [Setting(f"adaptive {bits}", adaptive(bits)) for bits in WIDTHS]
    settings += [Setting(f"as adaptive {bits}", lattice(share)) for bits, share in shares.items()]
    settings += [Setting(f"lattice {share}", lattice(share)) for share in SHARES]
    if has_state:
        settings.append(Setting(f"lattice 0.35, {STATE}", lattice(0.35), state_bits=STATE))
    found = {each.setting: each for each in volumes(make(), settings, first=first)}
    values = sum(rows.size for changed in moves.changed for _, rows in changed.values())
    changed_rows = sum(len(rows) for changed in moves.changed for _, rows in changed.values())
    lines = [
        {
            "setting": name,
            "rms_step": shares.get(int(name[-1])) if name.startswith("as adaptive") else None,
            "bits_a_value": each.delta_bytes("weights") * 8 / values,
            "weights_bytes": each.delta_bytes("weights"),
            "slots_bytes": each.delta_bytes("slots"),
            "total_bytes": each.total_bytes,
        }
        for name, each in found.items()
    ]
    return {
        "mean_l2_errors": errors,
        "rms_steps": shares,
        "lattice_errors": {bits: moves.lattice_error(share) for bits, share in shares.items()},
        "dirty_share": changed_rows / len(moves.changed) / sum(map(len, moves.bases.values())),
        "lines": lines,
        "coders": list(_coders(moves)),
    }


def _coders(moves: Moves) -> Iterator[dict[str, Any]]:
    """Bits a value of the differences of codes in the last intervals: by our coder, and by zstd."""
    for share in CODED_SHARES:
        sizes, values = dict.fromkeys(["ours", *(f"zstd {level}" for level in LEVELS)], 0), 0
        for name, base in moves.bases.items():
            step = lattice_step(share * moves.rms[name])
            codec = LatticeRows(share, step, relative=True)
            codes = np.rint(base / np.float32(step)).astype(np.int16)
            for interval, changed in enumerate(moves.changed):
                ids, rows = changed[name]
                if not len(ids):
                    continue
                if interval < len(moves.changed) - _CODED_INTERVALS:
                    codes[ids] = np.rint(rows / np.float32(step)).astype(np.int16)
                    continue
                parent, known = codes[ids], np.ones(len(ids), np.bool_)
                data, codes[ids], *_ = codec.encode_over(
                    rows, None, len(ids), parent, known, element="float32"
                )
                differences = codes[ids] - parent
                narrow = np.abs(differences).max(initial=0) <= _CODE_LIMIT
                plain = differences.astype(np.int8 if narrow else np.int16).tobytes()
                sizes["ours"] += len(data)
                for level in LEVELS:
                    sizes[f"zstd {level}"] += len(Zstd(level).encode(plain))
                values += rows.size
        for coder, nbytes in sizes.items():
            yield {"rms_step": share, "coder": coder, "bits_a_value": nbytes * 8 / values}


def counted(make: Make, torch_save_bytes: int, *, state_bits: int | str) -> list[dict[str, Any]]:
    """Everything that intermittent writes, and the most that is kept for one version, beside `torch.save` each time."""
    codecs = {"adaptive 2": adaptive(2), "adaptive 8": adaptive(8)}
    codecs |= {f"lattice {share}": lattice(share) for share in (1.5, 0.35, 0.2, 0.1)}
    settings = [Setting(name, codec, "intermittent", state_bits) for name, codec in codecs.items()]
    # The baseline is one of the saves.
    return [times_less(each, torch_save_bytes) for each in volumes(make(), settings, first=False)]


def times_less(found: Volumes, torch_save_bytes: int) -> dict[str, Any]:
    """How many times `torch.save` each time writes and keeps as much."""
    return {
        "setting": found.setting,
        "written_times_less": len(found.written) * torch_save_bytes / found.total_bytes,
        "kept_times_less": torch_save_bytes / found.most_kept_bytes,
        "total_bytes": found.total_bytes,
        "documents_bytes": sum(each["documents"] for each in found.written),
        "slots_bytes": sum(each["slots"] for each in found.written),
        "rows": found.rows,
        "delta_bits_a_value": {path: float(np.mean(bits)) for path, bits in found.bits.items()},
    }
