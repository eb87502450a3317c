# SPDX-License-Identifier: Apache-2.0
"""Convolutional image classifiers, any batch and image size.

ResNet-50 (He et al. 2015, stride in the 3x3 convolution) and MobileNetV3-large (Howard et al. 2019) are
written out here, in the architecture that torchvision has; the others come from transformers.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from .model import Axis, Model, images, initialized

AXES = (Axis("batch", 1, 4), Axis("height", 32, 192), Axis("width", 32, 192))
FIXED = ((1, 224, 224), (4, 224, 224))


class Classifier(nn.Module):
    """A transformers image model's logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.model(pixel_values=pixel_values).logits,)


class Sequence(nn.Sequential):
    """Layers one after the other, the result in a tuple."""

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (super().forward(pixel_values),)


def _model(module: nn.Module) -> Model:
    module = initialized(module, partial(images, (8, 96, 96), 0))
    return Model(module, ("pixel_values",), AXES, FIXED, images)


def conv_norm(
    inside: int, out: int, kernel: int, stride: int = 1, groups: int = 1, act: Any = nn.ReLU
) -> nn.Sequential:
    """Convolution without bias, batch norm, activation (``None``: none)."""
    conv = nn.Conv2d(inside, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out), *([] if act is None else [act(inplace=True)]))


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv_norm(inside, width, 1),
            conv_norm(width, width, 3, stride),
            conv_norm(width, 4 * width, 1, act=None),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != 4 * width:
            self.shortcut = conv_norm(inside, 4 * width, 1, stride, act=None)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.relu(self.body(x) + self.shortcut(x))
        return y


def resnet50() -> Model:
    """26 M parameters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    inside = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for k in range(blocks):
            layers.append(Bottleneck(inside, width, 2 if k == 0 and width > 64 else 1))
            inside = 4 * width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(inside, 1000)]
    return _model(Sequence(*layers, *head))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(squeezed, channels, 1),
            nn.Hardsigmoid(inplace=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.gate(x) * x
        return y


class InvertedResidual(nn.Module):
    def __init__(
        self, inside: int, kernel: int, wide: int, out: int, squeeze: bool, act: Any, stride: int
    ) -> None:
        super().__init__()
        self.adds = stride == 1 and inside == out
        layers = [conv_norm(inside, wide, 1, act=act)] if wide != inside else []
        layers.append(conv_norm(wide, wide, kernel, stride, groups=wide, act=act))
        if squeeze:
            layers.append(SqueezeExcite(wide, (wide // 4 + 7) // 8 * 8))
        self.body = nn.Sequential(*layers, conv_norm(wide, out, 1, act=None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return y + x if self.adds else y


# kernel, width inside, channels out, squeeze-and-excite, activation, stride
MOBILENET_V3_LARGE = (
    (3, 16, 16, False, nn.ReLU, 1),
    (3, 64, 24, False, nn.ReLU, 2),
    (3, 72, 24, False, nn.ReLU, 1),
    (5, 72, 40, True, nn.ReLU, 2),
    (5, 120, 40, True, nn.ReLU, 1),
    (5, 120, 40, True, nn.ReLU, 1),
    (3, 240, 80, False, nn.Hardswish, 2),
    (3, 200, 80, False, nn.Hardswish, 1),
    (3, 184, 80, False, nn.Hardswish, 1),
    (3, 184, 80, False, nn.Hardswish, 1),
    (3, 480, 112, True, nn.Hardswish, 1),
    (3, 672, 112, True, nn.Hardswish, 1),
    (5, 672, 160, True, nn.Hardswish, 2),
    (5, 960, 160, True, nn.Hardswish, 1),
    (5, 960, 160, True, nn.Hardswish, 1),
)


def mobilenet_v3() -> Model:
    """MobileNetV3-large, 5.5 M parameters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [conv_norm(3, 16, 3, 2, act=nn.Hardswish)]
    inside = 16
    for kernel, wide, out, squeeze, act, stride in MOBILENET_V3_LARGE:
        layers.append(InvertedResidual(inside, kernel, wide, out, squeeze, act, stride))
        inside = out
    layers += [conv_norm(inside, 960, 1, act=nn.Hardswish), nn.AdaptiveAvgPool2d(1)]
    head = [nn.Flatten(1), nn.Linear(960, 1280), nn.Hardswish(inplace=True), nn.Linear(1280, 1000)]
    return _model(Sequence(*layers, *head))


def _transformers(name: str, **config: Any) -> Model:
    import transformers

    torch.manual_seed(0)
    settings = getattr(transformers, f"{name}Config")(num_labels=1000, **config)
    return _model(Classifier(getattr(transformers, f"{name}ForImageClassification")(settings)))


def mobilenet_v2() -> Model:
    """MobileNetV2 1.0, 3.5 M parameters."""
    # Padded as in PyTorch: as in TensorFlow, Python decides on the image's size, which no trace keeps.
    return _transformers("MobileNetV2", tf_padding=False)


def efficientnet() -> Model:
    """EfficientNet-B0, 5.3 M parameters."""
    return _transformers(
        "EfficientNet",
        width_coefficient=1.0,
        depth_coefficient=1.0,
        hidden_dim=1280,
        dropout_rate=0.2,
    )


def convnext() -> Model:
    """ConvNeXt-tiny, 28 M parameters."""
    return _transformers("ConvNext")
