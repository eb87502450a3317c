# SPDX-License-Identifier: Apache-2.0
"""Models and tasks by name, and small ones in their place, which try a script out in seconds."""

from dataclasses import replace

from models import MODELS
from training import TASKS, Task
from zoo.model import Axis, Model

_SMALL = {"gpt2_decode": "llama_decode", "vit": "mixer", "resnet50": "mobilenet_v2"}


def model_named(name: str, tiny: bool) -> Model:
    """``MODELS[name]``; ``tiny``: a smaller one of its kind at its two smallest shapes."""
    if not tiny:
        return MODELS[name]()
    if name == "bert":
        made = MODELS["bert_mini"]()
        return replace(
            made, axes=(Axis("batch", 1, 3), Axis("length", 1, 9)), fixed=((1, 4), (2, 5))
        )
    return MODELS[_SMALL.get(name, name)]()


def task_named(name: str, tiny: bool) -> Task:
    """``TASKS[name]``; ``tiny``: a smaller one of its kind."""
    return TASKS[
        {"bert_base": "bert_tiny", "unet": "unet_small"}.get(name, name) if tiny else name
    ]()
