"""The house keeps its shape: no circles, no hidden imports, rooms of a size, none in a public name's place."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import tomllib
from collections import Counter
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from cnr_store import Checkpointer
from tests.paths import ROOT
from tests.source_tree import SOURCES, circles, hidden_lines, imports, modules
from tools.rooms import BEGIN, PAGE, listing, page_with

MAX_MODULES = 14
"""Of a folder of source, ``__init__`` aside."""
MAX_LINES = 600
MAX_CLASS_LINES = 300
LARGE_CLASSES = {"Backend": 320, "CnrCheckpoint": 310, "Checkpointer": 490, "Tracker": 310, "Writer": 305}
"""Classes that may be longer, and how long: in three, docstrings are the reference of what users call."""
MAX_TEST_FILES = 25

HIDDEN = {
    "cnr_store.following.follow -> cnr_store.following.apply": "torch",
    "cnr_store.cli.export -> cnr_store.reading.server": "serve",
    "cnr_store.reading.export -> cnr_store.reading.parquet": "arrow",
    "cnr_store.cli.export -> cnr_store.training.importing.import_file": "torch",
    "cnr_store.training.importing.import_file -> cnr_store.training.importing.torch_file": "torch",
}
"""Imports that stand in a function, with the extra of cnr-store whose packages they need."""
NAMED = {
    "cnr_backends.testing -> cnr_backends.testing.conformance": "pytest rewrites its asserts",
    "cnr_store.training.distributed.torchrec_door -> cnr_store.training.distributed.torchrec": "TorchRec's alone",
    "cnr_store.training.saving.codec_choice -> cnr_store.training.model.row_arrays": "files are imported without torch",
    "cnr_store.training.saving.codec_choice -> cnr_store.training.model.tables": "likewise",
}
"""Modules that a string or a type alone names, with the reason."""
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
    "container", ["cnr_store", "cnr_store.training", "cnr_store.maintenance", "cnr_codecs", "cnr_backends"]
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


def _prose(*headings: str) -> str:
    """The page without the list of rooms; given headings, the sections under these alone."""
    prose = PAGE.read_text().partition(BEGIN)[0]
    sections = {each.partition("\n")[0]: each for each in re.split(r"^## ", prose, flags=re.MULTILINE)}
    return "".join(sections[heading] for heading in headings) if headings else prose


def _files(prose: str) -> set[str]:
    return set(re.findall(r"`([\w/]+\.py)`", prose))


def test_modules_that_the_prose_names_are_there() -> None:
    """Whether it gives their whole path or the end of it."""
    ends = tuple(f"/{path.relative_to(ROOT)}" for path in [*modules().values(), Path(__file__)])
    assert [name for name in _files(_prose()) if not any(end.endswith(f"/{name}") for end in ends)] == []


def test_modules_that_docstrings_and_the_page_name_by_their_rooms_are_there() -> None:
    """Such as ``payload.rowset``: a room and a module in it, or what such a module holds; or a public name."""
    rooms = {name.rpartition(".")[2] for name in _packages()}
    places = [f".{name}" for name in modules()]
    places += [f".{name}.{each}" for name in SOURCES for each in importlib.import_module(name).__all__]
    docstrings = [ast.get_docstring(ast.parse(path.read_text())) or "" for path in modules().values()]
    dotted = re.findall(r"`([a-z_]+)((?:\.\w+)+)`", "\n".join([*docstrings, _prose()]))
    named = [f".{room}{rest}" for room, rest in dotted if room in rooms]
    assert len(named) > 10
    holders = [f".{name}" for name, path in modules().items() if path.name != "__init__.py"]
    lost = [name for name in named if not any(place.endswith(name) for place in places)]
    lost = [name for name in lost if not any(each.endswith(name.rpartition(".")[0]) for each in holders)]
    assert lost == []


@pytest.mark.parametrize("room", ["training.saving", "training.loading", "chains", "writing"])
def test_a_save_and_a_load_tell_what_each_module_of_these_rooms_does(room: str) -> None:
    folder = modules()[f"cnr_store.{room}"].parent
    names = {f"{folder.name}/{path.name}" for path in folder.glob("*.py") if path.name != "__init__.py"}
    assert names - _files(_prose("A save, step by step", "A load, step by step")) == set()


UNITS = {"": 1, "s": 1, "%": 0.01, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def _number(text: str) -> float:
    number, _, unit = text.replace(",", "").partition(" ")
    return float(number) * UNITS[unit]


def _constants(file: str) -> dict[str, Any]:
    """By name, what a module assigns at its top, the options in its groups, and those of `Checkpointer`."""
    name = next(name for name, path in modules().items() if path == ROOT / file)
    module = importlib.import_module(name)
    top = ast.parse((ROOT / file).read_text()).body
    targets = [target for node in top if isinstance(node, ast.Assign) for target in node.targets]
    names = {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    found = {each: vars(module)[each] for each in names & vars(module).keys()}
    groups = [each for each in vars(module).values() if is_dataclass(each) and each.__module__ == name]
    found |= {each.name: each.default for group in groups for each in fields(group)}
    if Checkpointer.__module__ == name:
        found |= {each.name: each.default for each in inspect.signature(Checkpointer).parameters.values()}
    return found


def test_constants_that_the_page_names_stand_there_with_that_value() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| ([^|]+) \| `([^`]+)` \|", _prose("Constants that people tune"), re.MULTILINE
    )
    said = {(file, name): _number(value.strip()) for name, value, file in rows}
    values = {(file, name): _constants(file).get(name) for file, name in said}
    assert len(rows) == len(said) > 50
    assert values == pytest.approx(said)
