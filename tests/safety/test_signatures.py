# SPDX-License-Identifier: Apache-2.0
"""Engines carry signatures; what was changed, or signed by others, is not trusted."""

import base64
import hashlib
import os
import pickletools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_files import rewrite, save_optimized

import blade
from blade.core.reason import Code
from blade.errors import BackendError, InputError
from blade.program import trust
from blade.program.saved_file import read_saved
from blade.program.signature import (
    EngineState,
    add_signature,
    key_id,
    message_of,
)

pytestmark = pytest.mark.needs("runtime", "torch_mlir", "cryptography")


def new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate()


def write_key(key: Any, path: Path, password: bytes | None = None) -> Path:
    from cryptography.hazmat.primitives import serialization as s

    if hasattr(key, "sign"):
        lock = s.BestAvailableEncryption(password) if password else s.NoEncryption()
        path.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, lock))
    else:
        form = s.PublicFormat.SubjectPublicKeyInfo
        path.write_bytes(key.public_bytes(s.Encoding.PEM, form))
    return path


STATE = EngineState(
    "cluster_0",
    "disc",
    "blade.disc 1\n",
    {"max_failures": 3, "checksum": 5, "max_shapes": -1},
    (torch.arange(5, dtype=torch.uint8), torch.randn(3, 4), torch.randn(4).bfloat16()),
)


