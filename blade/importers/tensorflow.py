# SPDX-License-Identifier: Apache-2.0
"""TensorFlow models as ONNX files, made by tf2onnx in a process apart: TensorFlow is never imported here.

with converted("saved_model_folder") as path:
    import_model(path)
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from blade.errors import InputError

OPSET = 18
DEADLINE_S = 1800

_TO_SAVED_MODEL = """
import sys
import tensorflow as tf
try:
    model = tf.keras.models.load_model(sys.argv[1], compile=False)
except Exception:
    import tf_keras
    model = tf_keras.models.load_model(sys.argv[1], compile=False)
if hasattr(model, "export"):
    model.export(sys.argv[2])
else:
    tf.saved_model.save(model, sys.argv[2])
"""
"""Keras 3 files are exported as SavedModels, which tf2onnx reads whatever the version of Keras."""


@contextmanager
def converted(source: Any) -> Iterator[Path]:
    """The path of an ONNX file, while the context lasts.

    ``source`` is the folder of a SavedModel, a file of Keras (.keras, .h5), or a Keras model in memory. Raises
    ``InputError`` if TensorFlow or tf2onnx is missing, or if the model cannot be converted.
    """
    _check_installed()
    with tempfile.TemporaryDirectory(prefix="blade-tensorflow-") as name:
        folder = Path(name)
        if not isinstance(source, (str, Path)):
            path = folder / "model.keras"
            source.save(path)
        else:
            path = Path(source)
        if not path.is_dir():
            exported = folder / "saved_model"
            _run(["-c", _TO_SAVED_MODEL, str(path), str(exported)], f"{path} as a Keras model")
            path = exported
        onnx_path = (
            folder / f"{Path(source).stem if isinstance(source, (str, Path)) else 'model'}.onnx"
        )
        command = ["-m", "tf2onnx.convert", "--saved-model", str(path), "--output", str(onnx_path)]
        _run([*command, "--opset", str(OPSET)], f"{path} by tf2onnx")
        yield onnx_path


def _check_installed() -> None:
    missing = [name for name in ("tensorflow", "tf2onnx") if find_spec(name) is None]
    if missing:
        raise InputError(
            f"model: reading models of TensorFlow needs {' and '.join(missing)}: pip install 'blade[tensorflow]'"
        )


def _run(arguments: list[str], what: str) -> None:
    """Run Python on ``arguments``; raises ``InputError`` with its last lines if it fails."""
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(f"model: {what} took longer than {DEADLINE_S} s to convert.") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()][-5:]
        raise InputError(f"model: {what} cannot be converted to ONNX: " + " | ".join(lines))
