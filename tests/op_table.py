# SPDX-License-Identifier: Apache-2.0
"""The whole table of op samples: importing the files that hold rows fills it."""

import op_samples_complex
import op_samples_nn
import op_samples_training
import op_samples_views
from op_samples import TABLE, Sample

PARTS = (op_samples_complex, op_samples_nn, op_samples_training, op_samples_views)
EVERY: tuple[Sample, ...] = tuple(TABLE)
TRAINING: tuple[Sample, ...] = op_samples_training.SAMPLES
"""Of ops that autograd's graphs are made of."""
SAMPLES: tuple[Sample, ...] = tuple(s for s in EVERY if s not in TRAINING)
"""Of ops that models are made of."""
