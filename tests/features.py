"""Every public name, parameter, attribute, command, option and kind of error, taken from the code itself.

`features.toml` names, for each of them, a test that proves it. ``python -m tests.features`` prints what it lacks, each
line with a test that mentions it: read that test, and take another one where it proves something else.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import typer

from cnr_store.cli.app import app
from tests.paths import ROOT

LEDGER = ROOT / "tests/features.toml"
PUBLIC = {
    "cnr_store": "cnr_store",
    "cnr_store.dcp": "dcp",
    "cnr_store.integrations.lightning": "lightning",
    "cnr_store.integrations.metrics": "metrics",
    "cnr_codecs": "cnr_codecs",
    "cnr_backends": "cnr_backends",
    "cnr_backends.testing": "testing",
}
"""Modules whose names users import, each with what the keys of its features begin with."""
NAMES = {"lightning": ["CnrCheckpoint"], "metrics": ["log_to"]}
"""What users import from modules that have no list of it."""
COMMAND = "cnr_store.cli.app"
"""What `cnr` runs."""
DOORS = re.compile("|".join(map(re.escape, [*PUBLIC, COMMAND])) + r"|\w+\.errors|cnr_backends\.testing\..*")
"""Modules that a test may import and still use public names alone."""
PLUGINS = ("pyproject.toml", "codecs/pyproject.toml")
"""Where codecs and filesystems are named that others find by entry points."""
OF_TYPER = {"--help", "--install-completion", "--show-completion"}
OF_THE_PRODUCT = {
    "Preemption": {"close"},
    "PendingSave": {"check_uninterrupted", "end_reading", "live_pace", "seconds", "settle", "skip"},
    "VersionInfo": {"from_record"},
}
"""Methods of public classes that only the product calls."""
RETURNED = re.compile(
    "ArrayInfo|BackendStore|Block|CodecReport|CompactReport|Finding|GcReport|Leftovers|Preemption|Restored|"
    "SalvagedRows|ShardIndex|SimulatedSave|Update|VerifyReport"
)
"""Classes that functions return and nobody makes: their attributes stand for them."""
CONTRACTS = {"Backend", "ChunksCodec", "Compressors", "RowCodec", "Transfer"}
"""Classes of codecs and backends whose methods others write or call. The methods of the rest are these, or internal."""


def features() -> dict[str, str]:
    """What users rely on, by key: the word that a test of it must have."""
    found = dict([*_commands(), *_plugins()])
    for module, prefix in PUBLIC.items():
        imported = importlib.import_module(module)
        for name in NAMES.get(prefix) or imported.__all__:
            value = getattr(imported, name)
            key = f"{prefix}.{name}"
            found |= dict(_class(key, value) if inspect.isclass(value) else _function(key, value))
    return found


def _commands() -> Iterator[tuple[str, str]]:
    group: Any = typer.main.get_command(app)
    for name, command in [("", group), *group.commands.items()]:
        key = f"cnr {name}".strip()
        if name:
            yield key, name
        for option in (max(each.opts, key=len) for each in command.params):
            if option.startswith("--") and option not in OF_TYPER:
                yield f"{key} {option}", option


def _plugins() -> Iterator[tuple[str, str]]:
    for path in PLUGINS:
        groups = tomllib.loads((ROOT / path).read_text())["project"]["entry-points"]
        yield from ((f"{group} {name}", name) for group, names in groups.items() for name in names)


def _class(key: str, value: type) -> Iterator[tuple[str, str]]:
    prefix, name = key.split(".")
    is_returned = RETURNED.fullmatch(name) is not None
    if not is_returned:
        yield key, name
    if issubclass(value, BaseException | enum.Enum):
        return
    fields = [each.name for each in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    given = prefix in ("cnr_codecs", "cnr_backends", "testing") and not is_returned
    if given or not fields:
        yield from _parameters(key, value)
    methods = {member for member in vars(value) if inspect.isroutine(getattr(value, member))}
    if not given:  # whatever a base has, a framework calls
        methods = vars(value).keys() - {member for base in value.__mro__[1:] for member in vars(base)}
    elif name not in CONTRACTS:
        return
    members = methods if given else {*fields, *methods, *_attributes(value)}
    for member in sorted(members - OF_THE_PRODUCT.get(name, set())):
        if not member.startswith("_"):
            yield f"{key}.{member}", member
            if inspect.isfunction(vars(value).get(member)):
                yield from _parameters(f"{key}.{member}", vars(value)[member])


def _function(key: str, value: object) -> Iterator[tuple[str, str]]:
    yield key, key.rpartition(".")[2]
    yield from _parameters(key, value)


def _parameters(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Parameters that may be left out. Without the others there is no call, so any test of it proves them."""
    for name, parameter in inspect.signature(value).parameters.items():
        by_name = parameter.kind is parameter.KEYWORD_ONLY
        if (by_name or parameter.default is not parameter.empty) and not name.startswith("_"):
            yield f"{key}({name})", name if by_name else key.rpartition(".")[2]


def _attributes(value: type) -> list[str]:
    """Attributes that the documentation of a class lists."""
    section = re.search(r"(?ms)^Attributes\n-+\n(.*?)(?:\n\n\w+\n-+\n|\Z)", inspect.getdoc(value) or "")
    lines = re.findall(r"(?m)^\w+(?:, \w+)*$", section[1]) if section else []
    return [name for line in lines for name in line.split(", ")]


