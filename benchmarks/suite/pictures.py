# SPDX-License-Identifier: Apache-2.0
"""Image models: of transformers, torchvision and timm, and some written out here."""

import importlib
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from zoo.model import Axis, Model

from suite.entry import BATCH, Answers, Both, Entry, Size, at, made, noise
from suite.libraries import torchvision_models
from suite.text import HEADS, INNER, LAYERS, WIDTH, transformer

SHAPES = Both(((1,), (3,)), ((1,), (32,)))
VIT = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
}
SIDE = Both(112, 224)
PIXELS = ("pixel_values",)


def _images(
    module: nn.Module, size: Size, side: int, sample: bool = False, strong: bool = False
) -> Model:
    return made(module, noise(3, side, side), at(size, SHAPES), (BATCH,), PIXELS, sample, strong)


def _transformers(
    size: Size, name: str, kind: str, fields: dict[str, Any], side: Any, outputs: Sequence[str]
) -> Model:
    side = at(size, side)
    model = transformer(name, kind, size, fields)
    module = Answers(model, PIXELS, outputs)
    return _images(module, size, side, sample=True, strong=kind == "ForDepthEstimation")


def _hf(
    own: str,
    name: str,
    fields: dict[str, Any],
    kind: str = "ForImageClassification",
    side: Any = SIDE,
    outputs: Sequence[str] = ("logits",),
    rank: int = 1,
) -> Entry:
    build = partial(_transformers, name=name, kind=kind, fields=fields, side=side, outputs=outputs)
    return Entry(own, "vision", build, ("transformers",), rank)


def _torchvision(size: Size, name: Any, side: Any, fields: dict[str, Any], outputs: Any) -> Model:
    torch.manual_seed(0)
    make = operator.attrgetter(at(size, name))(torchvision_models())
    model = make(weights=None, **fields)
    return _images(Answers(model, (), outputs), size, at(size, side), sample=True)


def _tv(own: str, name: Any = None, side: Any = SIDE, rank: int = 1, **fields: Any) -> Entry:
    build = partial(_torchvision, name=name or own, side=side, fields=fields, outputs=())
    return Entry(own, "vision", build, ("torchvision",), rank)


def _timm_model(size: Size, name: Any, side: Any, fields: dict[str, Any]) -> Model:
    torchvision_models()  # which timm imports
    timm = importlib.import_module("timm")
    torch.manual_seed(0)
    model = timm.create_model(at(size, name), pretrained=False, **at(size, fields))
    return _images(Answers(model), size, at(size, side), sample=True)


def _timm(own: str, name: Any = None, side: Any = SIDE, rank: int = 1, **fields: Any) -> Entry:
    build = partial(_timm_model, name=name or own, side=side, fields=fields)
    return Entry(own, "vision", build, ("timm", "torchvision"), rank)


def _sized(own: str, name: Any = None, rank: int = 1, **fields: Any) -> Entry:
    """A model of timm that is told the side of its images."""
    return _timm(own, name, rank=rank, img_size=SIDE, **fields)


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + 0.1 * self.body(x)
        return y


