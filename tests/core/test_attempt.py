# SPDX-License-Identifier: Apache-2.0
"""attempt: a result, or a Reason that keeps what was thrown; strict hides nothing."""

import pytest

from blade.core.attempt import attempt
from blade.core.reason import Code, Reason, Stage
from blade.errors import ConfigError, InputError, Refused


def _fail(error: BaseException) -> int:
    raise error


def test_a_result_passes_through() -> None:
    assert attempt(Stage.CONVERT, "disc", "cluster_0", lambda: 41 + 1) == 42


def test_an_exception_becomes_a_reason_that_names_it_and_its_place() -> None:
    error = ValueError("bad tile\nand a long dump of it")
    reason = attempt(Stage.CONVERT, "disc", "cluster_0", lambda: _fail(error))
    assert isinstance(reason, Reason)
    assert (reason.stage, reason.code) == (Stage.CONVERT, Code.CONVERSION_FAILED)
    assert (reason.backend, reason.subject) == ("disc", "cluster_0")
    assert reason.detail == "disc raised ValueError in the stage 'convert': bad tile"
    assert reason.error is not None
    assert "and a long dump of it" in reason.error
    assert "at test_attempt.py:" in reason.error
    assert "in _fail" in reason.error
    assert __file__ not in reason.error  # a report travels: no folders of this machine


def test_another_code_can_be_asked_for() -> None:
    reason = attempt(
        Stage.RUN, None, "x", lambda: _fail(RuntimeError()), code=Code.BACKEND_UNAVAILABLE
    )
    assert isinstance(reason, Reason)
    assert reason.code is Code.BACKEND_UNAVAILABLE
    assert reason.detail == "RuntimeError in the stage 'run': no message"


@pytest.mark.parametrize("strict", [False, True])
def test_a_refusal_keeps_its_code_also_when_strict(strict: bool) -> None:
    refusal = Refused(Code.UNSUPPORTED_DTYPE, "disc has no kernel for complex64.")
    reason = attempt(Stage.CONVERT, "disc", "mul", lambda: _fail(refusal), strict)
    assert reason == Reason(
        Stage.CONVERT,
        Code.UNSUPPORTED_DTYPE,
        "disc",
        "mul",
        "disc has no kernel for complex64.",
    )


def test_strict_raises_the_very_exception() -> None:
    error = ValueError("bad tile")
    with pytest.raises(ValueError) as caught:
        attempt(Stage.CONVERT, "disc", "cluster_0", lambda: _fail(error), strict=True)
    assert caught.value is error


@pytest.mark.parametrize(
    "error", [ConfigError("field"), InputError("inputs"), KeyboardInterrupt(), SystemExit()]
)
def test_the_users_mistakes_and_interrupts_always_pass(error: BaseException) -> None:
    with pytest.raises(type(error)):
        attempt(Stage.CONVERT, "disc", "cluster_0", lambda: _fail(error))
