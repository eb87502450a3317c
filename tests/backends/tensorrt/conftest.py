# SPDX-License-Identifier: Apache-2.0
"""Keep torch's structured trace out of pytest's log capture: any handler on it switches it on."""

import logging

logging.getLogger("torch.__trace").propagate = False
