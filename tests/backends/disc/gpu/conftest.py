# SPDX-License-Identifier: Apache-2.0
"""Triton decides as it is imported whether functions are interpreted; tests of this folder need that."""

import os
from collections.abc import Iterator

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="module")
def triton_takes_what_was_interpreted() -> Iterator[None]:
    """The interpreter is more generous: every unit of a module goes through Triton's front end, too."""
    import triton_interpreter
    from triton_front import refused

    triton_interpreter.ran.clear()
    yield
    errors = refused(triton_interpreter.ran.values()) if triton_interpreter.ran else {}
    assert not errors, "\n\n".join(errors.values())
