# SPDX-License-Identifier: Apache-2.0
"""Each test starts with nothing compiled; what torch still holds of earlier ones does not count."""

from collections.abc import Iterator

import graphs
import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    graphs.forget()
    torch.manual_seed(0)
    yield
