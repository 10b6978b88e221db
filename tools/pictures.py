"""The pictures of the documentation: `python -m tools.pictures` writes them into docs/pictures.

Each is a function without arguments, so the same source draws the same bytes; a test compares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cnr_codecs import UniformRows
from cnr_store.format import layout
from tools.drawing import Drawing

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
ERRORS = ROOT / "benchmarks" / "results" / "codecs-errors.json"


def store() -> Drawing:
    """The keys of a store as a tree."""
    rows = (
        (0, "store/", "a folder, or a prefix of a bucket", ""),
        (1, "zarr.json", "says that this is a store, of format 2", ""),
        (1, "writers/000003", "a run's claim: its right to write", ""),
        (1, "versions/", "", ""),
        (2, "000003-9f2c41d0.00000042/", "one version: claim 3, attempt 42", ""),
        (3, "zarr.json", "commit record, written last: the version exists", "b"),
        (3, "manifest", "every object with array data, and its size", ""),
        (3, "state/", "reader, schedulers, generators, metadata", ""),
        (3, "tables/users/weight/c/0/0", "rows that changed, quantized, many chunks in one object", "a"),
        (3, "tables/users/sum/c/0/0", "optimizer state of the same rows", "a"),
        (3, "dense/model/top.weight/c/0/0", "every other tensor, whole and lossless", "a"),
        (1, "folds/000003-9f2c41d0.00000040/", "a version's rows once more, without a chain", "a"),
        (1, "pins/, tags/", "versions that stay, and their names", ""),
        (1, "tombstones/", "versions that are being removed", ""),
    )
    drawing = Drawing(
        760, 30 + 26 * len(rows), "The keys of a store", "; ".join(f"{k}: {w}" for _, k, w, _ in rows)
    )
    parents: dict[int, float] = {}
    for at, (depth, key, what, tone) in enumerate(rows):
        x, y = 20 + 24 * depth, 36 + 26 * at
        parents[depth] = y
        if depth:
            drawing.line([(x - 14, parents[depth - 1] + 6), (x - 14, y - 4), (x - 4, y - 4)], "rule")
        if tone:
            drawing.rect(x - 3, y - 15, 8 + 7.3 * len(key), 21, tone)
        drawing.text(x + 1, y, key, "mono")
        drawing.text(340, y, what, "soft")
    return drawing


def chain() -> Drawing:
    """A chain of versions, what a restore reads, and what a fold changes."""
    drawing = Drawing(
        760,
        330,
        "A chain and its fold",
        "Five versions: a baseline and four deltas, each over the version before. A restore of the newest reads all. "
        "Once version 4 has a fold, it reads version 5 and the fold.",
    )
    changed = ((), (2, 5), (0, 5, 6), (3,), (1, 5))
    for at in range(5):
        x = 34 + 146 * at
        drawing.text(x + 50, 32, f"step {100 * (at + 1)}", "bold", "middle")
        drawing.text(x + 50, 50, "baseline" if at == 0 else "delta", "soft", "middle")
        for row in range(8):
            kind = "b" if at == 0 else "a" if row in changed[at] else "card"
            drawing.rect(x, 60 + 14 * row, 100, 11, kind, 2)
        if at:
            drawing.arrow([(x - 4, 115), (x - 42, 115)])
            drawing.text(x - 23, 106, "base", "small soft", "middle")
    drawing.line([(34, 188), (718, 188)], "b-line")
    drawing.text(34, 207, "Without a fold, a restore of step 500 reads five versions.", "b-text")
    drawing.lines(
        34, 262, ["Coloured rows are stored.", "A row's value is the newest along the chain."], "soft"
    )
    drawing.arrow([(522, 194), (522, 240)])
    drawing.box(434, 244, 176, 34, ["fold of step 400: all rows"], "b")
    drawing.line([(434, 290), (718, 290)], "a-line")
    drawing.text(718, 309, "With it, a restore reads two, and the same bits.", "a-text", "end")
    return drawing


def save() -> Drawing:
    """What a save does when, on the thread that trains and in the background."""
    drawing = Drawing(
        760,
        270,
        "A save in time",
        "The training thread stops for the copy of the rows that changed, and goes on. In the background chunks are "
        "encoded and put, then state, manifest and commit record. The version exists from the commit record on.",
    )
    drawing.text(20, 62, "training", "bold")
    for at, x in enumerate((110, 176, 242)):
        drawing.box(x, 42, 60, 32, [f"step {at + 98}"])
    drawing.box(308, 42, 86, 32, ["save()"], "b", "bold")
    for at, x in enumerate((400, 466, 532, 598, 664)):
        drawing.box(x, 42, 60, 32, [f"step {at + 101}"])
    drawing.line([(308, 84), (308, 90), (394, 90), (394, 84)], "b-line")
    drawing.lines(390, 107, ["the stall: flags swapped,", "changed rows copied"], "small b-text", "end")
    drawing.text(20, 182, "background", "bold")
    drawing.arrow([(394, 58), (397, 58), (397, 158)])
    parts = (("encode, put shards", 400, 128), ("state", 532, 48), ("manifest", 584, 66))
    for text, x, width in parts:
        drawing.box(x, 162, width, 32, [text], "a")
    drawing.box(654, 162, 78, 32, ["record"], "good", "bold")
    drawing.line([(693, 198), (693, 220)], "good-line")
    drawing.text(740, 236, "created exclusively: from here on the version exists", "good-text", "end")
    drawing.line([(110, 150), (740, 150)], "rule")
    drawing.text(
        20,
        256,
        "A crash before that leaves the version before it the newest, and the rows flagged.",
        "small soft",
    )
    return drawing


def retention() -> Drawing:
    """Retention's two looks, and the two ways in which a pin can meet them."""
    drawing = Drawing(
        760,
        330,
        "Retention looks twice",
        "Retention lists what is needed, puts tombstones, lists again, and deletes. A pin put before the tombstone is "
        "seen by the second look, and the version is spared. A pin put after it sees the tombstone and is taken back.",
    )
    drawing.text(20, 52, "retention", "bold")
    for x, texts, kind in (
        (110, ["look: claims,", "pins, versions"], "card"),
        (270, ["put", "tombstones"], "b"),
        (430, ["look again"], "card"),
        (590, ["delete what", "is still marked"], "bad"),
    ):
        drawing.box(x, 28, 130, 44, texts, kind)
        if x < 590:
            drawing.arrow([(x + 130, 50), (x + 160, 50)])
    for y, x, late, texts in (
        (120, 104, False, ["put a pin, then look:", "no tombstone, so it holds"]),
        (220, 416, True, ["put a pin, then look:", "a tombstone, so it is taken back"]),
    ):
        drawing.text(20, y + 28, "pin, after" if late else "pin, before", "bold")
        drawing.box(x, y, 220, 44, texts, "bad" if late else "good")
        drawing.line([(110, y - 16), (740, y - 16)], "rule")
    drawing.arrow([(324, 142), (495, 142), (495, 76)], "good")
    drawing.text(505, 136, "the second look sees the pin:", "small good-text")
    drawing.text(505, 151, "the version is spared", "small good-text")
    drawing.arrow([(345, 76), (345, 242), (412, 242)], "bad")
    drawing.text(325, 256, "the pin sees the tombstone:", "small bad-text", "end")
    drawing.text(325, 271, "its caller hears that the version goes", "small bad-text", "end")
    drawing.text(
        20, 310, "Whoever announces first and looks afterwards is seen by the other, or sees it.", "soft"
    )
    return drawing


