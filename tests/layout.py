"""What every distribution's layout must hold, found out from its files and its public names."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType


def rooms(package: ModuleType) -> Iterator[ModuleType]:
    """The package, and every package below it."""
    yield package
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if info.ispkg:
            yield importlib.import_module(info.name)


def shadowed_names(room: ModuleType) -> set[str]:
    """Public names of a room that a module in it bears too.

    The first import of such a module silently replaces the name by the module, and no type checker notices.
    """
    modules = {info.name for info in pkgutil.iter_modules(room.__path__)}
    return modules & set(getattr(room, "__all__", ()))


def holds_only_a_docstring(room: ModuleType) -> bool:
    """Whether a room's `__init__` says what the room is, and does nothing."""
    tree = _parsed(Path(str(room.__file__)))
    return len(tree.body) == 1 and ast.get_docstring(tree) is not None


def hidden_imports(package: ModuleType) -> list[str]:
    """Imports of a package that stand in a function, in a condition or in a string: "file:line"."""
    return [
        f"{path.name}:{node.lineno}"
        for path in sorted(Path(package.__path__[0]).rglob("*.py"))
        for node in _hidden(_parsed(path))
    ]


def _hidden(tree: ast.Module) -> Iterator[ast.stmt | ast.expr]:
    open_ones = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in open_ones:
            yield node
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield node


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))
