# SPDX-License-Identifier: Apache-2.0
"""The installed version of TVM, without importing it."""

from importlib import metadata

from blade.errors import BackendError

INSTALL = "`pip install apache-tvm`"


def stamp() -> dict[str, str]:
    """TVM's packages and their versions; raises ``BackendError`` if one is missing."""
    try:
        return {name: metadata.version(name) for name in ("apache-tvm", "apache-tvm-ffi")}
    except metadata.PackageNotFoundError as error:
        raise BackendError(f"{error.name} is not installed: {INSTALL}.") from error
