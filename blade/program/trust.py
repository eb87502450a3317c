# SPDX-License-Identifier: Apache-2.0
"""Sign engines (program, code and constants), and check signatures against the keys that a process trusts.

    blade.sign("model.pt", "private.pem")               # every engine in the file; executes nothing in it
    blade.verify("model.pt", ["public.pem"])            # (Verified("cluster_0", "disc", key="5f0c...", why_not=""),)

``BLADE_TRUSTED_KEYS`` in the environment lists PEM files of public keys, or folders of them, separated as in
``PATH``. If it is set, an engine in a file is loaded only with a valid signature of one of these keys;
otherwise the original runs, and ``blade.stats`` counts ``untrusted``. ``docs/security.md`` lists what a
signature does not cover.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blade.errors import BackendError, InputError
from blade.program.saved_file import read_saved, write_signatures
from blade.program.signature import (
    EngineState,
    PublicKeys,
    add_signature,
    find_signer,
    message_of,
    read_private_key,
    read_public_keys,
    why_no_signer,
)
from blade.report import engines_of

_PENDING = "pending"


@dataclass(frozen=True)
class Verified:
    """One engine: ``key`` is the id of the trusted key that signed it, ``None`` if none did.

    ``why_not`` is empty, "unsigned", or a sentence.
    """

    engine: str
    backend: str
    key: str | None
    why_not: str = ""


def sign(
    module_or_path: torch.nn.Module | str | os.PathLike[str],
    key: Any,
    *,
    password: bytes | None = None,
) -> int:
    """Sign every engine with an Ed25519 ``key``; returns the number of engines.

    ``key``: a private key of the package ``cryptography``, or the path of a PEM file, which ``password`` decrypts.
    The engines of an optimized module are signed in place: ``torch.jit.save`` stores the signatures. A file is
    replaced atomically, without executing anything in it. An engine may have signatures of several keys.

    Raises ``InputError`` for a key or file that cannot be used and for engines that are still being made,
    ``BackendError`` without ``cryptography`` (``pip install 'blade[sign]'``).
    """
    private = read_private_key(key, password)
    if not isinstance(module_or_path, torch.nn.Module):
        path = Path(module_or_path)
        texts = {}
        for saved in read_saved(path).engines:
            if saved.why_not:
                raise InputError(f"{path}: {saved.name} cannot be signed: {saved.why_not}")
            state = saved.state()
            _check_made(state)
            if saved.name in texts:
                raise InputError(f"{path}: two engines are called {saved.name}")
            texts[saved.name] = add_signature(state.signature, message_of(state), private)
        if texts:
            write_signatures(path, texts)
        return len(texts)
    engines = [(engine, _state_of(engine)) for _, engine in engines_of(module_or_path)]
    for _, state in engines:
        _check_made(state)
    for engine, state in engines:
        engine.set_signature(add_signature(state.signature, message_of(state), private))
    return len(engines)


def verify(
    module_or_path: torch.nn.Module | str | os.PathLike[str],
    keys: Iterable[Any] | str | os.PathLike[str] | None = None,
) -> tuple[Verified, ...]:
    """Check the signatures of each engine; one ``Verified`` per engine, in the order of the module.

    ``keys``: Ed25519 public keys of the package ``cryptography``, paths of PEM files, or folders of them; by
    default those of ``BLADE_TRUSTED_KEYS``. A file is read as data: nothing in it is executed.

    Raises ``InputError`` for keys or files that cannot be read, or without any keys,
    ``BackendError`` without ``cryptography`` (``pip install 'blade[sign]'``).
    """
    if keys is None:
        keys = trusted_paths()
        if not keys:
            raise InputError("keys: give public keys, or set BLADE_TRUSTED_KEYS")
    public = read_public_keys([keys] if isinstance(keys, (str, os.PathLike)) else keys)
    if isinstance(module_or_path, torch.nn.Module):
        found = engines_of(module_or_path)
        return tuple(_verified(name, _state_of(engine), public) for name, engine in found)
    results = []
    for saved in read_saved(module_or_path).engines:
        if saved.why_not:
            backend = saved.words[1] if len(saved.words) > 1 else ""
            results.append(Verified(saved.name, backend, None, saved.why_not))
        else:
            results.append(_verified(saved.name, saved.state(), public))
    return tuple(results)


def trusted_paths() -> tuple[str, ...]:
    """The entries of ``BLADE_TRUSTED_KEYS``."""
    return tuple(filter(None, os.environ.get("BLADE_TRUSTED_KEYS", "").split(os.pathsep)))


def why_untrusted(
    name: str,
    backend: str,
    program: str,
    limit_names: Sequence[str],
    limits: Sequence[int],
    tensors: Sequence[torch.Tensor],
    signature: str,
) -> str:
    """An empty text if a trusted key signed this engine, else a sentence; it is one if a key is unreadable."""
    paths = trusted_paths()
    if not paths:
        return "BLADE_TRUSTED_KEYS names no key, so no engine is trusted."
    numbers = dict(zip(limit_names, limits, strict=True))
    state = EngineState(name, backend, program, numbers, tensors, signature)
    try:
        found = _verified(name, state, read_public_keys(paths))
    except (BackendError, InputError, RuntimeError) as error:
        return f"The engine cannot be verified against BLADE_TRUSTED_KEYS, so it is not trusted: {error}"
    if found.why_not == "unsigned":
        return (
            "The engine is unsigned, and BLADE_TRUSTED_KEYS asks for a signature of a trusted key."
        )
    return found.why_not


def register_verifier(library: torch.library.Library) -> None:
    """Implements ``blade::why_untrusted``, which the C++ runtime calls for engines from files."""
    library.impl("why_untrusted", why_untrusted, "CompositeImplicitAutograd")


def _verified(name: str, state: EngineState, keys: PublicKeys) -> Verified:
    signer = find_signer(state.signature, message_of(state), keys) if state.signature else None
    why_not = "" if signer else why_no_signer(state.signature, keys)
    return Verified(name, state.backend, signer, why_not)


def _state_of(engine: Any) -> EngineState:
    """The state of a live engine."""
    _, words, numbers, tensors = engine._get_method("__getstate__")()
    name, backend, program, *signature = words
    return EngineState(name, backend, program, numbers, tensors, *signature[:1])


def _check_made(state: EngineState) -> None:
    if state.backend == _PENDING:
        raise InputError(
            f"{state.name} is still being made: call blade.wait(module) before it is signed"
        )
