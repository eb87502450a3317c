# SPDX-License-Identifier: Apache-2.0
"""The file of finished cells: a line of JSON per model, mode, shape and peer. A later line replaces an earlier one.

lines = Lines(Path("suite.jsonl"))
lines.done("cpu", "inference", "bert")        # {"blade", "eager"}: peers that need not run again
lines.found()                                 # every line
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Lines:
    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._found: dict[tuple[str, ...], Line] = {}
        text = path.read_text() if path.exists() else ""
        for line in text.splitlines():
            try:
                self._keep(json.loads(line))
            except json.JSONDecodeError:  # a run was cut short in the middle of it
                continue
        if text and not text.endswith("\n"):
            with path.open("a") as out:
                out.write("\n")

    def _keep(self, line: Line) -> None:
        key = [line[name] for name in ("device", "mode", "model", "peer")]
        if line["shape"]:  # a cell that failed before now has times
            self._found.pop((*key, ""), None)
        else:
            for other in [k for k in self._found if k[:4] == tuple(key)]:
                del self._found[other]
        self._found[(*key, line["shape"])] = line

    def found(self) -> list[Line]:
        return list(self._found.values())

    def done(self, device: str, mode: str, model: str, again: bool = False) -> set[str]:
        """The peers that have finished ``model``; ``again``: failures do not count."""
        return {
            line["peer"]
            for line in self._found.values()
            if (line["device"], line["mode"], line["model"]) == (device, mode, model)
            and not (again and line.get("failed"))
        }

    def add(self, given: Sequence[Mapping[str, Any]]) -> None:
        """All lines of a cell in one go."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        made = [{**line, "time": now} for line in given]
        with self._path.open("a") as out:
            out.write("".join(json.dumps(line) + "\n" for line in made))
        for line in made:
            self._keep(line)

    def skipped(self, facts: Mapping[str, Any], model: str, missing: Sequence[str]) -> None:
        """A model whose library is not there; said once."""
        if "" not in self.done(str(facts["device"]), "skipped", model):
            line = {**facts, "mode": "skipped", "model": model, "peer": "", "shape": ""}
            self.add([{**line, "failed": f"{', '.join(missing)} not installed"}])
