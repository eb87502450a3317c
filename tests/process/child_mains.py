# SPDX-License-Identifier: Apache-2.0
"""The programs of the processes in ``test_child``. Nothing of blade or torch is imported here."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def echo(requests: Any) -> None:
    for request in requests:
        requests.answer(request)


def tells_its_modules(requests: Any, *names: str) -> None:
    requests.answer([name for name in names if name in sys.modules])


def reads_files(requests: Any) -> None:
    for _ in requests:
        [fd] = requests.files
        requests.answer((os.pread(fd, 100, 0), os.get_inheritable(fd)))
        os.close(fd)


def answers_late(requests: Any, seconds: float) -> None:
    time.sleep(seconds)
    echo(requests)


def exits(requests: Any, status: int) -> None:
    os.write(1, b"some\n")
    os.write(2, b"words\n")
    os._exit(status)


def dies(requests: Any, signal: int) -> None:
    os.kill(os.getpid(), signal)


def raises(requests: Any) -> None:
    raise ValueError("what is wrong")


def writes_garbage(requests: Any) -> None:
    requests.connection.send(b"\xff" * 64)
    time.sleep(600)


def closes_its_stream(requests: Any) -> None:
    requests.connection.close()
    time.sleep(600)


def starts_another(requests: Any) -> None:
    """It outlives its parent, and there is a file."""
    code = "import time; time.sleep(600)"
    other = subprocess.Popen([sys.executable, "-c", code])
    file = Path(os.environ["TMPDIR"], "file")
    file.write_text("text")
    requests.answer((other.pid, str(file)))
    time.sleep(600)
