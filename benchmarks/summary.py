"""The ledger: `python benchmarks/summary.py [--write]`.

Prints each figure beside its target, from the results on record. What no machine has measured yet stands as open behind
them, and never counts as met. `--write` puts the same table into
`benchmarks/results/summary.json` and into `docs/pace.md`.
"""

import sys
from pathlib import Path

# As a script this folder would come first on the path, and hide the standard library's `codecs`.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse  # noqa: E402  # after the path is set
import json  # noqa: E402
from collections.abc import Iterable, Iterator  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402

from benchmarks.gpu_bench.aims import AIMS, is_at_most  # noqa: E402  # found on the path set above

_ROOT = Path(__file__).resolve().parents[1]
RESULTS, SUMMARY, PAGE = _ROOT / "benchmarks/results", "summary.json", _ROOT / "docs/pace.md"
_LEDGER, _FEW_ROWS, _GPU = "the ledger", "ten rows", "gpu"


@dataclass(frozen=True)
class Entry:
    """One figure of one benchmark, and what is aimed at. `aim` is the least that counts, or with `at_most` the most."""

    benchmark: str
    figure: str
    where: str
    measured: float
    aim: float
    at_most: bool
    met: bool

    @property
    def cells(self) -> tuple[str, ...]:
        aim = f"{'≤' if self.at_most else '≥'} {self.aim:.3g}"
        return (
            self.benchmark,
            self.figure,
            self.where,
            f"{self.measured:.3g}",
            aim,
            "yes" if self.met else "**no**",
        )


HEAD = ("benchmark", "figure", "where", "measured", "aim", "met")


def entries(results: Path = RESULTS) -> Iterator[Entry]:
    """Of every benchmark that has targets, in the order of the names of their files."""
    for path in sorted(set(results.glob("*.json")) - {results / SUMMARY}):
        document = json.loads(path.read_text(encoding="utf-8"))
        parts = [document, *(part for part in document.values() if isinstance(part, dict))]
        for target in [target for part in parts for target in part.get("targets", ())]:
            yield Entry(
                path.stem,
                target["name"],
                target["where"],
                target["measured"],
                target["wanted"],
                target.get("at_most", False),
                target["met"],
            )


def unmeasured(results: Path = RESULTS) -> list[tuple[str, ...]]:
    """The cells of aims of which there is no figure on record: those that need a GPU."""
    measured = {entry.figure for entry in entries(results) if entry.benchmark == _GPU}
    return [
        (_GPU, name, "", "not measured", f"{'≤' if is_at_most(name) else '≥'} {aim:.3g}", "open")
        for name, aim in AIMS.items()
        if name not in measured
    ]


def table(found: Iterable[Entry], still_open: Iterable[tuple[str, ...]] = ()) -> str:
    """As Markdown, with the cells of what is open."""
    rows = [HEAD, tuple("---" for _ in HEAD), *(entry.cells for entry in found), *still_open]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def few_rows(results: Path = RESULTS) -> str:
    """What readers take for ten random rows, as Markdown: published without an aim."""
    lines = json.loads((results / "reading.json").read_text(encoding="utf-8"))["few_rows"]
    rows: list[tuple[str, ...]] = [("where", "reader", "rows of the table", "ms", "requests", "kB")]
    rows.append(tuple("---" for _ in rows[0]))
    for line in lines:
        counted: tuple[str, str] = (
            ("", "") if line["requests"] is None else (str(line["requests"]), f"{line['bytes'] / 1e3:,.0f}")
        )
        milliseconds = f"{line['seconds'] * 1e3:.0f}"
        rows.append(
            (str(line["place"]), str(line["reader"]), f"{line['table_rows']:,}", milliseconds, *counted)
        )
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in rows)


def page(text: str, found: Iterable[Entry], results: Path = RESULTS) -> str:
    """The page with both tables in their places."""
    return _placed(_placed(text, _LEDGER, table(found, unmeasured(results))), _FEW_ROWS, few_rows(results))


def _placed(text: str, name: str, made: str) -> str:
    before, begin, rest = text.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->\n")
    if not begin or not end:
        raise ValueError(f"{PAGE} lacks the two lines between which {name} stands")
    return f"{before}{begin}\n{made}\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Each figure on record beside its target.")
    parser.add_argument("--write", action="store_true", help="put the table into summary.json and the docs")
    options = parser.parse_args()
    found, still_open = list(entries()), unmeasured()
    rows = [HEAD, *(entry.cells for entry in found), *still_open]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    print(f"{sum(entry.met for entry in found)} of {len(found)} met, {len(still_open)} open")
    if options.write:
        document = json.dumps([asdict(entry) for entry in found], indent=1) + "\n"
        (RESULTS / SUMMARY).write_text(document, encoding="utf-8")
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
