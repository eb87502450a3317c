# SPDX-License-Identifier: Apache-2.0
"""The models, by name: each with the sample it is captured at and ten calls of other sizes and contents.

    case = MODELS["swin_v2"]()
    case.model(*case.sample), [case.model(*call) for call in case.calls]

Weights are random, widths small: what counts is the code. Sizes are those of small inputs. ``VISION[name](scale)``
has images ``scale`` times as high and wide.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Call = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """``names``: keywords of a call's entries; empty for positional arguments."""

    model: nn.Module
    sample: Call
    calls: Sequence[Call]
    names: tuple[str, ...] = ()

    def inputs(self, call: Call) -> Any:
        """``call`` as ``blade.optimize`` takes a sample."""
        return dict(zip(self.names, call)) if self.names else call

    def to(self, device: torch.device, dtype: torch.dtype) -> "Case":
        """The same on ``device``, floats in ``dtype``."""

        def moved(call: Call) -> Call:
            return tuple(x.to(device, dtype if x.is_floating_point() else None) for x in call)

        model = self.model.to(device, dtype)
        return Case(model, moved(self.sample), [moved(call) for call in self.calls], self.names)


class First(nn.Module):
    """A transformers model, called by keywords, that returns the first of its outputs."""

    def __init__(self, model: nn.Module, names: Sequence[str], output: str | None = None) -> None:
        super().__init__()
        self.model, self.names, self.output = model, tuple(names), output

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        found = self.model(**dict(zip(self.names, args)), return_dict=True)
        return found[self.output] if self.output else found[0]


def _draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _images(sizes: Sequence[tuple[int, ...]], scale: int = 1) -> list[Call]:
    return [
        (torch.randn(b, 3, scale * h, scale * w, generator=_draw(k)),)
        for k, (b, h, w) in enumerate(sizes)
    ]


SQUARES = [(1, 64, 64), (2, 96, 96), (1, 128, 96), (3, 64, 96), (1, 160, 160), (2, 128, 64)]
SQUARES += [(1, 96, 160), (4, 64, 64), (1, 192, 128), (2, 160, 96)]


def _pictures(model: nn.Module, scale: int) -> Case:
    return Case(model, _images([(2, 128, 128)], scale)[0], _images(SQUARES, scale))


def _vision(name: str, scale: int) -> Case:
    models = importlib.import_module("torchvision.models")
    return _pictures(getattr(models, name)(weights=None).eval(), scale)


def swin_v2(scale: int = 1) -> Case:
    return _vision("swin_v2_t", scale)


def maxvit(scale: int = 1) -> Case:
    models = importlib.import_module("torchvision.models.maxvit")
    fields = {
        "stem_channels": 32,
        "block_channels": [32, 64],
        "block_layers": [1, 1],
        "head_dim": 16,
    }
    side = 64 * scale
    model = models.MaxVit(
        (side, side), partition_size=4, stochastic_depth_prob=0.0, **fields
    ).eval()
    batches = [(b, 64, 64) for b in range(1, 11)]
    return Case(model, _images([(2, 64, 64)], scale)[0], _images(batches, scale))


def efficientnet_v2(scale: int = 1) -> Case:
    return _vision("efficientnet_v2_s", scale)


