# SPDX-License-Identifier: Apache-2.0
"""What int8 costs in accuracy, on something real: sentence embeddings; and the SNR of other models' outputs.

    python benchmarks/quality.py                              # all-MiniLM-L6-v2 over sentences.txt
    python benchmarks/quality.py --models minilm,resnet50,gpt2_prefill --type static --budget 0.05

For MiniLM: the mean cosine between a sentence's embeddings in fp32 and in int8, and Spearman's rank
correlation of the similarities of all pairs of sentences. A quarter of the sentences calibrates. The other
models have random weights and inputs; their SNR is taken at inputs that calibration has not seen.
"""

import argparse
import time
from collections.abc import Sequence

import torch
from embeddings import CALIBRATES, agreement, folder, pooled, sentences, tokenized
from models import MODELS
from rich.console import Console
from rich.table import Table
from torch import nn

import blade
from blade.config.accuracy import output_error, worst


class Embedder(nn.Module):
    """One unit vector per sentence."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoModel

        self.encoder = AutoModel.from_pretrained(folder(), local_files_only=True)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return pooled(self.encoder(input_ids, attention_mask).last_hidden_state, attention_mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="minilm", help="of models.py, separated by commas")
    parser.add_argument("--type", default="auto", help="Config.quantization_type")
    parser.add_argument("--budget", type=float, default=None, help="Config.accuracy_budget")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--untimed", action="store_true", help="quantize whatever the budget lets")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    fields = {"quantization_type": args.type, "timing": not args.untimed}
    fields |= {} if args.budget is None else {"accuracy_budget": args.budget}
    fields |= {"optimization_pipeline": "quant"} if args.untimed else {}
    config = blade.Config(enable_int8=True, time_budget=None, **fields)
    table = Table(title=f"int8 ({args.type}) against fp32, {args.threads} threads")
    for name in ("model", "layers", "quantized", "relative error", "SNR, dB", "cosine", "Spearman"):
        table.add_column(name)
    with torch.no_grad():
        for name in args.models.split(","):
            table.add_row(name, *(minilm(config) if name == "minilm" else other(name, config)))
    Console(width=120).print(table)


def minilm(config: blade.Config) -> list[str]:
    """The cells of its row."""
    model = Embedder().eval()
    batches = tokenized(sentences())
    start = time.perf_counter()
    optimized = blade.optimize(model, tokenized(sentences()[::CALIBRATES]), config)
    print(f"minilm: optimized in {time.perf_counter() - start:.1f} s")
    exact = torch.cat([model(**batch) for batch in batches])
    lossy = torch.cat([optimized(**batch) for batch in batches])
    found = agreement(lossy, exact)
    print(f"cosine: mean {found['cosine']:.5f}, least {found['least_cosine']:.5f}")
    cells = [f"{found['cosine']:.4f}", f"{found['spearman']:.4f}"]
    return [*layers(optimized), *error_cells([lossy], [exact]), *cells]


def other(name: str, config: blade.Config) -> list[str]:
    """Calibrated at six inputs, judged at three others."""
    model = MODELS[name]()
    shape = model.fixed[0]
    optimized = blade.optimize(
        model.module, [model.inputs(shape, seed) for seed in range(6)], config
    )
    pairs = [(optimized(*x), model.module(*x)) for x in (model.inputs(shape, s) for s in (7, 8, 9))]
    got, want = (
        [t for outputs in side for t in _flat(outputs)] for side in zip(*pairs, strict=True)
    )
    error = worst(output_error(a, b) for a, b in zip(got, want, strict=True))
    return [*layers(optimized), *error_cells(got, want), f"{error.cosine:.4f}", "-"]


def layers(optimized: torch.nn.Module) -> list[str]:
    """How many could be quantized, and how many are."""
    shown = blade.report(optimized)
    every = [p for c in shown.clusters for p in c.precision]
    for reason in shown.all_reasons():
        if reason.backend == "quant":
            print(f"{reason.subject}: {reason.detail}")
    return [str(len(every)), str(sum(p.precision != "fp32" for p in every))]


def error_cells(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> list[str]:
    error = worst(output_error(a, b) for a, b in zip(got, want, strict=True))
    return [f"{error.relative:.4f}", f"{error.snr_db:.1f}"]


def _flat(outputs: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


if __name__ == "__main__":
    main()
