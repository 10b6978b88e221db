"""The metadata of the three distributions: one version, and the floors that are tried."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import cnr_backends
import cnr_codecs
import cnr_store
from tests.paths import ROOT

FOLDERS = {"cnr-store": ROOT, "cnr-codecs": ROOT / "codecs", "cnr-backends": ROOT / "backends"}
PACKAGES = {"cnr-store": cnr_store, "cnr-codecs": cnr_codecs, "cnr-backends": cnr_backends}


def projects(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """The `project` table of each distribution by its name."""
    tables = [
        tomllib.loads((root / folder.relative_to(ROOT) / "pyproject.toml").read_text())["project"]
        for folder in FOLDERS.values()
    ]
    return {table["name"]: table for table in tables}


def floors() -> dict[str, set[str]]:
    """The lowest versions that the distributions ask for, by what they ask for."""
    found: dict[str, set[str]] = {}
    for table in projects().values():
        extras = table.get("optional-dependencies", {}).values()
        for asked in (each for some in [table["dependencies"], *extras] for each in some):
            if not asked.startswith("cnr-"):
                match = re.fullmatch(r"([a-z0-9-]+)>=([0-9.]+)(?:,<[0-9.]+)?(?:; .+)?", asked)
                assert match, f"{asked} names no floor"
                found.setdefault(match[1], set()).add(match[2])
    return found


def ours(root: Path = ROOT) -> set[str]:
    """By what ranges the distributions ask for each other."""
    asked = [each for table in projects(root).values() for each in table["dependencies"]]
    return {re.sub(r"^[a-z-]+", "", each) for each in asked if each.startswith("cnr-")}


def test_uv_finds_the_other_distributions_in_a_checkout() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = {
        re.split("[>=]", each)[0] for each in document["project"]["dependencies"] if each.startswith("cnr-")
    }
    sources = document["tool"]["uv"]["sources"]
    assert sources.keys() == asked
    for name, source in sources.items():
        found = tomllib.loads((ROOT / source["path"] / "pyproject.toml").read_text())
        assert found["project"]["name"] == name


def test_the_distributions_bear_one_version() -> None:
    tables = projects()
    assert sorted(tables) == sorted(FOLDERS)
    versions = {table["version"] for table in tables.values()}
    versions |= {package.__version__ for package in PACKAGES.values()}
    assert len(versions) == 1
    assert f"\nversion: {cnr_store.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_a_distribution_takes_the_others_of_its_own_release_or_a_later_compatible_one() -> None:
    major, minor, _ = (int(part) for part in cnr_store.__version__.split("."))
    next_breaking = f"0.{minor + 1}" if major == 0 else f"{major + 1}"
    assert ours() == {f">={cnr_store.__version__},<{next_breaking}"}


def test_the_lowest_versions_that_ci_runs_on_are_the_floors_of_the_metadata() -> None:
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    tried = dict(line.split("==") for line in lines if not line.startswith("#"))
    padded = {name: {re.sub(r"(\.0)+$", "", tried[name])} for name in floors() if name != "pytest"}
    assert padded == {name: lowest for name, lowest in floors().items() if name != "pytest"}


def test_the_wheel_carries_all_that_the_demo_imports_of_the_examples() -> None:
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    carried = targets["wheel"]["force-include"]
    examples = {path.stem for path in (ROOT / "examples").glob("*.py")}
    for file in carried:
        imported = set(re.findall(r"^(?:from|import) (\w+)", (ROOT / file).read_text(), re.MULTILINE))
        assert {f"examples/{name}.py" for name in imported & examples} <= carried.keys()
    assert carried == {file: f"cnr_store/{file}" for file in carried}
    assert "examples/demo.py" in carried
    assert "/examples" in targets["sdist"]["include"]  # a wheel may be built of it


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the files that bear the version."""
    for name in ("tools", "cnr_store/__init__.py", "codecs", "backends", "pyproject.toml", "CITATION.cff"):
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    return tmp_path


def version_tool(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(checkout / "tools" / "version.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("version", "asked"), [("0.2.0", ">=0.2.0,<0.3"), ("1.4.7", ">=1.4.7,<2")])
def test_the_tool_sets_the_version_everywhere(checkout: Path, version: str, asked: str) -> None:
    assert version_tool(checkout, version).stdout.strip() == version
    assert {table["version"] for table in projects(checkout).values()} == {version}
    assert ours(checkout) == {asked}
    left = [
        path
        for path in checkout.rglob("__init__.py")
        if f'__version__ = "{cnr_store.__version__}"' in path.read_text()
    ]
    assert left == []
    assert f"\nversion: {version}\n" in (checkout / "CITATION.cff").read_text()


def test_the_tool_names_the_place_that_differs(checkout: Path) -> None:
    place = checkout / "codecs" / "pyproject.toml"
    place.write_text(place.read_text().replace(f'"{cnr_store.__version__}"', '"9.9.9"'))
    found = version_tool(checkout)
    assert found.returncode == 1
    assert "codecs/pyproject.toml" in found.stderr
    assert "backends" not in found.stderr


def test_the_tool_refuses_what_is_no_version(checkout: Path) -> None:
    assert version_tool(checkout, "v0.2").returncode == 1
    assert version_tool(checkout).stdout.strip() == cnr_store.__version__
