"""The layout of cnr_codecs: no module bears a public name, and no import hides."""

from types import ModuleType

import pytest

import cnr_codecs
from tests.layout import hidden_imports, holds_only_a_docstring, rooms, shadowed_names

ROOMS = list(rooms(cnr_codecs))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_no_module_bears_a_public_name(room: ModuleType) -> None:
    assert shadowed_names(room) == set()


@pytest.mark.parametrize("room", ROOMS[1:], ids=lambda room: room.__name__)
def test_rooms_export_nothing(room: ModuleType) -> None:
    assert holds_only_a_docstring(room)


def test_no_import_hides() -> None:
    assert hidden_imports(cnr_codecs) == []


def test_public_names_are_there() -> None:
    assert [name for name in cnr_codecs.__all__ if not hasattr(cnr_codecs, name)] == []
