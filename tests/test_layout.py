"""The house keeps its shape: no circles, no hidden imports, rooms of a size, none in a public name's place."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.source_tree import SOURCES, circles, hidden_lines, imports, modules
from tools.rooms import PAGE, listing, page_with

MAX_MODULES = 14
"""Of a folder of source, ``__init__`` aside."""
MAX_LINES = 600
MAX_CLASS_LINES = 300
LARGE_CLASSES = {"Backend": 320, "CnrCheckpoint": 310, "Checkpointer": 490, "Tracker": 310, "Writer": 305}
"""Classes that may be longer, and how long: in three, docstrings are the reference of what users call."""
MAX_TEST_FILES = 25

HIDDEN = {
    "cnr_store.following.follow -> cnr_store.following.apply": "torch",
    "cnr_store.cli.demo -> cnr_store.demo.run": "demo",
    "cnr_store.cli.export -> cnr_store.reading.server": "serve",
    "cnr_store.reading.export -> cnr_store.reading.parquet": "arrow",
    "cnr_store.cli.export -> cnr_store.training.importing.import_file": "torch",
    "cnr_store.training.importing.import_file -> cnr_store.training.importing.torch_file": "torch",
}
"""Imports that stand in a function, with the extra of cnr-store whose packages they need."""
NAMED = {
    "cnr_backends.testing -> cnr_backends.testing.conformance": "pytest rewrites its asserts",
    "cnr_backends.testing -> cnr_backends.testing.store_conformance": "pytest rewrites its asserts",
    "cnr_store.demo.interrupt -> cnr_store.demo.train": "it is started as a process",
}
"""Modules that a string names, with the reason."""
LAZY = "cnr_store"
"""Its public names that need torch are imported when they are asked for."""


def test_no_modules_import_one_another() -> None:
    assert circles() == []


def test_imports_stand_at_the_top() -> None:
    found = {
        f"{each.importer} -> {each.imported}" for each in imports() if each.hidden and each.importer != LAZY
    }
    assert found == HIDDEN.keys() | NAMED.keys()


def test_hidden_imports_name_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(HIDDEN.values()) <= project["optional-dependencies"].keys()


@pytest.mark.parametrize("distribution", ["cnr_codecs", "cnr_backends"])
def test_the_lower_distributions_hide_no_import_at_all(distribution: str) -> None:
    assert hidden_lines(distribution) == []


def test_rooms_have_few_modules() -> None:
    sizes = Counter(path.parent for path in modules().values() if path.name != "__init__.py")
    assert {str(folder): size for folder, size in sizes.items() if size > MAX_MODULES} == {}


def test_modules_are_short() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_classes_are_short() -> None:
    found = (
        (node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name: size for name, size in found if size > LARGE_CLASSES.get(name, MAX_CLASS_LINES)} == {}


def test_test_folders_have_few_files() -> None:
    sizes = Counter(path.parent for path in (ROOT / "tests").rglob("*.py"))
    assert {str(folder): size for folder, size in sizes.items() if size > MAX_TEST_FILES} == {}


def _packages() -> list[str]:
    return sorted(name for name, path in modules().items() if path.name == "__init__.py")


def test_rooms_hold_a_docstring_only() -> None:
    """So that importing a module never imports its neighbours. Distributions and public rooms export."""
    exporting = {*SOURCES, "cnr_backends.testing", "cnr_store.dcp"}
    for name in set(_packages()) - exporting:
        tree = ast.parse(modules()[name].read_text())
        assert len(tree.body) == 1, name
        assert ast.get_docstring(tree) is not None, name


PUBLIC = pytest.mark.parametrize(
    "name", ["cnr_codecs", "cnr_backends", "cnr_backends.testing", "cnr_store", "cnr_store.dcp"]
)


@PUBLIC
def test_no_room_bears_a_public_name(name: str) -> None:
    """Else a first import of the room replaces the public function of that name, and mypy does not notice."""
    package = importlib.import_module(name)
    rooms = {each.name for each in pkgutil.iter_modules(package.__path__)}
    assert rooms & set(package.__all__) == set()


@PUBLIC
def test_public_names_are_there(name: str) -> None:
    package = importlib.import_module(name)
    assert [each for each in package.__all__ if not hasattr(package, each)] == []


def _contract(container: str) -> list[list[str]]:
    """The layers of a contract, top first."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    (layers,) = [
        each["layers"] for each in tool["importlinter"]["contracts"] if each.get("containers") == [container]
    ]
    return [re.split(r" [|:] ", layer) for layer in layers]


def _picture(title: str) -> list[list[str]]:
    """The rows of a picture in `docs/architecture.md`: the names in each, top first."""
    page = PAGE.read_text()
    block = re.search(rf"^```text title=\"{re.escape(title)}\"\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert block is not None, title
    rows = [re.findall(r"│ +([a-z_]+)/? +(?=│)", line) for line in block[1].splitlines()]
    return [row for row in rows if row]


@pytest.mark.parametrize(
    "container", ["cnr_store", "cnr_store.training", "cnr_store.maintenance", "cnr_codecs"]
)
def test_the_picture_shows_the_rooms(container: str) -> None:
    """What the page draws is what import-linter holds, and so what the modules import."""
    assert [sorted(row) for row in _picture(container)] == [sorted(row) for row in _contract(container)]


def test_each_room_and_module_is_listed() -> None:
    assert page_with(listing()) == PAGE.read_text(), "run python tools/rooms.py"


def test_files_that_the_page_names_are_there() -> None:
    page = PAGE.read_text()
    named = re.findall(r"`((?:cnr_store|codecs|backends|tests|docs)/[\w./-]+)`", page)
    assert named
    assert [name for name in named if not Path(ROOT, name).exists()] == []
