"""The layout of cnr_backends: no module bears a public name, no import hides, and each extra is defined."""

import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import cnr_backends
from tests.layout import hidden_imports, rooms, shadowed_names

MEMBER = Path(__file__).parents[2] / "backends"
ROOMS = list(rooms(cnr_backends))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_no_module_bears_a_public_name(room: ModuleType) -> None:
    assert shadowed_names(room) == set()


def test_no_import_hides() -> None:
    assert hidden_imports(cnr_backends) == []


def test_public_names_are_there() -> None:
    assert [name for name in cnr_backends.__all__ if not hasattr(cnr_backends, name)] == []


def test_extras_that_the_readme_names_are_defined() -> None:
    named = set(re.findall(r"cnr-backends\[(\w+)\]", (MEMBER / "README.md").read_text()))
    project = tomllib.loads((MEMBER / "pyproject.toml").read_text())["project"]
    assert named == set(project["optional-dependencies"])
