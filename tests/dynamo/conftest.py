# SPDX-License-Identifier: Apache-2.0
"""Each test starts with nothing compiled; what torch or the engine cache still holds of earlier ones does not count."""

from collections.abc import Iterator

import graphs
import pytest
import torch

from blade.dynamo.engine_cache import GRAPH_ENGINES
from blade.selection.cache.section import sections_off


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    graphs.forget()
    torch.manual_seed(0)
    with sections_off(GRAPH_ENGINES):
        yield
