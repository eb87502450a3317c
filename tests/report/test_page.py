# SPDX-License-Identifier: Apache-2.0
"""The page of a report: well-formed, self-contained, inert, and drawn by a real browser."""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from page_reports import HOSTILE, hostile, mixed

from blade.report import KernelTime, Report

VOID = {"meta", "link", "img", "br", "hr", "input"}
# Page and script time, not wall time: a loaded machine takes longer and draws the same.
BUDGET_MS = 20000


class Page(HTMLParser):
    """Checks nesting, keeps every attribute, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)
        self.close()
        assert self.open == [], "these are never closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag in self.raw:
            self.raw[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.raw:
            self.raw[self.open[-1]][-1] += data


REPORTS = {"empty": Report(), "mixed": mixed(), "hostile": hostile()}


@pytest.mark.parametrize("name", REPORTS)
def test_the_page_is_well_formed_and_carries_the_report(name: str) -> None:
    page = Page(REPORTS[name].to_html())
    assert [tag for tag, _ in page.tags].count("script") == 2
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    data, script = page.raw["script"]
    assert Report.from_json(data) == REPORTS[name]
    assert set(re.findall(r"\$\('([\w-]+)'\)", script)) <= set(ids)


@pytest.mark.parametrize("name", REPORTS)
def test_the_page_needs_nothing_else(name: str) -> None:
    page = Page(REPORTS[name].to_html())
    for tag, attributes in page.tags:
        assert not {"src", "href", "srcset", "action", "style"} & set(attributes), tag
        assert not any(key.startswith("on") for key in attributes), tag
    [style] = page.raw["style"]
    script = page.raw["script"][1]
    assert not re.search(r"url\(|@import|@font-face", style)
    assert not re.search(r"\b(fetch|XMLHttpRequest|import|eval|Function|WebSocket)\s*\(", script)
    assert set(re.findall(r"https?://[^'\"\s]+", script)) == {"http://www.w3.org/2000/svg"}


def test_texts_never_become_markup() -> None:
    """Neither in the file, nor by the script that reads it."""
    page = Page(hostile().to_html())
    data, script = page.raw["script"]
    assert not set("<>&") & set(data)
    assert (
        "innerHTML" not in script
        and "insertAdjacent" not in script
        and "document.write" not in script
    )
    assert json.loads(data)["cpu"] == HOSTILE[0]


def test_the_model_and_the_result_are_told_without_a_script() -> None:
    """In the title and in the first section; names are text there, too."""
    report = replace(mixed(), model=HOSTILE[0], date="2026-01-02 03:04 UTC")
    text = report.to_html()
    name = html.escape(HOSTILE[0])
    assert f"<title>{name} · blade report · 2026-01-02 03:04 UTC</title>" in text
    assert f"<h1>{name} <span>" in text
    assert f"<p>{name} runs 2.25x as fast as TorchScript" in text
    assert HOSTILE[0] not in text
    assert "<title>blade report</title>" in Report().to_html()


def test_only_its_own_script_and_style_are_allowed() -> None:
    page = Page(mixed().to_html())
    [policy] = [a["content"] for _, a in page.tags if a.get("http-equiv")]
    assert policy is not None and policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for kind, text in (("script", page.raw["script"][1]), ("style", page.raw["style"][0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def drawn(folder: Path, report: Report, fragment: str = "") -> str:
    """The document after its script has run in a headless browser, without script, data and style."""
    browser = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    )
    path = folder / "page.html"
    path.write_text(report.to_html(), encoding="utf-8")
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder}/profile",
    ]
    done = subprocess.run(
        [browser, *options, f"--virtual-time-budget={BUDGET_MS}", "--enable-logging=stderr"]
        + ["--dump-dom", f"{path.as_uri()}{fragment}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert [line for line in done.stderr.splitlines() if ":CONSOLE" in line] == []
    return re.sub(r"<(script|style)\b.*?</\1>", "", done.stdout, flags=re.DOTALL)


@pytest.mark.needs("chromium")
def test_a_browser_draws_every_part(tmp_path: Path) -> None:
    report = mixed()
    kernels = (
        KernelTime("gemm_f32", 3, (1.0, 2.0)),
        KernelTime("loop_1", 1, (0.5, 1.0), "add, erf"),
    )
    first, *others = report.clusters
    report = replace(report, clusters=(replace(first, kernels=kernels), *others))
    text = drawn(tmp_path, report)
    assert 'data-ready="' in text
    for cluster in report.clusters:
        assert cluster.name in text
    for words in (
        "ONNX Runtime",
        "TensorRT",
        "acme + DISC",
        "2.25×",
        "whole model",
        "disc has no rule for",
        "6 slower",
        "3 × gemm_f32",
        "loop_1: add, erf",
        "3 samples: ids 1×16; ids 1×128; ids 8×256",
    ):
        assert words in text, words
    assert text.count('class="bar') >= 12
    assert len(re.findall(r"<circle", text)) >= 6
    assert "undefined" not in text and "NaN" not in text and "[object" not in text


@pytest.mark.needs("chromium")
def test_a_browser_draws_thousands_of_ops(tmp_path: Path) -> None:
    text = drawn(tmp_path, mixed(ops=5000, clusters=40, seed=1), "#ops&theme=dark")
    assert 'data-ready="' in text and 'data-theme="dark"' in text
    assert "Show all" in text  # the bars and the reasons keep to what can be read


@pytest.mark.needs("chromium")
@pytest.mark.parametrize("name", ["empty", "hostile", "old"])
def test_a_browser_draws_what_is_odd(name: str, tmp_path: Path) -> None:
    """Nothing at all, markup for names, and a report of before there were nodes and compositions."""
    old = replace(mixed(), nodes=(), inputs=(), compositions=())
    text = drawn(tmp_path, {**REPORTS, "old": old}[name], "#ops")
    assert 'data-ready="' in text
    assert "data-hacked" not in text.partition("<body")[0]
    if name == "empty":
        assert "nothing was measured" in text
