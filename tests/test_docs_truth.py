"""What the pages say of extras, limits and files is so."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from cnr_store.cli.app import app
from tests.paths import ROOT
from tests.stated_limits import PHRASES, ROWS

PAGES = sorted(
    page
    for page in ROOT.rglob("*.md")
    if not {".venv", "site", ".github"} & set(page.relative_to(ROOT).parts)
    and not any(part.startswith(".") for part in page.relative_to(ROOT).parts)
)
SOURCES = sorted(
    source
    for folder in ("cnr_store", "codecs/src", "backends/src")
    for source in (ROOT / folder).rglob("*.py")
)


def without_programs(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


# Extras


def distributions() -> dict[str, tuple[Path, set[str]]]:
    """Folder and extras of each distribution by its name."""
    found = {}
    for folder in (ROOT, ROOT / "codecs", ROOT / "backends"):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        found[project["name"]] = folder, set(project.get("optional-dependencies", {}))
    return found


def extras_named(text: str) -> Iterator[tuple[str, str]]:
    """(distribution, extra) wherever a text asks for one: by name, or by the folder of a checkout."""
    folders = {".": "cnr-store", "./codecs": "cnr-codecs", "./backends": "cnr-backends"}
    for name, extras in re.findall(r"(cnr-[a-z]+|(?<=[\s'\"`])\.(?:/[a-z]+)?)\[([a-z0-9, ]+)\]", text):
        for extra in extras.split(","):
            yield folders.get(name, name), extra.strip()
    for extra in re.findall(r"\bextra `([^`]+)`", text):
        yield "cnr-store", extra


def test_every_extra_that_a_page_or_a_message_names_exists() -> None:
    known = distributions()
    named = {(place, *each) for place in [*PAGES, *SOURCES] for each in extras_named(place.read_text())}
    assert {distribution for _, distribution, _ in named} == {"cnr-store", "cnr-backends"}
    wrong = [
        f"{place.relative_to(ROOT)} names {distribution}[{extra}]"
        for place, distribution, extra in sorted(named)
        if extra not in known[distribution][1]
    ]
    assert wrong == []


def test_every_extra_that_a_distribution_asks_for_exists() -> None:
    known = distributions()
    asked = [
        each for folder, _ in known.values() for each in extras_named((folder / "pyproject.toml").read_text())
    ]
    assert asked
    assert [each for each in asked if each[1] not in known[each[0]][1]] == []


# Limits


def format_page() -> str:
    return " ".join(without_programs(ROOT / "docs" / "format.md").split())


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_limit_in_the_prose_of_the_format_is_that_of_the_code(phrase: str) -> None:
    assert format_page().count(phrase) == 1


def test_the_limits_of_the_format_are_those_of_the_code() -> None:
    table = format_page().partition("| what | at most | |---|---| ")[2].partition(" ## ")[0]
    rows = [row.split(" | ") for row in table.strip("| ").split(" | | ")]
    assert dict(rows) == ROWS


def test_the_prose_of_the_format_states_no_limit_that_goes_unchecked() -> None:
    prose = format_page().partition("## Limits")[0]
    for phrase in PHRASES:
        prose = prose.replace(phrase, "")
    stated = re.findall(r"(?:at most|more than) (?:two|three|four|five|[0-9])[^.;:|]*", prose)
    assert stated == []


# Figures


@pytest.mark.parametrize(
    ("row", "contender"),
    [
        ("cnr-store", "ours"),
        ("torch.save", "torch.save"),
        ("DCP, `save`", "DCP save"),
        ("DCP, `async_save`", "DCP async_save"),
        ("DCP, `async_save`, its buffers kept", "DCP async_save, stager kept"),
    ],
)
def test_the_stalls_of_the_comparison_are_those_on_record(row: str, contender: str) -> None:
    on_record = json.loads((ROOT / "benchmarks" / "results" / "saving.json").read_text())["stall"]
    cells = [
        f"{1000 * each['median_seconds']:.0f} ({1000 * each['best_seconds']:.0f})"
        for each in on_record
        if each["contender"] == contender
    ]
    line = " | ".join([f"| {row}", *cells]) + " |"
    assert line in (ROOT / "docs" / "comparison.md").read_text().splitlines()


def test_the_stalls_of_the_home_page_are_those_on_record() -> None:
    on_record = json.loads((ROOT / "benchmarks" / "results" / "saving.json").read_text())["stall"]
    median = {
        each["contender"]: f"{1000 * each['median_seconds']:.0f}"
        for each in on_record
        if (each["optimizer"], each["share"]) == ("sgd", 0.01)
    }
    stalls = f"| {median['ours']} ms; `torch.save` takes {median['torch.save']} |"
    assert stalls in (ROOT / "docs" / "index.md").read_text()


def test_the_commands_that_print_no_json_are_named() -> None:
    said = re.search(r"commands take `--json`, except ([^.]*)\.", (ROOT / "docs" / "upkeep.md").read_text())
    assert said
    commands = get_command(app).commands  # type: ignore[attr-defined]
    without = [
        name
        for name, command in commands.items()
        if not any("--json" in option.opts for option in command.params)
    ]
    assert re.findall(r"`([^`]+)`", said[1]) == without


# Links


def anchors(page: Path) -> set[str]:
    """What a link may end in: the headings' words."""
    headings = re.findall(r"^#+ (.*)", without_programs(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_to_a_file_of_the_tree_leads_to_it(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", without_programs(page)):
        file = page.parent / target if target else page
        assert file.exists(), f"no {target}"
        if anchor:
            assert anchor in anchors(file), f"no heading #{anchor} in {file.name}"
