# SPDX-License-Identifier: Apache-2.0
"""Write a failure as a folder to attach to a bug report: graph, inputs, versions, one script.

    write(folder, extracted, backend, reason, config)      # for each failure, under Config.dump_dir
    reason = reproduce(folder)                             # what folder/reproduce.py calls

``graph.py`` is for reading; the script runs ``cluster.pickle`` with the weights of ``original.pt``.
"""

import json
import logging
import pickle
import platform
from pathlib import Path

import torch

from blade.backends import registry
from blade.config import Config
from blade.core import torchscript
from blade.core.attempt import attempt
from blade.core.backend import Backend
from blade.core.cluster import Cluster
from blade.core.reason import Reason, Stage
from blade.fallback.cluster_codec import decode_cluster, encode_cluster, save_tensors
from blade.graph.torchscript.extract import Extracted
from blade.selection.build_candidates import convert_and_verify
from blade.version import __version__

log = logging.getLogger(__name__)

_SCRIPT = '''\
"""{backend} failed on {subject}: {code}

{detail}

Converts and verifies this cluster again; exits with 1 if that fails here too. Seen with
{versions}
"""

import sys
from pathlib import Path

from blade.selection.reproducer import reproduce

reason = reproduce(Path(__file__).parent)
if reason is None:
    print("No failure here: the engine converts and is right.")
else:
    print(f"{{reason.code.value}}: {{reason.detail}}", reason.error or "", sep="\\n")
sys.exit(reason is not None)
'''


def write(
    parent: Path, extracted: Extracted, backend: Backend, reason: Reason, config: Config
) -> None:
    """Write a folder under ``parent``, named by cluster, backend and code. Never raises."""
    name = "".join(c if c.isalnum() else "_" for c in extracted.name).rstrip("_")
    folder = parent / f"{name}_{backend.name}_{reason.code.value}"
    wrote = attempt(
        Stage.CONVERT, None, str(folder), lambda: _write(folder, extracted, backend, reason, config)
    )
    if isinstance(wrote, Reason):
        log.warning("no reproducer of %s in %s: %s", reason.subject, folder.name, wrote.detail)
    else:
        log.info("%s: a reproducer is in %s", reason.subject, folder)


def reproduce(folder: Path) -> Reason | None:
    """Return why the cluster in ``folder`` fails in this process, ``None`` if it does not."""
    original = torchscript.load(folder / "original.pt")
    cluster = decode_cluster(
        (folder / "cluster.pickle").read_bytes(),
        folder / "inputs.pt",
        lambda name: getattr(original, name),
    )
    backend, config = _load_backend(folder)
    found = convert_and_verify(cluster, original, backend, config)
    return found if isinstance(found, Reason) else None


def _write(
    folder: Path, extracted: Extracted, backend: Backend, reason: Reason, config: Config
) -> None:
    cluster = extracted.cluster
    folder.mkdir(parents=True, exist_ok=True)
    torchscript.save(extracted.fallback, folder / "original.pt")
    save_tensors(cluster, folder / "inputs.pt", with_constants=False)
    (folder / "cluster.pickle").write_bytes(encode_cluster(cluster))
    (folder / "graph.py").write_text(_readable(cluster))
    # strict would raise the failure instead of returning it
    plain = config.evolve(customize_jit_passes=(), dump_dir=None, strict=False)
    (folder / "config.pickle").write_bytes(pickle.dumps((backend.name, plain)))
    if registry.is_registered(backend.name):
        (folder / "backend.pickle").write_bytes(pickle.dumps(backend))
    versions = {
        "blade": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    (folder / "versions.json").write_text(json.dumps(versions, indent=1))
    text = _SCRIPT.format(
        backend=backend.name,
        subject=reason.subject,
        code=reason.code.value,
        detail=_quoted(reason.detail),
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
    )
    (folder / "reproduce.py").write_text(text)


def _readable(cluster: Cluster) -> str:
    """FX code with the shape of every value."""
    return str(cluster.gm.print_readable(print_output=False)).lstrip()


def _quoted(text: str) -> str:
    """``text``, escaped for a docstring."""
    return text.replace("\\", "/").replace('"""', "'''")


def _load_backend(folder: Path) -> tuple[Backend, Config]:
    name, config = pickle.loads((folder / "config.pickle").read_bytes())
    file = folder / "backend.pickle"
    backend = pickle.loads(file.read_bytes()) if file.exists() else registry.load(name)
    return backend, config
