"""The source of the three distributions as a graph: modules, what each imports, and where in it the import stands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.paths import ROOT

SOURCES = {
    "cnr_codecs": ROOT / "codecs" / "src" / "cnr_codecs",
    "cnr_backends": ROOT / "backends" / "src" / "cnr_backends",
    "cnr_store": ROOT / "cnr_store",
}
_MODULE_NAME = re.compile(r"cnr_(?:store|codecs|backends)(?:\.\w+)+")


@dataclass(frozen=True)
class Import:
    """One module's import of another of ours.

    Attributes
    ----------
    importer, imported
        Full module names.
    hidden
        Whether it stands in a function, under a condition, or in a string, where a reader of the top does not see it.
    """

    importer: str
    imported: str
    hidden: bool


@cache
def modules() -> Mapping[str, Path]:
    """Full module name to its file; a package stands for its ``__init__``."""
    found = {}
    for name, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (name, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def imports() -> tuple[Import, ...]:
    """Every import of a module of ours by another, hidden ones included."""
    return tuple(
        each
        for module, path in modules().items()
        for each in _imports_of(module, ast.parse(path.read_text()))
    )


def _imports_of(module: str, tree: ast.Module) -> Iterator[Import]:
    top = {id(node) for node in tree.body}
    docstrings = _docstrings(tree)
    for node in ast.walk(tree):
        for name in _names(node, docstrings):
            if name in modules() and name != module:
                yield Import(module, name, hidden=id(node) not in top)


def _names(node: ast.AST, docstrings: set[int]) -> Iterator[str]:
    match node:
        case ast.Import():
            yield from (alias.name for alias in node.names)
        case ast.ImportFrom(module=str(source), level=0):
            for alias in node.names:
                name = f"{source}.{alias.name}"
                yield name if name in modules() else source
        case ast.ImportFrom():
            raise AssertionError("relative imports hide where a module stands")
        case ast.Constant(value=str(text)) if id(node) not in docstrings and _MODULE_NAME.fullmatch(text):
            yield text
        case _:
            pass


def _docstrings(tree: ast.Module) -> set[int]:
    """Strings that stand as statements: docstrings, and descriptions of constants."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def circles() -> list[list[str]]:
    """Groups of modules that import one another, directly or not."""
    below: dict[str, set[str]] = {}
    for each in imports():
        below.setdefault(each.importer, set()).add(each.imported)
    return [sorted(group) for group in _strongly_connected(below) if len(group) > 1]


def _strongly_connected(below: Mapping[str, set[str]]) -> list[set[str]]:
    reach = {name: _reachable(name, below) for name in below}
    groups: list[set[str]] = []
    placed: set[str] = set()
    for name in below:
        if name not in placed:
            group = {name} | {other for other in reach[name] if name in reach.get(other, ())}
            groups.append(group)
            placed |= group
    return groups


def _reachable(start: str, below: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        for name in below.get(todo.pop(), ()):
            if name not in seen:
                seen.add(name)
                todo.append(name)
    return seen


def hidden_lines(distribution: str) -> list[str]:
    """``file:line`` of imports of a distribution that do not stand at the top, of anybody's modules."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted(SOURCES[distribution].rglob("*.py"))
        for node in _hidden(ast.parse(path.read_text()))
    ]


def _hidden(tree: ast.Module) -> Iterator[ast.stmt | ast.expr]:
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in top:
            yield node
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield node