def race() -> Drawing:
    """Two that want to decide about one version: the exclusive create lets one win."""
    drawing = Drawing(
        760,
        310,
        "The commit race",
        "A writer hangs before its commit. Another process gives its attempt up: it creates a void record at the key "
        "of the commit record, and then deletes. The writer wakes up; its create fails, so the version never exists.",
    )
    lanes = (
        ("writer, hanging", 120),
        ("storage: versions/ID/zarr.json", 380),
        ("retention, or another rank", 640),
    )
    for text, x in lanes:
        drawing.text(x, 32, text, "bold", "middle")
        drawing.line([(x, 44), (x, 260)], "rule")
    drawing.box(60, 58, 120, 30, ["puts shards"], "a")
    drawing.box(60, 98, 120, 66, ["hangs"], "card", "soft")
    drawing.box(560, 98, 160, 30, ["gives the attempt up"], "b")
    drawing.arrow([(560, 138), (464, 138)], "b")
    drawing.text(556, 155, "create if absent", "small b-text", "end")
    drawing.box(300, 122, 160, 32, ["void record: it is there"], "b")
    drawing.box(560, 168, 160, 30, ["deletes its objects"], "card")
    drawing.box(60, 176, 120, 30, ["wakes up"], "a")
    drawing.arrow([(180, 191), (292, 191)], "a")
    drawing.text(186, 184, "create if absent", "small a-text")
    drawing.box(296, 176, 168, 32, ["refused: the key is taken"], "bad")
    drawing.arrow([(380, 208), (380, 232), (184, 232)], "bad")
    drawing.box(60, 217, 120, 30, ["the save failed"], "bad")
    drawing.text(
        20,
        288,
        "Had the writer's record been first, the void record would have been refused. One wins.",
        "soft",
    )
    return drawing