class Story(NamedTuple):
    """A test, with all that it uses of the tests' own code."""

    text: str
    is_public: bool
    """Whether its file gives it public names of the product alone, and it asks for no private attribute."""


class Part(NamedTuple):
    """What a file defines under one name."""

    text: str
    uses: frozenset[str]
    is_private: bool
    """Whether it asks for a private attribute of something else."""


class File(NamedTuple):
    """A file of tests, or of what they share."""

    parts: dict[str, Part]
    shared: dict[str, tuple[Path, str]]
    """Names that it imports from other such files: that file, and the name there, "" for the file itself."""
    inside: frozenset[str]
    """Names that it imports from the product's own modules."""


@cache
def read(path: Path) -> File:
    """What a file defines and imports."""
    source = path.read_text(encoding="utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    parts: dict[str, Part] = {}
    shared: dict[str, tuple[Path, str]] = {}
    inside: set[str] = set()
    in_classes = [each for top in tree.body if isinstance(top, ast.ClassDef) for each in top.body]
    for node in tree.body + in_classes:
        match node:
            case ast.ImportFrom(module=str(module)):
                imported = {each.asname or each.name: each.name for each in node.names}
                if module.startswith("tests."):
                    shared |= {name: _shared(module, original) for name, original in imported.items()}
                elif module.startswith("cnr_") and not DOORS.fullmatch(module):
                    inside |= imported.keys()
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names, first = [node.name], min(each.lineno for each in [node, *node.decorator_list])
            case ast.Assign(targets=targets):
                names, first = [each.id for each in targets if isinstance(each, ast.Name)], node.lineno
            case ast.AnnAssign(target=ast.Name(id=name)):
                names, first = [name], node.lineno
            case _:
                continue
        text = "\n".join(lines[first - 1 : node.end_lineno])
        is_private = any(map(_is_private, ast.walk(node)))
        parts |= dict.fromkeys(names, Part(text, frozenset(_uses(node)), is_private))
    return File(parts, shared, frozenset(inside))


def _shared(module: str, name: str) -> tuple[Path, str]:
    """The file that a name is imported from, and the name there: "" where it is the file itself."""
    place = ROOT / module.replace(".", "/")
    file = place.with_suffix(".py")
    return (file, name) if file.is_file() else (place / f"{name}.py", "")


def _is_private(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            return False
        case ast.Attribute(attr=name):
            return name.startswith("_") and not name.endswith("_")  # notebooks ask for `_repr_html_`
    return False


def _uses(node: ast.AST) -> Iterator[str]:
    """Names that a statement uses, "module.name" among them; also its arguments, which are fixtures."""
    match node:
        case ast.Name(id=name) | ast.arg(arg=name):
            yield name
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            yield f"{module}.{name}"
        case ast.Constant(value=str(value)) if re.fullmatch(r"tests(\.\w+)+:\w+", value):
            yield value  # a function that another process runs
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    yield from _uses(each)


def story(test: str) -> Story | None:
    """The test that a line of the ledger names as "path::name"."""
    file, _, name = test.partition("::")
    own = ROOT / file
    if not re.match("test_|Test", name) or not own.is_file() or name not in read(own).parts:
        return None
    reached: dict[tuple[Path, str], Part] = {}
    todo = [(own, name)]
    while todo:
        place = todo.pop()
        part = read(place[0]).parts.get(place[1])
        if part is not None and place not in reached:
            reached[place] = part
            todo += [_place(place[0], each) for each in part.uses]
    text = "\n".join(part.text for part in reached.values())
    here = [part for (path, _), part in reached.items() if path == own]
    used = frozenset[str]().union(each.partition(".")[0] for part in here for each in part.uses)
    reaches = any(part.is_private for part in here) or used & read(own).inside
    return Story(text, not reaches)


def _place(path: Path, name: str) -> tuple[Path, str]:
    """The file that defines a name used in a file, and its name there."""
    if ":" in name:
        module, _, function = name.partition(":")
        return (ROOT / module.replace(".", "/")).with_suffix(".py"), function
    module, _, attribute = name.partition(".")
    file, defined = read(path).shared.get(module, (path, module))
    return file, defined or attribute


def mentions(word: str, text: str) -> bool:
    """Whether a text has a word; an option may be handed on as a keyword."""
    forms = [rf"(?<![\w-]){re.escape(word)}(?![\w-])"]
    if word.startswith("--"):
        forms.append(rf"\b{word[2:].replace('-', '_')}=")
    return any(re.search(form, text) for form in forms)


def ledger() -> dict[str, str]:
    """The test of each feature."""
    return {key: test for table in tomllib.loads(LEDGER.read_text()).values() for key, test in table.items()}


def main() -> None:
    """Print what the ledger lacks."""
    known = ledger()
    files = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "backends/src").rglob("*conformance.py")]
    tests = [f"{path.relative_to(ROOT)}::{name}" for path in files for name in read(path).parts]
    stories = {test: found for test in tests if (found := story(test))}
    for key, word in features().items():
        if key not in known:
            fitting = [test for test, each in stories.items() if mentions(word, each.text)]
            fitting.sort(key=lambda test: (not stories[test].is_public, len(stories[test].text)))
            print(f'"{key}" = "{next(iter(fitting), "?")}"')


if __name__ == "__main__":
    main()
