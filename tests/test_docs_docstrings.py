"""Every public name tells of each parameter that it takes, and of none that it doesn't."""

from __future__ import annotations

import ast
import enum
import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import cnr_backends
import cnr_codecs
import cnr_store
import cnr_store.dcp
from tests.paths import ROOT
from tests.source_tree import modules


def classes(package: ModuleType) -> list[type]:
    """Public ones that somebody makes or gets: no errors, which are raised, and no enumerations."""
    public = [getattr(package, name) for name in package.__all__]
    return [
        each for each in public if inspect.isclass(each) and not issubclass(each, BaseException | enum.Enum)
    ]


def methods(of: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in vars(of):
        found = getattr(of, name)
        if not name.startswith("_") and (inspect.isfunction(found) or inspect.ismethod(found)):
            yield f"{of.__name__}.{name}", found


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function and method by its name."""
    for package in PACKAGES:
        for name in package.__all__:
            if inspect.isfunction(found := getattr(package, name)):
                yield f"{last_name(package)}.{name}", found
        for each in classes(package):
            yield from ((f"{last_name(package)}.{name}", found) for name, found in methods(each))


def last_name(package: ModuleType) -> str:
    return package.__name__.rpartition(".")[2]


PACKAGES = (cnr_store, cnr_store.dcp, cnr_codecs, cnr_backends)
FUNCTIONS = dict(functions())
CLASSES = {f"{last_name(package)}.{each.__name__}": each for package in PACKAGES for each in classes(package)}


def parameters(of: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(of).parameters if name not in ("self", "cls")]


def docstrings(name: str) -> list[str]:
    """A function's own, and those of the methods that it stands for: of a protocol that its class keeps."""
    package, *rest = name.split(".")
    own = inspect.getdoc(FUNCTIONS[name]) or ""
    if len(rest) == 1:
        return [own]
    of = CLASSES[f"{package}.{rest[0]}"]
    kept = [
        each for each in CLASSES.values() if is_protocol(each) and each is not of and issubclass(of, each)
    ]
    return [own, *(inspect.getdoc(getattr(each, rest[1])) or "" for each in kept if hasattr(each, rest[1]))]


def is_protocol(of: type) -> bool:
    return getattr(of, "_is_protocol", False)


def section(text: str, title: str) -> list[str]:
    """The names that a section of a docstring in numpy's style lists."""
    found = re.search(rf"^{title}\n-+\n(.*?)(?=^\S[^\n]*\n-+\n|\Z)", text, re.DOTALL | re.MULTILINE)
    entries = re.findall(r"^(\S[^\n]*)", found[1], re.MULTILINE) if found else []
    return [name.strip().lstrip("*") for entry in entries for name in entry.partition(" : ")[0].split(",")]


def names(text: str, parameter: str, among: int) -> bool:
    """Whether prose tells of a parameter: the only one by its word, of two each in backticks, more not at all."""
    mark = {1: r"\b", 2: "`"}.get(among)
    return mark is not None and re.search(f"{mark}{parameter}{mark}", text) is not None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_tells_of_its_parameters(name: str) -> None:
    taken, texts = parameters(FUNCTIONS[name]), docstrings(name)
    assert texts[0], "no docstring"
    told = {each for text in texts for each in section(text, "Parameters")}
    assert told <= set(taken), "told of, and not taken"
    untold = [each for each in taken if each not in told and not names(texts[0], each, len(taken))]
    assert untold == [], "taken, and not told of"


def fields(of: type) -> list[str]:
    """Of a dataclass or a named tuple."""
    return [*getattr(of, "__dataclass_fields__", ()), *getattr(of, "_fields", ())]


def taken_by(of: type) -> list[str]:
    """The parameters of a class's constructor, unless others derive from it alone."""
    derived_from = inspect.isabstract(of) or is_protocol(of)
    return parameters(of) if not derived_from and ("__init__" in vars(of) or fields(of)) else []


def has(of: type, name: str) -> bool:
    """Whether a class or its instances have an attribute."""
    return hasattr(of, name) or name in inspect.get_annotations(of) or f"self.{name}" in inspect.getsource(of)


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_tells_how_it_is_made_or_what_it_holds(name: str) -> None:
    of = CLASSES[name]
    text = inspect.getdoc(of) or ""
    told, held = section(text, "Parameters"), section(text, "Attributes")
    made = taken_by(of)
    assert set(told) <= set(made), "told of, and not taken"
    assert [each for each in held if not has(of, each)] == [], "told of, and not held"
    if told:
        assert [each for each in made if each not in told + held] == [], "taken, and not told of"
    elif made:  # users get it from a function
        assert held, "neither how it is made nor what it holds"
        assert [each for each in fields(of) if each not in held] == [], "held, and not told of"


def test_only_public_names_have_sections() -> None:
    """Inside, a docstring is prose, and a field of a class has its comment beside it."""
    public = {
        (each.__module__, each.__qualname__)
        for package in PACKAGES
        for name in package.__all__
        if inspect.isfunction(found := getattr(package, name)) or inspect.isclass(found)
        for each in (found.__mro__ if inspect.isclass(found) else [found])
    }
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: ([\w.]+)", _pages(), re.MULTILINE)}
    found = [
        f"{name}.{node.name}"
        for name, path in modules().items()
        if not name.startswith(("cnr_store.cli.report.", "cnr_store.integrations."))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        if (name, node.name) not in public and node.name not in shown
        for each in ast.walk(node)
        if isinstance(each, ast.ClassDef | ast.FunctionDef)
        if re.search(
            r"^(Parameters|Attributes|Returns|Raises)\n---", ast.get_docstring(each) or "", re.MULTILINE
        )
    ]
    assert found == []


def _pages() -> str:
    return "\n".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