def payload() -> Drawing:
    """The bytes of the payload in docs/format.md, part by part, as the codec writes them."""
    values = np.array([(0, 0.5, 1.5), (-1, 0, 2), (1, np.inf, -3)], np.float32)
    seal = layout.seal("000002-0123abcd.00000007", "tables/items/weight", 0, 0)
    codec = UniformRows("asymmetric", 4)
    data = bytes(codec.encode_rows(values, np.array([1, 4, 6]), 8, element="float32", seal=seal))
    parts = (
        ("magic, version, element, segments", 8, "card"),
        ("rows, dim", 8, "card"),
        ("seal: version, array, place", 8, "b"),
        ("bytes of the head", 4, "card"),
        ("segment: asymmetric, 4 bits, 2 rows", 16, "a"),
        ("segment: raw, 32 bits, 1 row", 16, "good"),
        ("rows of both segments, as bitmaps", 2, "card"),
        ("crc32c of the head", 4, "b"),
        ("scales and offsets, float16", 8, "a"),
        ("codes, 4 bits each", 4, "a"),
        ("the raw row: 1, infinity, -3", 12, "good"),
    )
    drawing = Drawing(
        760,
        50 + 25 * len(parts),
        f"The {len(data)} bytes of a payload",
        "; ".join(f"{n}: {b} bytes" for n, b, _ in parts),
    )
    at = 0
    for number, (name, nbytes, kind) in enumerate(parts):
        y = 20 + 25 * number + (16 if number >= 8 else 0)
        drawing.text(46, y + 16, str(at), "small soft", "end")
        drawing.rect(54, y, 22 * nbytes, 22, kind)
        for byte in range(nbytes):
            drawing.text(65 + 22 * byte, y + 15, f"{data[at]:02x}", "mono", "middle")
            at += 1
        drawing.text(64 + 22 * nbytes, y + 15, name, "soft")
    if at != len(data):
        raise ValueError(f"the parts have {at} bytes, the payload has {len(data)}: name its parts anew")
    drawing.line([(20, 228), (740, 228)], "rule")
    drawing.text(740, 222, "the head: which rows, of which place", "small soft", "end")
    drawing.text(740, 244, "the bodies", "small soft", "end")
    return drawing


