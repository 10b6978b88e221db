"""The pages that specify the codecs: their schemas take what the codecs take, and their examples run."""

import json
import re
from typing import Any

import jsonschema
import numcodecs
import numpy as np
import pytest
import zarr
from zarr.registry import get_codec_class
from zarr.storage import MemoryStore

from cnr_codecs import CodecConfigError, row_codec
from tests.paths import ROOT

FOLDER = ROOT / "codecs" / "spec"
PAGES = {page.stem: page.read_text() for page in sorted(FOLDER.glob("cnr_*.md"))}

VALID: dict[str, list[dict[str, Any]]] = {
    "cnr_uniform": [
        {},
        {"bits": 1},
        {"scheme": "symmetric", "bits": 8},
        {"bins": 2},
        {"scheme": "adaptive", "ratio": 0},
        {"bins": 4096, "ratio": 1},
    ],
    "cnr_rows": [{}],
    "cnr_kmeans": [
        {},
        {"bits": 8, "group": "row"},
        {"exact": True},
        {"group": "block", "block_rows": 1},
        {"group": "block"},
        {"group": "cluster", "clusters": 256, "bits": 2},
    ],
    "cnr_floating": [{}, {"mantissa_bits": 1}, {"mantissa_bits": 7}, {"mantissa_bits": 23}],
    "cnr_lattice": [
        {"rms_step": 0.001},
        {"step": 0.0078125},
        {"rms_step": 0.01, "step": 0.0078125},
    ],
}
INVALID: dict[str, list[dict[str, Any]]] = {
    "cnr_uniform": [
        {"scheme": "other"},
        {"bits": 0},
        {"bits": 9},
        {"bits": "4"},
        {"bits": 2.5},
        {"bins": 1},
        {"bins": 4097},
        {"ratio": 1.5},
        {"scheme": "symmetric", "bins": 20},
        {"scheme": "asymmetric", "ratio": 0.5},
        {"width": 4},
    ],
    "cnr_rows": [{"bits": 8}],
    "cnr_kmeans": [
        {"bits": 0},
        {"bits": 9},
        {"group": "table"},
        {"exact": 1},
        {"block_rows": 8},
        {"group": "cluster", "block_rows": 8},
        {"group": "block", "block_rows": 0},
        {"clusters": 4},
        {"group": "block", "clusters": 4},
        {"group": "cluster", "clusters": 3},
        {"group": "cluster", "clusters": 512},
        {"width": 4},
    ],
    "cnr_floating": [
        {"mantissa_bits": 0},
        {"mantissa_bits": 8},
        {"mantissa_bits": 22},
        {"mantissa_bits": 24},
        {"mantissa_bits": "3"},
        {"bits": 3},
    ],
    "cnr_lattice": [
        {"rms_step": 0},
        {"rms_step": 16.5},
        {"rms_step": "0.35"},
        {"step": 0},
        {"step": -1},
        {"step": 2.0**101},
        {"step": 2.0**-101},
        {"bits": 4},
    ],
}
SECTIONS = (
    "Codec name",
    "Configuration parameters",
    "Examples",
    "Supported chunks",
    "Format and algorithm",
    "Compatibility",
    "Change log",
)


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


def schema(page: str) -> dict[str, Any]:
    (text,) = blocks(page, "json schema")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def zarr_name(page: str) -> str:
    return page.replace("_", ".")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_every_section(page: str) -> None:
    assert PAGES[page].startswith(f"# `{zarr_name(page)}` codec\n")
    assert tuple(re.findall(r"^## (.*)$", PAGES[page], re.MULTILINE)) == SECTIONS
    for target in re.findall(r"\]\(([^)#:]+)[^)]*\)", PAGES[page]):
        assert (FOLDER / target).exists()


@pytest.mark.parametrize("page", PAGES)
def test_there_is_a_page_for_each_codec(page: str) -> None:
    assert zarr_name(page) in (FOLDER / "README.md").read_text()
    assert row_codec(page).zarr_codec()["name"] == zarr_name(page)
    assert numcodecs.get_codec({"id": page}).codec_id == page
    codec = get_codec_class(zarr_name(page)).from_dict({"name": zarr_name(page)})
    assert codec.to_dict()["name"] == zarr_name(page)


@pytest.mark.parametrize("page", PAGES)
def test_the_schema_is_one_and_takes_the_examples(page: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(page))
    validator = jsonschema.Draft202012Validator(schema(page))
    examples = [json.loads(text) for text in blocks(page, "json example")]
    assert examples
    for example in examples:
        validator.validate(example)
        codec = get_codec_class(zarr_name(page)).from_dict(example)
        validator.validate(codec.to_dict())
    assert not validator.is_valid({"name": "cnr.other"})
    assert not validator.is_valid({"name": zarr_name(page), "must_understand": False})


@pytest.mark.parametrize(("page", "options"), [(page, each) for page in PAGES for each in VALID[page]])
def test_schema_and_codec_take_the_same(page: str, options: dict[str, Any]) -> None:
    entry: dict[str, Any] = {"name": zarr_name(page), "configuration": options}
    jsonschema.validate(entry, schema(page))
    codec = row_codec({"id": page, **options})
    jsonschema.validate(codec.zarr_codec(), schema(page))
    array = zarr.create_array(MemoryStore(), shape=(4, 8), dtype="f4", serializer=entry)
    array[:] = np.ones((4, 8), np.float32)
    np.testing.assert_allclose(np.asarray(array[:]), 1, atol=0.01)


@pytest.mark.parametrize(("page", "options"), [(page, each) for page in PAGES for each in INVALID[page]])
def test_schema_and_codec_refuse_the_same(page: str, options: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"name": zarr_name(page), "configuration": options}, schema(page))
    with pytest.raises(CodecConfigError):
        row_codec({"id": page, **options})


@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_a_page_run(page: str) -> None:
    programs = blocks(page, "python")
    assert programs
    for number, program in enumerate(programs):
        exec(compile(program, f"{page}.md, program {number}", "exec"), {})
