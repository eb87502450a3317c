# SPDX-License-Identifier: Apache-2.0
"""Writes models of TensorFlow and their answers to files; a program, since no test imports TensorFlow.

python tensorflow_models.py FOLDER      # FOLDER/cnn, bert, recommender: SavedModels; cnn.keras; answers.npz
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

layers = tf.keras.layers


def cnn() -> Any:
    image = tf.keras.Input((32, 32, 3), name="image")
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(image)
    x = layers.BatchNormalization()(x)
    x = layers.DepthwiseConv2D(3, padding="same")(x)
    x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(16, 1, activation="relu")(x)
    x = layers.GlobalAveragePooling2D()(x)
    return tf.keras.Model(image, layers.Dense(10, activation="softmax")(x))


def bert() -> Any:
    """Two blocks of a transformer encoder over ids and a mask of any length."""
    ids = tf.keras.Input((None,), dtype="int32", name="ids")
    mask = tf.keras.Input((None,), dtype="int32", name="mask")
    x = layers.LayerNormalization()(layers.Embedding(100, 32)(ids))
    seen = layers.Lambda(lambda m: tf.cast(m[:, None, None, :], tf.bool))(mask)
    for _ in range(2):
        a = layers.MultiHeadAttention(4, 8)(x, x, attention_mask=seen)
        x = layers.LayerNormalization()(layers.Add()([x, a]))
        h = layers.Dense(32)(layers.Dense(64, activation="gelu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, h]))
    return tf.keras.Model([ids, mask], x)


def recommender() -> Any:
    dense = tf.keras.Input((4,), name="dense")
    fields = tf.keras.Input((3,), dtype="int32", name="fields")
    embedded = layers.Embedding(50, 8)(fields)
    bottom = layers.Dense(8, activation="relu")(dense)
    every = layers.Concatenate(axis=1)([layers.Reshape((1, 8))(bottom), embedded])
    pairs = layers.Flatten()(layers.Dot(axes=2)([every, every]))
    x = layers.Concatenate()([bottom, pairs])
    return tf.keras.Model([dense, fields], layers.Dense(1, activation="sigmoid")(x))


def main(folder: Path) -> None:
    rng = np.random.default_rng(0)
    tf.keras.utils.set_random_seed(0)
    inputs = {
        "cnn": {"image": rng.standard_normal((3, 32, 32, 3)).astype(np.float32)},
        "bert": {
            "ids": rng.integers(0, 100, (2, 7)).astype(np.int32),
            "mask": np.array([[1] * 7, [1] * 4 + [0] * 3], np.int32),
        },
        "recommender": {
            "dense": rng.standard_normal((5, 4)).astype(np.float32),
            "fields": rng.integers(0, 50, (5, 3)).astype(np.int32),
        },
    }
    saved = {}
    for make in (cnn, bert, recommender):
        name, model = make.__name__, make()
        given = list(inputs[name].values())
        answer = model(given if len(given) > 1 else given[0], training=False)
        saved |= {f"{name}/{key}": one for key, one in inputs[name].items()}
        saved[f"{name}/answer"] = np.asarray(answer)
        model.export(str(folder / name))
        if name == "cnn":
            model.save(str(folder / "cnn.keras"))
    np.savez(folder / "answers.npz", **saved)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
