# SPDX-License-Identifier: Apache-2.0
"""A FastAPI app that 16 threads ask for texts of many lengths, while its model is optimized and afterwards."""

import pytest
from one_line import check


@pytest.mark.needs("minilm", "fastapi")
def test_every_answer_is_the_models() -> None:
    check("FastAPI, 16 threads", inputs=4)
