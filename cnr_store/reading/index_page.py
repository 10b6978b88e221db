"""What a browser sees of a version that is served: its arrays, their shapes, and links to their metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any
from urllib.parse import quote

from cnr_store.format.layout import NODE, decode_name

MAX_ARRAYS = 2000
"""Listed one by one."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The page's own: nothing runs and nothing is fetched."""
_STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:1.5rem auto;"
    "padding:0 1rem}div{overflow-x:auto}table{border-collapse:collapse}th,td{text-align:left;"
    "padding:.3rem 1rem .3rem 0;border-bottom:1px solid #8885}"
)


def index_page(document: bytes) -> bytes:
    """The page of the version whose root document, with all others inside, this is."""
    root = json.loads(document)
    version = root["attributes"]["cnr_version"]
    nodes = root["consolidated_metadata"]["metadata"]
    arrays = {path: node for path, node in nodes.items() if node["node_type"] == "array"}
    title = f"Version {escape(version['id'])}, step {version['step']:,}"
    rows = "".join(_row(path, arrays[path]) for path in sorted(arrays, key=_order)[:MAX_ARRAYS])
    more = len(arrays) - MAX_ARRAYS
    rest = f"<p>{more:,} more arrays are in {NODE}.</p>" if more > 0 else ""
    page = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><p>Plain Zarr, read-only. Open the address of this page "
        f'with zarr, xarray or any other reader of Zarr v3. Metadata of all arrays: <a href="{NODE}">{NODE}</a>.</p>'
        "<div><table><thead><tr><th>name</th><th>array</th><th>shape</th><th>type</th><th>metadata</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>{rest}</body></html>\n"
    )
    return page.encode("utf-8", "xmlcharrefreplace")


def _order(path: str) -> tuple[bool, str]:
    return not path.startswith("tables/"), path


def _row(path: str, node: Mapping[str, Any]) -> str:
    """Names in paths are percent-encoded; a link encodes them once more."""
    names = path.split("/")
    name = "/".join(map(decode_name, names[1:])) if names[0] == "tables" else decode_name(names[-1])
    shape = " × ".join(f"{length:,}" for length in node["shape"]) or "scalar"
    cells = (f"<bdi>{escape(name)}</bdi>", escape(path), shape, escape(str(node["data_type"])))
    link = f'<a href="./{escape(quote(f"{path}/{NODE}"))}">{NODE}</a>'
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in (*cells, link))}</tr>"
