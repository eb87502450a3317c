# SPDX-License-Identifier: Apache-2.0
"""Ed25519 signatures of engines: the signed message, the text of a signature, and reading keys.

    message = message_of(EngineState("cluster_0", "disc", program, {"max_failures": 3}, tensors))
    text = add_signature("", message, private_key)      # "ed25519:<key id>:<base64>"
    find_signer(text, message, keys)                    # the id of the key, or None

``message_of`` is SHA-256 over ``DOMAIN``, name, backend, program, the number of limits, each limit's name and
value, the number of tensors, and for each tensor its dtype's name, number of dimensions, sizes and elements
in row-major order. Texts and elements are preceded by their length in bytes; numbers have 8 bytes, little
endian. Strides and devices do not count. A key's id is the first 16 hexadecimal digits of SHA-256 over the 32
bytes of the public key.

The package ``cryptography`` is imported when a key is read, not before.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from blade.errors import BackendError, InputError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

DOMAIN = b"blade-engine-signature-1"
CHECKSUM = "checksum"  # stored with the limits but not signed: it follows from the signed parts
_FORM = re.compile(r"ed25519:([0-9a-f]{16}):([A-Za-z0-9+/]{86}==)")

PublicKeys: TypeAlias = "Mapping[str, Ed25519PublicKey]"
"""Key id -> key."""


@dataclass(frozen=True)
class EngineState:
    """The parts of an engine that a signature covers, and its signatures (``signature``).

    ``tensors``: the engine's code or payload (uint8), then its constants.
    """

    name: str
    backend: str
    program: str
    limits: Mapping[str, int]
    tensors: Sequence[torch.Tensor]
    signature: str = ""


def message_of(state: EngineState) -> bytes:
    """The 32 bytes to sign. Raises ``InputError`` for a tensor whose layout has no row-major form."""
    digest = hashlib.sha256()

    def add_number(value: int) -> None:
        digest.update(value.to_bytes(8, "little", signed=True))

    def add_bytes(data: Any) -> None:
        add_number(len(data))
        digest.update(data)

    for data in (DOMAIN, *(t.encode() for t in (state.name, state.backend, state.program))):
        add_bytes(data)
    limits = {name: value for name, value in state.limits.items() if name != CHECKSUM}
    add_number(len(limits))
    for name in sorted(limits):
        add_bytes(name.encode())
        add_number(limits[name])
    add_number(len(state.tensors))
    for tensor in state.tensors:
        add_bytes(str(tensor.dtype).removeprefix("torch.").encode())
        add_number(tensor.dim())
        for size in tensor.shape:
            add_number(size)
        add_bytes(_elements(tensor))
    return digest.digest()


def add_signature(text: str, message: bytes, key: Ed25519PrivateKey) -> str:
    """``text`` with the signature of ``key``, which replaces an earlier one of the same key."""
    own = key_id(key.public_key())
    others = [one for one in text.split(" ") if one and not one.startswith(f"ed25519:{own}:")]
    signed = base64.b64encode(key.sign(message)).decode()
    return " ".join([*others, f"ed25519:{own}:{signed}"])


def find_signer(text: str, message: bytes, keys: PublicKeys) -> str | None:
    """The id of the first of ``keys`` whose signature of ``message`` is in ``text``."""
    from cryptography.exceptions import InvalidSignature

    for one in text.split(" "):
        found = _FORM.fullmatch(one)
        if found is None or found[1] not in keys:
            continue
        try:
            keys[found[1]].verify(base64.b64decode(found[2], validate=True), message)
        except (InvalidSignature, binascii.Error):
            continue
        return found[1]
    return None


def why_no_signer(text: str, keys: PublicKeys) -> str:
    """Why ``find_signer`` found none: "unsigned", or a sentence."""
    signers = [found[1] for one in text.split(" ") if (found := _FORM.fullmatch(one))]
    if not text:
        return "unsigned"
    if not signers:
        return "The signature is not in a form that this version of blade reads."
    if wrong := [one for one in signers if one in keys]:
        return f"The signature of key {wrong[0]} does not match the engine: it was changed after it was signed."
    return f"It is signed by {', '.join(signers)}, which is not among the trusted keys."


def key_id(key: Ed25519PublicKey) -> str:
    """The id of ``key``, 16 hexadecimal digits."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


def read_private_key(source: object, password: bytes | None) -> Ed25519PrivateKey:
    """``source`` if it is a private key, or the key in a PEM file.

    Raises ``InputError``, or ``BackendError`` without the package.
    """
    ed25519, serialization = _package()
    if isinstance(source, ed25519.Ed25519PrivateKey):
        return cast("Ed25519PrivateKey", source)
    if not isinstance(source, (str, os.PathLike)):
        raise InputError(
            f"key: an Ed25519 private key or the path of a PEM file is expected, not a {type(source).__name__}"
        )
    path = Path(source)
    key = _from_pem(path, lambda data: serialization.load_pem_private_key(data, password))
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise InputError(f"{path}: an Ed25519 private key is expected, not a {type(key).__name__}")
    return cast("Ed25519PrivateKey", key)


def read_public_keys(sources: Iterable[object]) -> dict[str, Ed25519PublicKey]:
    """The keys of ``sources``: public keys, PEM files, or folders, of which every ``*.pem`` is read.

    Raises ``InputError`` if one cannot be read or is of another kind, ``BackendError`` without the package.
    """
    ed25519, serialization = _package()
    keys: list[Ed25519PublicKey] = []
    for source in sources:
        if isinstance(source, ed25519.Ed25519PublicKey):
            keys.append(cast("Ed25519PublicKey", source))
            continue
        if not isinstance(source, (str, os.PathLike)):
            raise InputError(
                f"keys: Ed25519 public keys and paths are expected, not a {type(source).__name__}"
            )
        for path in _pem_files(Path(source)):
            key = _from_pem(path, serialization.load_pem_public_key)
            if not isinstance(key, ed25519.Ed25519PublicKey):
                raise InputError(
                    f"{path}: an Ed25519 public key is expected, not a {type(key).__name__}"
                )
            keys.append(cast("Ed25519PublicKey", key))
    return {key_id(key): key for key in keys}


def _pem_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if found := sorted(path.glob("*.pem")):
        return found
    raise InputError(f"{path}: the folder holds no public key (*.pem)")


def _from_pem(path: Path, load: Callable[[bytes], object]) -> object:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return load(path.read_bytes())
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(f"{path}: the key cannot be read: {error}") from error


def _package() -> tuple[Any, Any]:
    """Import the modules ``ed25519`` and ``serialization`` of ``cryptography``."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise BackendError(
            f"Signatures need the package cryptography ({error}): pip install 'blade[sign]'"
        ) from error
    return ed25519, serialization


def _elements(tensor: torch.Tensor) -> Any:
    """The elements in row-major order, as a buffer over the tensor's own memory if it is contiguous."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise InputError(
            f"An engine with a {tensor.layout} {tensor.dtype} tensor cannot be signed: sign dense tensors."
        )
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    return memoryview(cast(Any, flat.view(torch.uint8).numpy())) if flat.numel() else b""
