# SPDX-License-Identifier: Apache-2.0
"""Models of images, tiny: convolutional nets, transformers, a detector, a U-Net of diffusion."""

from functools import partial
from typing import Any

import torch
from tiny_model import SIZES, Tiny
from torch import nn
from zoo import convnets, vision
from zoo.model import Shape, Tensors, generator, images, initialized

import blade


def _images(module: nn.Module, shapes: tuple[Shape, ...] = SIZES) -> Tiny:
    module = initialized(module, partial(images, (2, 48, 48), 0))
    return Tiny(module, images, shapes)


def resnet() -> Tiny:
    """Bottlenecks of 32 and 64 channels, which our kernels take."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [convnets.conv_norm(3, 32, 7, 2), nn.MaxPool2d(3, 2, 1)]
    inside = 32
    for k, width in enumerate((32, 64)):
        layers += [
            convnets.Bottleneck(inside, width, k + 1),
            convnets.Bottleneck(4 * width, width, 1),
        ]
        inside = 4 * width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(inside, 10)]
    return _images(convnets.Sequence(*layers, *head))


def mobilenet_v3() -> Tiny:
    torch.manual_seed(0)
    layers: list[nn.Module] = [convnets.conv_norm(3, 16, 3, 2, act=nn.Hardswish)]
    inside = 16
    for kernel, wide, out, squeeze, act, stride in (
        (3, 16, 16, False, nn.ReLU, 1),
        (3, 32, 24, True, nn.Hardswish, 2),
        (5, 48, 24, True, nn.ReLU, 1),
    ):
        layers.append(convnets.InvertedResidual(inside, kernel, wide, out, squeeze, act, stride))
        inside = out
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(inside, 10), nn.Hardswish()]
    return _images(convnets.Sequence(*layers, *head))


def _classifier(name: str, **config: Any) -> Tiny:
    import transformers

    torch.manual_seed(0)
    settings = getattr(transformers, f"{name}Config")(num_labels=7, **config)
    model = getattr(transformers, f"{name}ForImageClassification")(settings)
    return _images(convnets.Classifier(model))


def mobilenet_v2() -> Tiny:
    return _classifier("MobileNetV2", tf_padding=False, depth_multiplier=0.25, min_depth=8)


def efficientnet() -> Tiny:
    return _classifier(
        "EfficientNet",
        width_coefficient=0.25,
        depth_coefficient=0.1,
        hidden_dim=64,
        dropout_rate=0.2,
    )


def convnext() -> Tiny:
    return _classifier("ConvNext", hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1])


def vit() -> Tiny:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=96,
        image_size=32,
        patch_size=8,
        num_labels=7,
    )
    module = initialized(convnets.Classifier(ViTForImageClassification(config)))
    return Tiny(module, partial(vision._square, size=32), ((2,), (1,), (3,), (5,), (7,)))


def swin() -> Tiny:
    from transformers import SwinConfig, SwinForImageClassification

    torch.manual_seed(0)
    config = SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[1, 2],
        window_size=4,
        num_labels=7,
    )
    module = initialized(convnets.Classifier(SwinForImageClassification(config)))
    fixed = blade.Config(dynamic_shapes={"pixel_values": {2: 32, 3: 32}})
    return Tiny(module, partial(vision._square, size=32), ((2,), (1,), (3,), (5,)), fixed)


def mixer() -> Tiny:
    torch.manual_seed(0)
    module = initialized(vision.Mixer(32, 8, 48, 2))
    return Tiny(module, partial(vision._square, size=32), ((2,), (1,), (3,), (5,), (7,)))


def detr() -> Tiny:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    torch.manual_seed(0)
    backbone = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )
    config = DetrConfig(
        use_timm_backbone=False,
        backbone_config=backbone,
        num_queries=5,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_labels=4,
    )
    module = initialized(
        vision.Detector(DetrForObjectDetection(config)),
        partial(vision._detr_inputs, (2, 48, 48), 0),
    )
    return Tiny(module, vision._detr_inputs, SIZES)


def unet() -> Tiny:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=24,
        attention_head_dim=2,
        norm_num_groups=8,
    )

    def inputs(shape: Shape, seed: int) -> Tensors:
        batch, height, width, tokens = shape
        rng = generator(seed)
        timestep = torch.randint(0, 1000, (batch,), generator=rng)
        states = torch.randn(batch, tokens, 24, generator=rng)
        return torch.randn(batch, 4, height, width, generator=rng), timestep, states

    shapes = ((2, 8, 8, 5), (1, 4, 12, 1), (3, 6, 2, 7), (1, 10, 14, 37))
    return Tiny(initialized(vision.Denoiser(model)), inputs, shapes)