class FakeEngine:
    """What ``sign`` and ``verify`` use of an engine."""

    def __init__(self, state: EngineState) -> None:
        self.state = state

    def _get_method(self, name: str) -> Any:
        assert name == "__getstate__"
        s = self.state
        words = [s.name, s.backend, s.program, s.signature]
        return lambda: (2, words, dict(s.limits), list(s.tensors))

    def set_signature(self, text: str) -> None:
        self.state = replace(self.state, signature=text)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The contents of an unsigned file with two engines."""
    path = tmp_path_factory.mktemp("signatures") / "model.pt"
    save_optimized(path)
    return path.read_bytes()


@pytest.fixture
def file(saved: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    path.write_bytes(saved)
    return path


def ask(state: EngineState) -> str:
    """The op as the runtime calls it."""
    names, values = list(state.limits), list(state.limits.values())
    head = (state.name, state.backend, state.program, names, values)
    return trust.why_untrusted(*head, list(state.tensors), state.signature)


def test_the_message_is_the_encoding_that_is_documented() -> None:
    state = EngineState("a", "b", "cé", {"z": 1, "y": -2, "checksum": 9}, (torch.tensor([[1, 2]]),))

    def n(value: int) -> bytes:
        return value.to_bytes(8, "little", signed=True)

    def t(data: bytes) -> bytes:
        return n(len(data)) + data

    want = t(b"blade-engine-signature-1") + t(b"a") + t(b"b") + t("cé".encode())
    want += n(2) + t(b"y") + n(-2) + t(b"z") + n(1)
    want += n(1) + t(b"int64") + n(2) + n(1) + n(2) + t(n(1) + n(2))
    assert message_of(state) == hashlib.sha256(want).digest()


def test_layout_in_memory_is_not_signed_but_values_are() -> None:
    weight = torch.randn(3, 4)
    other_strides = weight.t().contiguous().t()
    assert other_strides.stride() != weight.stride()
    same = message_of(replace(STATE, tensors=(weight,)))
    assert message_of(replace(STATE, tensors=(other_strides,))) == same
    assert message_of(replace(STATE, tensors=(weight.view(4, 3),))) != same
    assert message_of(replace(STATE, tensors=(weight.view(torch.int32),))) != same


KINDS = [
    *(torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.float64),
    *(torch.uint8, torch.float16, torch.int64),
]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_every_element_counts(dtype: torch.dtype) -> None:
    before = torch.randint(0, 2, (2, 3)).to(dtype)
    for position in ((), (slice(0),)):  # a number, and no element at all
        message_of(
            replace(STATE, tensors=(before[(0, 0)] if position == () else before[position],))
        )
    after = before.clone()
    after[1, 2] = (before[1, 2].to(torch.complex64).real == 0).to(dtype)
    first, second = (message_of(replace(STATE, tensors=(x,))) for x in (before, after))
    assert first != second


CHANGES = {
    "name": replace(STATE, name="cluster_1"),
    "backend": replace(STATE, backend="openvino"),
    "program": replace(STATE, program=STATE.program + " "),
    "limit": replace(STATE, limits={**STATE.limits, "max_shapes": 2}),
    "another limit": replace(STATE, limits={**STATE.limits, "cuda_graphs": 1}),
    "code": replace(STATE, tensors=(STATE.tensors[0] + 1, *STATE.tensors[1:])),
    "constant": replace(STATE, tensors=(*STATE.tensors[:2], -STATE.tensors[2])),
    "fewer": replace(STATE, tensors=STATE.tensors[:2]),
}


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
def test_what_was_changed_is_not_trusted(
    changed: EngineState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key()
    monkeypatch.setenv(
        "BLADE_TRUSTED_KEYS", str(write_key(key.public_key(), tmp_path / "public.pem"))
    )
    text = add_signature("", message_of(STATE), key)
    assert ask(replace(STATE, signature=text)) == ""
    assert "was changed after it was signed" in ask(replace(changed, signature=text))


def test_a_module_is_signed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [FakeEngine(STATE), FakeEngine(CHANGES["name"])]
    monkeypatch.setattr(trust, "engines_of", lambda module: [(e.state.name, e) for e in engines])
    first, second, third = new_key(), new_key(), new_key()
    module = torch.nn.Identity()
    assert [one.why_not for one in blade.verify(module, [first.public_key()])] == ["unsigned"] * 2
    assert blade.sign(module, first) == 2
    blade.sign(module, second)
    blade.sign(module, first)  # again: in place of the earlier one
    for key in (first, second):
        own = key_id(key.public_key())
        assert [one.key for one in blade.verify(module, [key.public_key()])] == [own, own]
        for engine in engines:
            assert engine.state.signature.count(own) == 1
    [one, _] = blade.verify(module, [third.public_key()])
    assert one.key is None and "not among the trusted keys" in one.why_not


def test_an_engine_that_is_still_made_is_not_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [FakeEngine(STATE), FakeEngine(replace(STATE, backend="pending"))]
    monkeypatch.setattr(trust, "engines_of", lambda module: [("cluster_0", e) for e in engines])
    with pytest.raises(InputError, match=r"blade\.wait"):
        blade.sign(torch.nn.Identity(), new_key())
    assert [engine.state.signature for engine in engines] == ["", ""]


def test_a_file_is_signed_and_verified_without_loading_it(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.jit, "load", lambda *args, **kwargs: pytest.fail("it was loaded"))
    key, other = new_key(), new_key()
    names = ["cluster_0", "cluster_1"]
    unsigned = blade.verify(file, [key.public_key()])
    assert [(one.engine, one.backend, one.why_not) for one in unsigned] == [
        (name, "disc", "unsigned") for name in names
    ]
    secret = write_key(key, tmp_path / "secret.pem", b"open sesame")
    assert blade.sign(file, secret, password=b"open sesame") == 2
    public = write_key(key.public_key(), tmp_path / "public.pem")
    for keys in (public, [str(public)], [other.public_key(), key.public_key()]):
        signers = [(one.engine, one.key) for one in blade.verify(file, keys)]
        assert signers == [(name, key_id(key.public_key())) for name in names]
    [first, _] = blade.verify(file, [other.public_key()])
    assert first.key is None and "not among the trusted keys" in first.why_not
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.pt", "public.pem", "secret.pem"]


def test_signing_a_file_changes_signatures_alone(file: Path) -> None:
    before = torch._C.PyTorchFileReader(str(file))
    records = {
        n: before.get_record(n) for n in before.get_all_records() if "serialization" not in n
    }
    blade.sign(file, new_key())
    after = torch._C.PyTorchFileReader(str(file))
    now = {n: after.get_record(n) for n in after.get_all_records() if "serialization" not in n}
    assert set(now) == set(records)
    assert [name for name in now if now[name] != records[name]] == ["data.pkl"]

    def texts(data: bytes) -> list[Any]:
        return [argument for op, argument, _ in pickletools.genops(data) if op.name == "BINUNICODE"]

    extra = [text for text in texts(now["data.pkl"]) if text not in texts(records["data.pkl"])]
    assert len(extra) == 2 and all(text.startswith("ed25519:") for text in extra)
    assert read_saved(file).report == blade.report(torch.jit.load(file)).to_json()


def test_a_weight_changed_in_a_signed_file_is_found(file: Path) -> None:
    key = new_key()
    blade.sign(file, key)
    weight = read_saved(file).engines[0]._tensors[1].storage.record

    def flip(data: bytes) -> bytes:
        return bytes([data[0] ^ 1]) + data[1:]

    rewrite(file, {weight: flip})
    [first, second] = blade.verify(file, [key.public_key()])
    assert first.key is None and "was changed after it was signed" in first.why_not
    assert second.key == key_id(key.public_key())


@pytest.mark.parametrize("what", ["missing", "not a key", "private", "empty folder"])
def test_keys_that_cannot_be_read_trust_nothing(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key()
    good = write_key(key.public_key(), tmp_path / "good.pem")
    bad = tmp_path / "bad.pem"
    if what == "not a key":
        bad.write_text("hello")
    elif what == "private":
        write_key(key, bad)
    elif what == "empty folder":
        bad.mkdir()
    signed = replace(STATE, signature=add_signature("", message_of(STATE), key))
    monkeypatch.setenv("BLADE_TRUSTED_KEYS", str(good))
    assert ask(signed) == ""
    monkeypatch.setenv("BLADE_TRUSTED_KEYS", f"{good}{os.pathsep}{bad}")
    assert "so it is not trusted" in ask(signed) and str(bad) in ask(signed)
    monkeypatch.setenv("BLADE_TRUSTED_KEYS", "")
    assert "no engine is trusted" in ask(signed)


def test_a_folder_of_keys_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [new_key(), new_key()]
    for i, key in enumerate(keys):
        write_key(key.public_key(), tmp_path / f"{i}.pem")
    monkeypatch.setenv("BLADE_TRUSTED_KEYS", str(tmp_path))
    for key in keys:
        assert ask(replace(STATE, signature=add_signature("", message_of(STATE), key))) == ""
    assert "unsigned" in ask(STATE)


@pytest.mark.parametrize(
    "text",
    [
        "ed25519",
        "rsa:{id}:{sig}",
        "ed25519:{id}:{sig} ".replace("{sig}", "A" * 86 + "=="),
        "ed25519:{id}:{sig}x",
        "ed25519:{other}:{sig}",
        "ed25519:{id}:\n{sig}",
    ],
)
def test_other_forms_of_signatures_are_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key()
    own = key_id(key.public_key())
    monkeypatch.setenv("BLADE_TRUSTED_KEYS", str(write_key(key.public_key(), tmp_path / "p.pem")))
    sig = base64.b64encode(key.sign(message_of(STATE))).decode()
    assert ask(replace(STATE, signature=f"ed25519:{own}:{sig}")) == ""
    made = text.format(id=own, other=own[::-1], sig=sig)
    assert ask(replace(STATE, signature=made)) != ""


def test_a_key_of_another_kind_is_an_input_error(tmp_path: Path, file: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec

    key: Any = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(InputError, match="Ed25519 private key"):
        blade.sign(file, write_key(key, tmp_path / "key.pem"))
    with pytest.raises(InputError, match="Ed25519 public key"):
        blade.verify(file, write_key(key.public_key(), tmp_path / "public.pem"))
    with pytest.raises(InputError, match="the key cannot be read"):
        blade.sign(file, write_key(new_key(), tmp_path / "locked.pem", b"secret"))
    with pytest.raises(InputError, match="there is no such file"):
        blade.sign(tmp_path / "missing.pt", new_key())


def test_without_the_package_the_error_names_it(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(BackendError, match=r"pip install 'blade\[sign\]'"):
        blade.verify(file, tmp_path)
    monkeypatch.setenv("BLADE_TRUSTED_KEYS", str(tmp_path))
    assert "pip install 'blade[sign]'" in ask(STATE)


def test_the_runtime_asks_the_verifier() -> None:
    """``BLADE_TRUSTED_KEYS`` at load: signed engines run, others leave the call to their original."""
    done = subprocess.run([sys.executable, "-c", AT_LOAD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = dict(line.split() for line in done.stdout.splitlines())
    code, damaged = Code.UNTRUSTED.value, Code.CORRUPT_PAYLOAD.value
    trusted = {"module": "runs", "file": "runs"}
    assert found == {**trusted, "unsigned": code, "stranger": code, "changed": damaged}


AT_LOAD = f"""
import os, sys, tempfile
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parent.parent)]}
import blade, torch
from pathlib import Path
from saved_files import optimized, rewrite
from test_signatures import new_key, write_key
NAMES = ("unsigned", "stranger", "file", "module", "changed")
key, x = new_key(), torch.randn(3, 8)
with tempfile.TemporaryDirectory() as folder:
    places = {{name: Path(folder, name) for name in NAMES}}
    os.environ["BLADE_TRUSTED_KEYS"] = str(write_key(key.public_key(), Path(folder, "public.pem")))
    module = optimized()
    want = module(x)
    for name in ("unsigned", "stranger", "file"):
        module.save(str(places[name]))
    blade.sign(places["stranger"], new_key())
    blade.sign(places["file"], key)
    blade.sign(module, key)
    for name in ("module", "changed"):
        module.save(str(places[name]))
    weights = [e._tensors[1].storage.record for e in blade.program.saved_file.read_saved(places["changed"]).engines]
    rewrite(places["changed"], {{w: lambda data: bytes([data[0] ^ 1]) + data[1:] for w in weights}})
    for name, path in places.items():
        loaded = torch.jit.load(str(path))
        answer = loaded(x)
        if name != "changed":
            torch.testing.assert_close(answer, want)
        for counts in blade.stats(loaded).values():
            causes = set(counts) - {{"calls", "engine_runs", "fallbacks"}}
            causes = {{one for one in causes if counts[one] and not one.startswith("graph_")}}
        print(name, "runs" if not causes else ",".join(causes))
"""
