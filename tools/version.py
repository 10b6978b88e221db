"""The version of the three distributions: `python tools/version.py` prints it, `python tools/version.py 0.2.0` sets it.

They are released together under one number. It stands in each distribution's metadata and package, in the ranges by
which they ask for each other, and in CITATION.cff.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NUMBER = r"[0-9]+\.[0-9]+\.[0-9]+"
VERSIONS = (
    ("pyproject.toml", r'^version = "(.*)"$'),
    ("codecs/pyproject.toml", r'^version = "(.*)"$'),
    ("backends/pyproject.toml", r'^version = "(.*)"$'),
    ("cnr_store/__init__.py", r'^__version__ = "(.*)"$'),
    ("codecs/src/cnr_codecs/__init__.py", r'^__version__ = "(.*)"$'),
    ("backends/src/cnr_backends/__init__.py", r'^__version__ = "(.*)"$'),
    ("CITATION.cff", r"^version: (.*)$"),
)
RANGES = (
    ("pyproject.toml", r'^    "cnr-codecs(.*)",$'),
    ("pyproject.toml", r'^    "cnr-backends(.*)",$'),
    ("backends/pyproject.toml", r'^    "cnr-codecs(.*)",$'),
)


def range_of(version: str) -> str:
    """What one distribution asks of another: at least this version, and none that may change the interface."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return f">={version},<{major + 1}" if major else f">={version},<0.{minor + 1}"


def read() -> str:
    """The version, if every place has the same one."""
    version = _match(*VERSIONS[0])[1]
    wrong = [path for path, pattern in VERSIONS if _match(path, pattern)[1] != version]
    wrong += [path for path, pattern in RANGES if _match(path, pattern)[1] != range_of(version)]
    if wrong:
        sys.exit(f"{VERSIONS[0][0]} has version {version}; these say otherwise: {', '.join(wrong)}")
    return version


def write(version: str) -> None:
    if not re.fullmatch(NUMBER, version):
        sys.exit(f"{version!r} is no version such as 0.2.0")
    for places, text in ((VERSIONS, version), (RANGES, range_of(version))):
        for path, pattern in places:
            match = _match(path, pattern)
            start, end = match.span(1)
            (ROOT / path).write_text(match.string[:start] + text + match.string[end:], encoding="utf-8")


def _match(path: str, pattern: str) -> re.Match[str]:
    text = (ROOT / path).read_text(encoding="utf-8")
    matches = list(re.finditer(pattern, text, re.MULTILINE))
    if len(matches) != 1:
        sys.exit(f"{path} has {len(matches)} lines like {pattern}, not one")
    return matches[0]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(sys.argv[1])
    print(read())