class Detector(nn.Module):
    """One image in; boxes, labels and scores out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found = self.model([image])
        if torch.jit.is_scripting():
            one = found[1][0]  # scripted, a detector returns its losses, too
        else:
            one = found[0]
        return one["boxes"], one["labels"], one["scores"]


def _detector(name: str, scale: int = 1, **more: Any) -> Case:
    models = importlib.import_module("torchvision.models.detection")
    torch.manual_seed(0)
    model = getattr(models, name)(weights=None, weights_backbone=None, **more).eval()
    sizes = [(96, 96), (96, 128), (128, 96), (64, 96), (160, 128), (128, 160), (80, 80), (112, 96)]
    calls = [
        (torch.rand(3, scale * h, scale * w, generator=_draw(k)),)
        for k, (h, w) in enumerate([*sizes, (96, 80), (72, 104)])
    ]
    sample = torch.rand(3, scale * 128, scale * 128, generator=_draw(99))
    return Case(Detector(model).eval(), (sample,), calls)


def ssdlite(scale: int = 1) -> Case:
    return _detector("ssdlite320_mobilenet_v3_large", scale, num_classes=5)


def faster_rcnn() -> Case:
    return _detector("fasterrcnn_mobilenet_v3_large_320_fpn", num_classes=5)


def mask_rcnn() -> Case:
    return _detector("maskrcnn_resnet50_fpn", num_classes=5, min_size=96, max_size=160)


SHAPES = [(1, 9), (3, 16), (2, 31), (1, 40), (4, 12), (2, 7), (1, 64), (5, 10), (2, 48), (1, 23)]


def _tokens(shape: tuple[int, int], seed: int, vocabulary: int = 100) -> Call:
    ids = torch.randint(3, vocabulary, shape, generator=_draw(seed))
    mask = torch.ones(shape, dtype=torch.long)
    mask[:, shape[1] - shape[1] // 4 :] = 0
    return ids, mask


def _text(model: nn.Module, names: Sequence[str] = ("input_ids", "attention_mask")) -> Case:
    count = len(names)
    return Case(
        First(model, names).eval(),
        _tokens((2, 20), 99)[:count],
        [_tokens(shape, k)[:count] for k, shape in enumerate(SHAPES)],
    )


def _transformers(config: str, model: str, **fields: Any) -> nn.Module:
    library = importlib.import_module("transformers")
    torch.manual_seed(0)
    built: nn.Module = getattr(library, model)(getattr(library, config)(**fields))
    return built.eval()


SMALL = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "intermediate_size": 128}


def mamba() -> Case:
    return _text(
        _transformers("MambaConfig", "MambaModel", **SMALL, use_cache=False), ["input_ids"]
    )


def rwkv() -> Case:
    return _text(_transformers("RwkvConfig", "RwkvModel", **SMALL, use_cache=False), ["input_ids"])


def longformer() -> Case:
    model = _transformers(
        "LongformerConfig", "LongformerModel", **SMALL, **HEADS, attention_window=[8, 8]
    )
    return _text(model)


def big_bird() -> Case:
    fields = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}
    return _text(_transformers("BigBirdConfig", "BigBirdModel", **SMALL, **HEADS, **fields))


def led() -> Case:
    fields = {"d_model": 64, "vocab_size": 100, "encoder_layers": 1, "decoder_layers": 1}
    fields |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128}
    fields |= {"decoder_ffn_dim": 128, "attention_window": 8, "use_cache": False}
    return _text(_transformers("LEDConfig", "LEDModel", **fields))


def perceiver() -> Case:
    fields = {"num_latents": 16, "d_latents": 64, "d_model": 64, "num_blocks": 1, "vocab_size": 100}
    fields |= {
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
    }
    model = _transformers(
        "PerceiverConfig", "PerceiverForMaskedLM", **fields, max_position_embeddings=64
    )
    calls = [_tokens((b, 64), b) for b in range(1, 11)]
    return Case(First(model, ("inputs", "attention_mask")).eval(), _tokens((2, 64), 99), calls)


def timesfm_patchtst() -> Case:
    fields = {
        "context_length": 64,
        "patch_length": 8,
        "patch_stride": 8,
        "num_input_channels": 3,
        "d_model": 64,
    }
    fields |= {
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "ffn_dim": 128,
        "prediction_length": 16,
    }
    model = _transformers("PatchTSTConfig", "PatchTSTForPrediction", **fields)
    calls = [(torch.randn(b, 64, 3, generator=_draw(b)),) for b in range(1, 11)]
    return Case(
        First(model, ("past_values",), "prediction_outputs").eval(), (torch.randn(3, 64, 3),), calls
    )


def encodec() -> Case:
    fields = {
        "num_filters": 8,
        "hidden_size": 32,
        "codebook_size": 64,
        "codebook_dim": 32,
        "num_lstm_layers": 1,
    }
    model = _transformers("EncodecConfig", "EncodecModel", **fields, upsampling_ratios=[4, 2])
    calls = [
        (torch.randn(1 + k % 3, 1, n, generator=_draw(k)),)
        for k, n in enumerate([320, 333, 480, 640, 400, 801, 560, 960, 720, 512])
    ]
    return Case(
        First(model, ("input_values",), "audio_values").eval(), (torch.randn(2, 1, 640),), calls
    )


def rt_detr(scale: int = 1) -> Case:
    library = importlib.import_module("transformers")
    backbone = library.RTDetrResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 64, 64],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    fields = {
        "backbone_config": backbone,
        "encoder_hidden_dim": 32,
        "encoder_in_channels": [32, 64, 64],
    }
    fields |= {"feat_strides": [8, 16, 32], "encoder_ffn_dim": 64, "d_model": 32, "num_queries": 20}
    fields |= {
        "decoder_in_channels": [32, 32, 32],
        "decoder_ffn_dim": 64,
        "decoder_layers": 2,
        "num_labels": 5,
    }
    fields |= {
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "anchor_image_size": None,
    }
    model = _transformers("RTDetrConfig", "RTDetrForObjectDetection", **fields)
    return _pictures(First(model, ("pixel_values",), "logits").eval(), scale)


def _resnet(library: Any, stages: Sequence[str]) -> Any:
    """The configuration of ResNet-18."""
    fields = {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"}
    return library.ResNetConfig(**fields, out_features=list(stages))


DETR = {"encoder_layers": 6, "decoder_layers": 6, "d_model": 256, "num_queries": 100}


def _detr(kind: str, stages: Sequence[str], scale: int, **fields: Any) -> Case:
    library = importlib.import_module("transformers")
    fields |= {"backbone_config": _resnet(library, stages), "use_timm_backbone": False}
    model = _transformers(f"{kind}Config", f"{kind}ForObjectDetection", **DETR, **fields)
    return _pictures(First(model, ("pixel_values",), "logits").eval(), scale)


def table_transformer(scale: int = 1) -> Case:
    return _detr("TableTransformer", ["stage4"], scale, use_pretrained_backbone=False)


def deformable_detr(scale: int = 1) -> Case:
    stages = ["stage2", "stage3", "stage4"]
    return _detr("DeformableDetr", stages, scale, use_pretrained_backbone=False)


def dinov2(scale: int = 1) -> Case:
    """DINOv2-small, whose position embeddings are resized to the image's size; sides are multiples of 14."""
    fields = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6}
    model = _transformers("Dinov2Config", "Dinov2Model", **fields, image_size=518)
    sizes = [(b, h // 32 * 14, w // 32 * 14) for b, h, w in SQUARES]
    return Case(
        First(model, ("pixel_values",)).eval(),
        _images([(2, 56, 56)], 2 * scale)[0],
        _images(sizes, 2 * scale),
    )


class Din(nn.Module):
    """Deep interest network: attention of a candidate over a history, with Dice activations."""

    def __init__(self, items: int = 500, width: int = 32) -> None:
        super().__init__()
        self.items = nn.Embedding(items, width)
        self.weigh = nn.Sequential(nn.Linear(4 * width, 64), nn.PReLU(), nn.Linear(64, 1))
        self.first, self.norm = nn.Linear(2 * width, 128), nn.BatchNorm1d(128, affine=False)
        self.alpha, self.last = nn.Parameter(torch.full((128,), 0.1)), nn.Linear(128, 1)

    def forward(self, history: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
        past, now = self.items(history), self.items(candidate).unsqueeze(1)
        now_each = now.expand(-1, past.shape[1], -1)
        score = self.weigh(torch.cat([now_each, past, now_each - past, now_each * past], -1))
        score = score.masked_fill((history == 0).unsqueeze(-1), 0.0)
        x = self.first(torch.cat([(score * past).sum(1), now.squeeze(1)], -1))
        gate = torch.sigmoid(self.norm(x))
        return torch.sigmoid(self.last(gate * x + (1 - gate) * self.alpha * x))


def din() -> Case:
    torch.manual_seed(0)

    def call(batch: int, length: int, seed: int) -> Call:
        history = torch.randint(0, 500, (batch, length), generator=_draw(seed))
        return history, torch.randint(1, 500, (batch,), generator=_draw(seed + 50))

    return Case(Din().eval(), call(8, 20, 99), [call(b * 3, n, b) for b, n in SHAPES])


class Sessions(nn.Module):
    """A session-based recommender: a GRU over items, read at each session's last one, sorted by length."""

    def __init__(self, items: int = 500, width: int = 64) -> None:
        super().__init__()
        self.items = nn.Embedding(items, width, padding_idx=0)
        self.gru, self.attend = nn.GRU(width, width, batch_first=True), nn.Linear(width, width)

    def forward(self, sessions: torch.Tensor) -> torch.Tensor:
        lengths = (sessions != 0).sum(1)
        longest = int(lengths.max())
        states, _ = self.gru(self.items(sessions[:, :longest]))
        last = states[torch.arange(len(sessions)), lengths - 1]
        mask = torch.arange(longest) >= lengths[:, None]
        weights = (
            (states @ self.attend(last).unsqueeze(-1)).squeeze(-1).masked_fill(mask, float("-inf"))
        )
        read = (weights.softmax(1).unsqueeze(1) @ states).squeeze(1) + last
        return read @ self.items.weight.T


def sessions() -> Case:
    torch.manual_seed(0)

    def call(batch: int, length: int, seed: int) -> Call:
        ids = torch.randint(1, 500, (batch, length), generator=_draw(seed))
        lengths = torch.randint(1, length + 1, (batch, 1), generator=_draw(seed + 50))
        return (ids * (torch.arange(length) < lengths),)

    return Case(Sessions().eval(), call(4, 20, 99), [call(b * 2, n, b) for b, n in SHAPES])


def vits() -> Case:
    fields = {
        "vocab_size": 40,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "ffn_dim": 64,
    }
    fields |= {
        "flow_size": 32,
        "spectrogram_bins": 33,
        "upsample_initial_channel": 32,
        "upsample_rates": [4, 4],
    }
    fields |= {"upsample_kernel_sizes": [8, 8], "resblock_kernel_sizes": [3], "noise_scale": 0.0}
    fields |= {
        "resblock_dilation_sizes": [[1, 3]],
        "prior_encoder_num_flows": 2,
        "noise_scale_duration": 0.0,
    }
    model = _transformers(
        "VitsConfig", "VitsModel", **fields, use_stochastic_duration_prediction=False
    )
    names = ("input_ids",)
    calls = [_tokens((1, n), n, 40)[:1] for n in (9, 16, 31, 40, 12, 7, 64, 10, 48, 23)]
    return Case(First(model, names, "waveform").eval(), _tokens((1, 20), 99, 40)[:1], calls)


class TimesBlock(nn.Module):
    """TimesNet's block: periods from a Fourier transform, folded into images."""

    def __init__(self, width: int = 32, k: int = 2) -> None:
        super().__init__()
        self.conv, self.k = nn.Conv2d(width, width, 3, padding=1), k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        spectrum = torch.fft.rfft(x, dim=1).abs()
        power = spectrum.mean(0).mean(-1)
        power[0] = 0
        _, top = torch.topk(power, self.k)
        outs = []
        for frequency in top.tolist():
            period = length // max(frequency, 1)
            padded = (length + period - 1) // period * period
            y = torch.cat([x, x.new_zeros(batch, padded - length, width)], 1)
            y = y.reshape(batch, padded // period, period, width).permute(0, 3, 1, 2)
            outs.append(
                torch.relu(self.conv(y)).permute(0, 2, 3, 1).reshape(batch, -1, width)[:, :length]
            )
        weights = spectrum.mean(-1)[:, top].softmax(1)
        return (torch.stack(outs, -1) * weights[:, None, None, :]).sum(-1) + x


def times_net() -> Case:
    torch.manual_seed(0)
    calls = [(torch.randn(b, 2 * n + 10, 32, generator=_draw(b)),) for b, n in SHAPES]
    return Case(TimesBlock().eval(), (torch.randn(2, 48, 32, generator=_draw(99)),), calls)


MODELS: dict[str, Callable[[], Case]] = {
    one.__name__: one
    for one in (
        *(swin_v2, maxvit, efficientnet_v2, ssdlite, faster_rcnn, mask_rcnn, rt_detr),
        *(table_transformer, deformable_detr, dinov2),
        *(mamba, rwkv, longformer, big_bird, led, perceiver, timesfm_patchtst, encodec, vits),
        *(din, sessions, times_net),
    )
}

VISION: dict[str, Callable[[int], Case]] = {
    one.__name__: one
    for one in (
        *(swin_v2, maxvit, efficientnet_v2, ssdlite, rt_detr),
        *(table_transformer, deformable_detr, dinov2),
    )
}
