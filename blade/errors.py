# SPDX-License-Identifier: Apache-2.0
"""The exceptions a user of blade can see.

A user's mistake raises ``ConfigError`` or ``InputError``: the text names the argument, the value and
what is allowed. ``BackendError`` is raised only for a backend that the user named and that cannot
serve; everything that happens to an automatically chosen backend is a ``Reason`` in the report.
"""


class BladeError(Exception):
    """Base of every exception blade raises on purpose."""


class ConfigError(BladeError, ValueError):
    """A ``Config`` field has an unknown name, a wrong type or a value out of range."""


class InputError(BladeError, ValueError):
    """The model or the sample inputs given to ``optimize`` cannot be used."""


class BackendError(BladeError, RuntimeError):
    """A backend that the user named is missing or cannot be used here."""


class Refused(BladeError):
    """Raised inside a stage to say "not this one"; ``attempt`` turns it into its ``Reason``.

    ``code`` is a ``blade.report.Code``; ``args[0]`` is the detail, a full sentence.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
