# SPDX-License-Identifier: Apache-2.0
"""Samples of the op table that the original serves on CUDA, and words of the reason."""

# DISC refuses them.
LEFT: dict[str, str] = {}

# DISC has an engine, but verification refuses it, as eager on CUDA is not what torch is elsewhere: its RMS norm of
# 16 bits makes NaN of a whole row that has an infinity, where rows are no multiple of its vectors.
UNLIKE: dict[str, str] = {"rms_norm": "places of NaN"}
