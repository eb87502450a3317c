# SPDX-License-Identifier: Apache-2.0
"""A report as one self-contained page, which fetches nothing and executes no data.

Path("report.html").write_text(report(optimized).to_html())

The page is a template filled with the style, the scripts and the report's JSON. Its content security policy
allows only that script and that style, by digest, so a name in a model that looks like markup stays a name.
"""

import base64
import hashlib
import html
import re
from importlib.resources import files

# In the order of execution, inside one function scope.
SCRIPTS = ("dom.js", "model.js", "layout.js", "scene.js", "graph.js", "charts.js", "main.js")


def render(report: str, model: str, date: str, summary: str) -> str:
    """The whole document; ``report`` is JSON, ``model`` and ``date`` may be empty."""
    style = _read("style.css")
    script = "(() => {\n'use strict';\n" + "\n".join(map(_read, SCRIPTS)) + "\n})();\n"
    parts = {
        "policy": f"default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src '{_digest(script)}'; style-src '{_digest(style)}'",
        "style": style,
        "script": script,
        "data": _inert(report),
        "title": html.escape(" · ".join(filter(None, (model, "blade report", date)))),
        "model": html.escape(model or "Model"),
        "summary": html.escape(summary),
    }
    # One pass: inserted text is not searched for further placeholders.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _read("page.html"))


def _read(name: str) -> str:
    return files("blade.report.html").joinpath(name).read_text(encoding="utf-8")


def _inert(json: str) -> str:
    """JSON that cannot close its enclosing element or open a comment there."""
    return json.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
