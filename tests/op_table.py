# SPDX-License-Identifier: Apache-2.0
"""The whole table of op samples: importing the files that hold rows fills it."""

import op_samples_nn
import op_samples_views
from op_samples import TABLE, Sample

PARTS = (op_samples_nn, op_samples_views)
SAMPLES: tuple[Sample, ...] = tuple(TABLE)
