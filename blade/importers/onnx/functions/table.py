# SPDX-License-Identifier: Apache-2.0
"""The functions that rows call, as ``run.<name>``."""

from blade.importers.onnx.functions.attention import *  # noqa: F403
from blade.importers.onnx.functions.detection import *  # noqa: F403
from blade.importers.onnx.functions.index import *  # noqa: F403
from blade.importers.onnx.functions.layout import *  # noqa: F403
from blade.importers.onnx.functions.pooling import *  # noqa: F403
from blade.importers.onnx.functions.recurrent import *  # noqa: F403
from blade.importers.onnx.functions.resize import *  # noqa: F403
from blade.importers.onnx.functions.signal import *  # noqa: F403