class Edsr(nn.Module):
    """Super-resolution by residual blocks and a pixel shuffle (Lim et al. 2017), twice the side."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(*(ResidualBlock(width) for _ in range(blocks)))
        self.tail = nn.Sequential(
            nn.Conv2d(width, 4 * width, 3, padding=1),
            nn.PixelShuffle(2),
            nn.Conv2d(width, 3, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.head(x)
        return (self.tail(x + self.body(x)),)


def _double(inside: int, out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inside, out):
        layers += [nn.Conv2d(width, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers)


class MedicalUnet(nn.Module):
    """Segmentation (Ronneberger et al. 2015): down, up by transposed convolutions, and across."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width * 2**k for k in range(levels)]
        self.down = nn.ModuleList(map(_double, [3, *widths[:-1]], widths))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(w, w // 2, 2, stride=2) for w in reversed(widths[1:])
        )
        self.across = nn.ModuleList(_double(w, w // 2) for w in reversed(widths[1:]))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = []
        for k, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if k else x)
            kept.append(x)
        kept.pop()
        for up, across in zip(self.up, self.across):
            x = across(torch.cat([kept.pop(), up(x)], 1))
        return (self.head(x),)


class Darknet(nn.Module):
    """A one-stage detector in the manner of YOLOv3: Darknet blocks, two scales, boxes decoded."""

    def __init__(self, width: int, blocks: int, classes: int = 20) -> None:
        super().__init__()
        self.stem = self._conv(3, width, 3, 1)
        stages: list[nn.Module] = []
        for k in range(4):
            inside = width * 2**k
            stages.append(self._conv(inside, 2 * inside, 3, 2))
            stages += [self._bottleneck(2 * inside) for _ in range(blocks)]
        self.low = nn.Sequential(*stages[: -1 - blocks])
        self.high = nn.Sequential(*stages[-1 - blocks :])
        top = 16 * width
        self.far = nn.Conv2d(top, 3 * (5 + classes), 1)
        self.lateral = self._conv(top, top // 2, 1, 1)
        self.near = nn.Conv2d(top, 3 * (5 + classes), 1)
        self.each = 5 + classes

    @staticmethod
    def _conv(inside: int, out: int, kernel: int, stride: int) -> nn.Sequential:
        conv = nn.Conv2d(inside, out, kernel, stride, kernel // 2, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(out), nn.LeakyReLU(0.1))

    def _bottleneck(self, width: int) -> nn.Module:
        inner = nn.Sequential(
            self._conv(width, width // 2, 1, 1), self._conv(width // 2, width, 3, 1)
        )
        return Added(inner)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low = self.low(self.stem(x))
        high = self.high(low)
        raised = functional.interpolate(self.lateral(high), scale_factor=2.0, mode="nearest")
        near = self.near(torch.cat([raised, low], 1))
        return (torch.cat([self._boxes(self.far(high)), self._boxes(near)], 1),)

    def _boxes(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, cells x 3, 5 + classes): the middle in cells, sides as factors, scores."""
        batch, _, height, width = x.shape
        x = x.view(batch, 3, self.each, height, width).permute(0, 3, 4, 1, 2)
        rows = torch.arange(height, device=x.device, dtype=x.dtype).view(1, -1, 1, 1, 1)
        columns = torch.arange(width, device=x.device, dtype=x.dtype).view(1, 1, -1, 1, 1)
        middle = torch.sigmoid(x[..., :2])
        x_, y_ = middle[..., :1] + columns, middle[..., 1:] + rows
        parts = [x_, y_, torch.exp(x[..., 2:4].clamp(max=4)), torch.sigmoid(x[..., 4:])]
        return torch.cat(parts, -1).flatten(1, 3)


class Added(nn.Module):
    """Its input and what a module makes of it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.body(x)
        return y


def _own(own: str, make: Callable[..., nn.Module], side: Any, *fields: Any, rank: int = 1) -> Entry:
    def build(size: Size) -> Model:
        torch.manual_seed(0)
        module = make(*(at(size, one) for one in fields))
        return _images(module, size, at(size, side), sample=True)

    return Entry(own, "vision", build, (), rank)


def _scaled(own: str, make: Callable[..., nn.Module], side: Any, *fields: Any) -> Entry:
    """Images of two sizes."""

    def build(size: Size) -> Model:
        torch.manual_seed(0)
        module = make(*(at(size, one) for one in fields))
        s = at(size, side)
        axes = (BATCH, Axis("height", 32, 128, 16), Axis("width", 32, 128, 16))
        shapes = ((1, s, s), (2, s + 16, s)) if size == "small" else ((1, s, s), (16, s, s))
        return made(module, _planes, shapes, axes, PIXELS, sample=True)

    return Entry(own, "vision", build)


def _planes(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, ...]:
    batch, height, width = shape
    return noise(3, height, width)((batch,), seed)


SEGFORMER = {
    "depths": Both([1, 1, 1, 1], [3, 4, 6, 3]),
    "hidden_sizes": Both([32, 64, 96, 128], [64, 128, 320, 512]),
    "decoder_hidden_size": Both(64, 256),
}
CONVNEXT = {
    "depths": Both([1, 1, 2, 1], [3, 3, 9, 3]),
    "hidden_sizes": Both([48, 96, 192, 384], [96, 192, 384, 768]),
}

ENTRIES: tuple[Entry, ...] = (
    _hf("vit", "ViT", {**VIT, "image_size": SIDE}, rank=0),
    _hf("deit", "DeiT", {**VIT, "image_size": SIDE}),
    _hf("beit", "Beit", {**VIT, "image_size": SIDE, "use_relative_position_bias": True}, rank=0),
    _hf("dinov2", "Dinov2", {**VIT, "image_size": SIDE, "patch_size": 14}),
    _hf("convnext", "ConvNext", CONVNEXT, rank=0),
    _hf("convnext_v2", "ConvNextV2", CONVNEXT),
    _hf("poolformer", "PoolFormer", {"depths": Both([1, 1, 2, 1], [2, 2, 6, 2])}),
    _hf("pvt_v2", "PvtV2", {"depths": Both([1, 1, 1, 1], [2, 2, 2, 2])}),
    _hf("segformer", "Segformer", SEGFORMER, "ForSemanticSegmentation", rank=0),
    _hf("mobilevit", "MobileViT", {"image_size": Both(128, 256)}, side=Both(128, 256)),
    _hf(
        "clip_vision",
        "CLIPVision",
        {**VIT, "image_size": SIDE, "patch_size": 16},
        "Model",
        outputs=("last_hidden_state", "pooler_output"),
    ),
    _hf(
        "siglip_vision",
        "SiglipVision",
        {**VIT, "image_size": SIDE, "patch_size": 16},
        "Model",
        outputs=("last_hidden_state", "pooler_output"),
    ),
    _hf(
        "yolos",
        "Yolos",
        {**VIT, "image_size": Both([112, 112], [224, 224]), "num_detection_tokens": 20},
        "ForObjectDetection",
        outputs=("logits", "pred_boxes"),
    ),
    _hf(
        "dpt",
        "DPT",
        {
            **VIT,
            "image_size": Both(96, 224),
            "num_hidden_layers": Both(4, 12),
            "backbone_out_indices": Both([0, 1, 2, 3], [2, 5, 8, 11]),
            "neck_hidden_sizes": Both([16, 32, 48, 64], [96, 192, 384, 768]),
            "fusion_hidden_size": Both(32, 256),
        },
        "ForDepthEstimation",
        Both(96, 224),
        ("predicted_depth",),
    ),
    _hf(
        "swin",
        "Swin",
        {
            "image_size": SIDE,
            "window_size": 7,
            "embed_dim": Both(48, 96),
            "depths": Both([2, 2], [2, 2, 6, 2]),
            "num_heads": Both([2, 4], [3, 6, 12, 24]),
        },
        rank=0,
    ),
    _tv("resnet50", Both("resnet18", "resnet50"), rank=0),
    _tv("resnext50", Both("resnext50_32x4d", "resnext50_32x4d"), side=Both(64, 224)),
    _tv("mobilenet_v2", rank=0),
    _tv("mobilenet_v3_large", rank=0),
    _tv("efficientnet_b0", side=Both(96, 224), rank=0),
    _tv("densenet121", side=Both(64, 224), rank=0),
    _tv("squeezenet1_1"),
    _tv("shufflenet_v2", Both("shufflenet_v2_x0_5", "shufflenet_v2_x1_0")),
    _tv("mnasnet", Both("mnasnet0_5", "mnasnet1_0")),
    _tv("vgg11", Both("vgg11", "vgg16_bn"), side=Both(64, 224)),
    _tv("alexnet", side=Both(128, 224)),
    _tv("googlenet", side=Both(96, 224), init_weights=False, aux_logits=False),
    _tv("regnet", Both("regnet_y_400mf", "regnet_y_3_2gf")),
    _tv("swin_v2", Both("swin_v2_t", "swin_v2_t"), side=Both(64, 256), rank=0),
    _tv(
        "lraspp",
        "segmentation.lraspp_mobilenet_v3_large",
        side=Both(96, 224),
        weights_backbone=None,
    ),
    _sized("mixer", Both("mixer_s32_224", "mixer_b16_224")),
    _sized("resmlp", "resmlp_12_224"),
    _sized("gmlp", Both("gmlp_ti16_224", "gmlp_s16_224")),
    _sized("cait", Both("cait_xxs24_224", "cait_s24_224"), depth=Both(2, 24)),
    _sized("xcit", "xcit_nano_12_p16_224", depth=Both(2, 12)),
    _timm("ghostnet", "ghostnet_100"),
    _timm("hrnet", "hrnet_w18_small", side=Both(64, 224)),
    _timm("repvgg", "repvgg_a0"),
    _timm("res2net", "res2net50_26w_4s", side=Both(64, 224)),
    _timm("nfnet", Both("nf_regnet_b0", "dm_nfnet_f0"), side=Both(96, 192)),
    _timm("tinynet", "tinynet_c"),
    _timm("dla", Both("dla34", "dla102"), side=Both(64, 224)),
    _timm("cspdarknet", Both("cspresnet50", "cspdarknet53"), side=Both(64, 224)),
    _timm("convmixer", "convmixer_768_32", side=Both(56, 224)),
    _timm("levit", Both("levit_128s", "levit_256"), side=224),
    _timm("visformer", Both("visformer_tiny", "visformer_small"), side=224),
    _own("darknet_detector", Darknet, Both(96, 416), Both(8, 32), Both(1, 2), rank=0),
    _scaled("edsr", Edsr, Both(48, 128), Both(32, 64), Both(4, 16)),
    _scaled("medical_unet", MedicalUnet, Both(64, 256), Both(16, 64), Both(4, 5)),
)
