"""What the page of `cnr report` draws: without a browser, Node runs its script on a document of few calls."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

_DOCUMENT = """
class Element {
  constructor(tag) { this.tag = tag; this.attributes = {}; this.children = []; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  append(...children) { this.children.push(...children.map(each => each instanceof Element ? each : String(each))); }
}
const escaped = words => words.replace(/[&<>"]/g, each => `&#${each.charCodeAt(0)};`);
const html = each => !(each instanceof Element) ? escaped(each) : `<${each.tag}${
  Object.entries(each.attributes).map(([name, value]) => ` ${name}="${escaped(value)}"`).join("")
}>${each.children.map(html).join("")}</${each.tag}>`;
const page = new Element("main");
globalThis.document = {
  createElementNS: (space, tag) => new Element(tag),
  getElementById: name => name === "page" ? page : {textContent: input.figures},
};
new Function(input.script)();
process.stdout.write(JSON.stringify([document.title, html(page)]));
"""


def drawn(page: str) -> tuple[str, str]:
    """The title of a page, and what its script draws, as HTML."""
    if shutil.which("node") is None:
        pytest.skip("Node is not on the path")
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    given = json.dumps({"figures": found[1], "script": script})
    done = subprocess.run(
        ["node", "--input-type=commonjs"],
        input=f"const input = {given};\n{_DOCUMENT}",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    title, html = json.loads(done.stdout)
    return title, html
