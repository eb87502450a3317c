# SPDX-License-Identifier: Apache-2.0
"""A report as one self-contained page: nothing is fetched, and nothing in the data can run.

Path("report.html").write_text(render(report(optimized)))

The page is the template with the style, the scripts and the report's own JSON put in. Its content
security policy allows that one script and that one style by their digests and no other source, so a name
in somebody's model that looks like markup stays a name.
"""

import base64
import hashlib
import re
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blade.report import Report

# In the order in which they are read; one function scope holds them all.
SCRIPTS = ("dom.js", "model.js", "layout.js", "scene.js", "graph.js", "charts.js", "main.js")


def render(report: "Report") -> str:
    """The whole document."""
    style = _read("style.css")
    script = "(() => {\n'use strict';\n" + "\n".join(map(_read, SCRIPTS)) + "\n})();\n"
    parts = {
        "policy": f"default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src '{_digest(script)}'; style-src '{_digest(style)}'",
        "style": style,
        "script": script,
        "data": _inert(report.to_json()),
    }
    # One pass: what is put in is not searched for further places.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _read("page.html"))


def _read(name: str) -> str:
    return files("blade.report_page").joinpath(name).read_text(encoding="utf-8")


def _inert(json: str) -> str:
    """JSON that cannot end the element it stands in, nor open a comment there."""
    return json.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
