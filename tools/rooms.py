"""The list of rooms in docs/architecture.md, from the docstrings of the source: `python tools/rooms.py` writes it.

A folder is described by the first line of its package's docstring, a module by the first line of its own.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("cnr_store", "backends/src/cnr_backends", "codecs/src/cnr_codecs")
BEGIN, END = "<!-- rooms -->\n", "<!-- end of rooms -->\n"
ENTRIES = ("__init__.py", "__main__.py")


def listing() -> str:
    """Every folder and every module of the three distributions, in one line each."""
    folders = [folder for package in PACKAGES for folder in _folders(ROOT / package)]
    return "\n".join(_room(folder) for folder in folders)


def _folders(package: Path) -> list[Path]:
    return sorted({path.parent for path in package.rglob("*.py") if path.name not in ENTRIES})


def _room(folder: Path) -> str:
    modules = sorted(path for path in folder.glob("*.py") if path.name not in ENTRIES)
    lines = [f"- `{path.name}`: {_first_line(path)}\n" for path in modules]
    return f"### `{folder.relative_to(ROOT)}`\n\n{_first_line(folder / '__init__.py')}\n\n" + "".join(lines)


def _first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if docstring is None:
        raise ValueError(f"{path}: begin it with a docstring")
    return docstring.partition("\n")[0]


def page_with(rooms: str) -> str:
    """The page with this list in place of its own."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{rooms}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page_with(listing()))