def ranks() -> Drawing:
    """What each rank does in a save of many."""
    drawing = Drawing(
        760,
        330,
        "Ranks writing one version",
        "Each rank copies and encodes its own rows. Rows of a shard that several ranks share go to its owner. Each "
        "owner puts its shards. The ranks vote, and rank 0 creates the commit record.",
    )
    for at, title in enumerate(("own rows", "exchange", "put shards", "vote", "commit")):
        drawing.text((150, 290, 420, 545, 672)[at], 30, title, "bold", "middle")
    for rank in range(4):
        y = 50 + 56 * rank
        drawing.text(20, y + 24, f"rank {rank}", "bold")
        drawing.box(90, y + 4, 120, 34, [f"rows {rank * 250} to {rank * 250 + 249}"], "a", "small")
        drawing.arrow([(214, y + 21), (360, y + 21)])
        drawing.box(364, y + 4, 112, 34, [f"shards of rank {rank}"], "a", "small")
        drawing.arrow([(480, y + 21), (540, y + 21)], "b")
    for first in (0, 2):
        y = 50 + 56 * first
        drawing.arrow([(250, y + 77), (250, y + 27)])
        drawing.lines(262, y + 46, ["rows of a shared", "shard"], "small soft")
    drawing.line([(543, 66), (543, 244)], "b-line")
    drawing.arrow([(543, 71), (600, 71)], "b")
    drawing.box(604, 50, 136, 42, ["commit record"], "good", "bold")
    drawing.lines(560, 124, ["what each rank put:", "objects, sizes,", "checksums"], "small b-text")
    drawing.text(
        20,
        298,
        "One owner a shard, so no two ranks put one object. Without all votes there is no record,",
        "soft",
    )
    drawing.text(20, 315, "and whoever gives up first creates the void record in its place.", "soft")
    return drawing


_SERIES = (("symmetric", "soft", "card"), ("asymmetric", "a-text", "a"), ("adaptive", "b-text", "b"))


def errors() -> Drawing:
    """The error of a row by the bits of its codes, from the results on record."""
    found: dict[str, list[dict[str, Any]]] = json.loads(ERRORS.read_text(encoding="utf-8"))["by_scheme"][
        "normal"
    ]
    told = "; ".join(
        f"{scheme}: "
        + ", ".join(f"{each['bits']} bits {each['mean_l2_error']:.3g}" for each in found[scheme])
        for scheme, _, _ in _SERIES
    )
    drawing = Drawing(
        760, 340, "Error against bits", f"Mean distance of a row from what is stored of it. {told}"
    )
    left, right, top, bottom = 70, 620, 50, 290
    drawing.text(
        20, 30, "Mean distance of a row of normal values from what is stored of it, by bits a value", "bold"
    )
    low, high = -3, 1

    def place(bits: float, error: float) -> tuple[float, float]:
        across, up = (bits - 1) / 7, (math.log10(error) - low) / (high - low)
        return round(left + across * (right - left), 1), round(bottom - up * (bottom - top), 1)

    for power in range(low, high + 1):
        y = place(1, 10.0**power)[1]
        drawing.line([(left, y), (right, y)], "rule")
        drawing.text(left - 8, y + 4, f"{10.0**power:g}", "small soft", "end")
    for bits in range(1, 9):
        drawing.text(place(bits, 1)[0], bottom + 20, str(bits), "small soft", "middle")
    drawing.text((left + right) / 2, bottom + 40, "bits", "small soft", "middle")
    for number, (scheme, text, kind) in enumerate(_SERIES):
        points = [place(each["bits"], each["mean_l2_error"]) for each in found[scheme]]
        drawing.line(points, "line" if kind == "card" else f"{kind}-line")
        for x, y in points:
            drawing.dot(x, y, "head" if kind == "card" else f"{kind}-full")
        y = points[-1][1] + 4 + 20 * (1 - number)
        drawing.line([(points[-1][0] + 6, points[-1][1]), (points[-1][0] + 22, y - 4)], "rule")
        drawing.text(points[-1][0] + 26, y, scheme, f"bold {text}")
    return drawing


Picture = Callable[[], Drawing]
PICTURES: tuple[Picture, ...] = (store, chain, save, retention, race, payload, ranks, errors)


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for picture in PICTURES:
        (FOLDER / f"{picture.__name__}.svg").write_text(picture().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
