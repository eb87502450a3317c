# SPDX-License-Identifier: Apache-2.0
"""Payloads made by hand: nothing they name is looked up, read or written beyond what the backend knows."""

import io
import json
import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blade.backends.inductor import run as inductor
from blade.backends.inductor.package import InductorPackage
from blade.backends.shared.archive import EngineArchive
from blade.backends.tensorrt import runner as tensorrt
from blade.backends.tvm import run as tvm
from blade.errors import BackendError

pytestmark = pytest.mark.needs("runtime")

ONNXRUNTIME = pytest.param("onnxruntime", marks=pytest.mark.needs("onnxruntime"))
OPENVINO = pytest.param("openvino", marks=pytest.mark.needs("openvino"))
TVM = pytest.param("tvm", marks=pytest.mark.needs("tvm"))
SECRET = torch.tensor([3.0, 1.0, 4.0, 1.0])
PROGRAM = "blade.disc 1\nslot 0 output f32 1 0\n"  # as far as Results reads it


def as_payload(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def inductor_load(recipe: Any, files: dict[str, bytes] | None = None) -> None:
    package = InductorPackage(
        (), {"c": "made"}, (), {"made": recipe}, files or {"model.so": b"no library"}
    )
    inductor.load("evil", as_payload(package.to_bytes()), [], "")


CALLS: dict[str, Callable[[str], Any]] = {
    "os.system": lambda marker: [("os.system", [f"touch {marker}"], {})],
    "hub": lambda marker: [("hub.os.mkdir", [marker], {})],
    "from_file": lambda marker: [("ops.aten.from_file", [marker, True, 8], {})],
    "from_file, now": lambda marker: [("aten.from_file", [marker, True, 8], {})],
    "save": lambda marker: [("ops.aten.save", [1, marker], {})],
}


@pytest.mark.parametrize("recipe", CALLS.values(), ids=CALLS)
def test_a_recipe_calls_nothing_but_ops_that_compute(
    recipe: Callable[[str], Any], tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    with pytest.raises(BackendError, match="is not among the ops that a recipe may call"):
        inductor_load(recipe(str(marker)))
    assert not marker.exists()


def test_a_recipe_names_dtypes_and_nothing_else_of_torch() -> None:
    """``{"torch": name}`` is a dtype, a layout or a memory format."""
    for name in ("hub", "os", "__dict__"):
        with pytest.raises(BackendError, match=f"cannot be computed: '{name}'"):
            inductor_load([("aten.zeros", [[2]], {"dtype": {"torch": name}})])


@pytest.mark.parametrize("backend", ["inductor", TVM])
def test_files_of_an_archive_stay_in_its_folder(backend: str, tmp_path: Path) -> None:
    """An absolute path, and one that leaves the folder, used to be written where they say."""
    outside = tmp_path / "outside"
    names = [str(outside), f"../../../../..{outside}", "model.so/../x", "other.so"]
    for name in names:
        files = {"model.so": b"no library", name: b"evil"}
        with pytest.raises(BackendError, match="it holds a file"):
            if backend == "inductor":
                package = InductorPackage((), {}, (), {}, files)
                inductor.load("evil", as_payload(package.to_bytes()), [], "")
            else:
                facts = {"weights": 0, "orders": []}
                data = EngineArchive(tvm.stamp(), facts, files).to_bytes()
                tvm.load("evil", as_payload(data), [], "")
        assert not outside.exists()


def archive(add: Callable[[zipfile.ZipFile], None]) -> bytes:
    """A package of AOTInductor in which ``add`` puts the library."""
    facts = {"orders": [], "names": {}, "constants": [], "recipes": {}}
    head = {"stamp": {"torch": torch.__version__}, "facts": facts}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as zipped:
        zipped.writestr("engine.json", json.dumps(head))
        add(zipped)
    return made.getvalue()


def entry(mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("model.so")
    info.external_attr = mode << 16
    return info


def twice(zipped: zipfile.ZipFile) -> None:
    for data in (b"one", b"two"):
        with pytest.warns(UserWarning) if data == b"two" else open(os.devnull):
            zipped.writestr("model.so", data)


MEMBERS: dict[str, tuple[Callable[[zipfile.ZipFile], None], str]] = {
    "link": (lambda z: z.writestr(entry(stat.S_IFLNK | 0o777), "/etc/passwd"), "is no plain file"),
    "device": (lambda z: z.writestr(entry(stat.S_IFCHR | 0o666), ""), "is no plain file"),
    "twice": (twice, "two files of one name"),
    "bzip2": (
        lambda z: z.writestr("model.so", b"x", zipfile.ZIP_BZIP2),
        "is compressed in another way",
    ),
    "none": (lambda z: None, "is damaged"),
}


@pytest.mark.parametrize(("add", "why"), MEMBERS.values(), ids=MEMBERS)
def test_an_archive_holds_plain_files(add: Callable[[zipfile.ZipFile], None], why: str) -> None:
    with pytest.raises(BackendError, match=why):
        inductor.load("evil", as_payload(archive(add)), [], "")


def test_an_archive_that_unpacks_to_too_much_is_not_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = archive(lambda z: z.writestr("model.so", bytes(1 << 20), zipfile.ZIP_DEFLATED))
    monkeypatch.setattr("blade.backends.shared.archive.MAX_BYTES", 1 << 20)
    read: list[str] = []
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda self, info: read.append(info))
    with pytest.raises(BackendError, match="holds more than"):
        inductor.load("evil", as_payload(data), [], "")
    assert read == []


def head_of(library: Any, **facts: Any) -> dict[str, Any]:
    one = {"weights": [], "inputs": [], "outputs": ["y"], "orders": [None], "device": "cpu"}
    return {"stamp": library.stamp(), "facts": one | facts}


def onnx_payload(name: str, model: bytes, **facts: Any) -> tuple[Any, torch.Tensor]:
    """The runner of ``name``, and a payload for it."""
    if name == "openvino":
        from blade.backends.openvino import session as runner
    else:
        from blade.backends.onnxruntime import session as runner  # type: ignore[no-redef]
    head = head_of(runner.LIBRARY, **facts)
    data = EngineArchive(head["stamp"], head["facts"], {"model.onnx": model}).to_bytes()
    return runner, as_payload(data)


def external(name: str, location: str) -> Any:
    """An initializer whose contents are in the file ``location``."""
    import onnx

    tensor = onnx.TensorProto(name=name, data_type=onnx.TensorProto.FLOAT, dims=[4])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def plain(name: str) -> Any:
    import onnx

    return onnx.numpy_helper.from_array(torch.zeros(4).numpy(), name)


def graph(nodes: list[Any], initializers: list[Any], inputs: list[Any] | None = None) -> Any:
    from onnx import TensorProto, helper

    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])
    return helper.make_graph(nodes, "g", inputs or [], [y], initializers)


def as_model(main: Any, **more: Any) -> bytes:
    from onnx import helper

    opsets = [helper.make_opsetid("", 18), *more.pop("opsets", [])]
    model = helper.make_model(main, opset_imports=opsets, ir_version=9, **more)
    data: bytes = model.SerializeToString()
    return data


def in_main_graph(location: str) -> bytes:
    from onnx import helper

    node = helper.make_node("Identity", ["w"], ["y"])
    return as_model(graph([node], [external("w", location)]))


def in_a_branch(location: str) -> bytes:
    from onnx import helper, numpy_helper

    branch = graph([helper.make_node("Identity", ["w"], ["y"])], [external("w", location)])
    node = helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch)
    yes = numpy_helper.from_array(torch.ones((), dtype=torch.bool).numpy(), "yes")
    return as_model(graph([node], [yes]))


def in_an_attribute(location: str) -> bytes:
    from onnx import helper

    node = helper.make_node("Constant", [], ["y"], value=external("w", location))
    return as_model(graph([node], []))


def in_a_function(location: str) -> bytes:
    from onnx import helper

    opsets = [helper.make_opsetid("", 18)]
    body = [helper.make_node("Constant", [], ["y"], value=external("w", location))]
    function = helper.make_function("", "Read", [], ["y"], body, opsets)
    return as_model(graph([helper.make_node("Read", [], ["y"])], []), functions=[function])


PLACES = [in_main_graph, in_a_branch, in_an_attribute, in_a_function]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("name", [ONNXRUNTIME, OPENVINO])
def test_a_model_reads_no_file(
    name: str, place: Callable[[str], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file beside the working directory used to be an answer of the model."""
    monkeypatch.chdir(tmp_path)
    Path("secret.bin").write_bytes(SECRET.numpy().tobytes())
    runner, payload = onnx_payload(name, place("secret.bin"))
    with pytest.raises(BackendError, match="'w' is in another file"):
        runner.load("evil", payload, [], PROGRAM)


@pytest.mark.needs("onnxruntime")
def test_a_weight_that_is_given_does_not_hide_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime is given initializers of the main graph; one of that name in a branch is read."""
    monkeypatch.chdir(tmp_path)
    Path("w").write_bytes(SECRET.numpy().tobytes())
    for model in (in_a_branch("w"), in_an_attribute("w")):
        runner, payload = onnx_payload("onnxruntime", model, weights=["w"])
        with pytest.raises(BackendError, match="'w' is in another file"):
            runner.load("evil", payload, [torch.zeros(4)], PROGRAM)


@pytest.mark.needs("onnxruntime")
def test_ops_of_others_are_refused() -> None:
    """``EPContext`` names a file with compiled code."""
    from onnx import helper

    node = helper.make_node(
        "EPContext", [], ["y"], domain="com.microsoft", embed_mode=0, ep_cache_context="evil.so"
    )
    opsets = [helper.make_opsetid("com.microsoft", 1)]
    runner, payload = onnx_payload("onnxruntime", as_model(graph([node], []), opsets=opsets))
    with pytest.raises(BackendError, match=r"ops of the domain 'com\.microsoft'"):
        runner.load("evil", payload, [], PROGRAM)


IR = b"""<?xml version="1.0"?>
<net name="m" version="11"><layers>
<layer id="0" name="x" type="Parameter" version="opset1"><data shape="4" element_type="f32"/>
<output><port id="0" precision="FP32"><dim>4</dim></port></output></layer>
<layer id="1" name="y" type="Result" version="opset1">
<input><port id="0" precision="FP32"><dim>4</dim></port></input></layer></layers>
<edges><edge from-layer="0" from-port="0" to-layer="1" to-port="0"/></edges></net>"""


@pytest.mark.needs("openvino")
def test_openvino_reads_onnx_and_no_other_format(tmp_path: Path) -> None:
    """IR has weights in a file of its own and extensions; a path is read from the disk."""
    for model in (IR, str(tmp_path / "model.xml").encode(), b"", b"TFL3"):
        runner, payload = onnx_payload("openvino", model, inputs=["x"])
        with pytest.raises(BackendError, match="no ONNX model"):
            runner.load("evil", payload, [], PROGRAM)


FACTS = {
    "another field": {"path": "x"},
    "device": {"device": "hub"},
    "names": {"inputs": [["x"]]},
    "orders": {"orders": [[0, 0]]},
    "negative": {"orders": [[-1]]},
    "weights": {"weights": ["w"]},
}


@pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS)
@pytest.mark.parametrize("name", [ONNXRUNTIME, OPENVINO])
def test_a_head_in_another_form_is_damage(name: str, facts: dict[str, Any]) -> None:
    from onnx import helper

    model = as_model(graph([helper.make_node("Identity", ["w"], ["y"])], [plain("w")]))
    runner, payload = onnx_payload(name, model, **facts)
    with pytest.raises(BackendError, match="is damaged"):
        runner.load("evil", payload, [], PROGRAM)


def tensorrt_payload(**changes: Any) -> bytes:
    head = {
        "format": 1,
        "sizes": [4, 2],
        "library": "tensorrt 1",
        "inputs": [{"name": "x", "dtype": "FLOAT", "rank": 1, "order": None}],
        "outputs": [{"name": "y", "dtype": "FLOAT", "rank": 1, "order": None}],
        "profiles": [{"min": [[1]], "opt": [[1]], "max": [[4]]}],
        "weights": {},
        "key": "",
    }
    text = json.dumps(head | changes).encode()
    return len(text).to_bytes(8, "little") + text + b"planOK"


HEADS: dict[str, Any] = {
    "sizes": {"sizes": [-2, 8]},
    "more": {"sizes": [4, 1 << 40]},
    "dtype": {"inputs": [{"name": "x", "dtype": "__class__", "rank": 1, "order": None}]},
    "order": {"outputs": [{"name": "y", "dtype": "FLOAT", "rank": 1, "order": [7]}]},
    "weight": {"weights": {"w": -1}},
    "no such weight": {"weights": {"w": 0}},
    "key": {"key": ["../.."]},
    "profile": {"profiles": [{"min": [["1"]], "opt": [[1]], "max": [[4]]}]},
    "missing": {"inputs": [{}]},
}


@pytest.mark.parametrize("changes", HEADS.values(), ids=HEADS)
def test_a_head_of_tensorrt_in_another_form_is_damage(changes: dict[str, Any]) -> None:
    with pytest.raises(BackendError, match="is damaged"):
        tensorrt.load("evil", as_payload(tensorrt_payload(**changes)), [], "")


@pytest.mark.parametrize("data", [b"\x00", b"\xff" * 8, b"\x02" + bytes(7) + b"{}", bytes(7)])
def test_a_payload_of_tensorrt_that_is_cut_off_is_damage(data: bytes) -> None:
    with pytest.raises(BackendError, match="is damaged"):
        tensorrt.load("evil", as_payload(data), [], "")


def test_host_code_in_a_plan_stays_forbidden() -> None:
    """Plans may embed libraries, which TensorRT maps where this is allowed."""
    from types import SimpleNamespace

    from blade.backends.tensorrt.deserialize import open_engine
    from blade.backends.tensorrt.library import wrap

    allowed = []

    class Runtime:
        engine_host_code_allowed = True

        def __init__(self, logger: Any) -> None:
            pass

        def deserialize_cuda_engine(self, plan: bytes) -> None:
            allowed.append(self.engine_host_code_allowed)

    trt = SimpleNamespace(__version__="10.9", ILogger=type("ILogger", (), {}), Runtime=Runtime)
    payload: Any = SimpleNamespace(plan=b"plan", head=SimpleNamespace(weights={}))
    with pytest.raises(BackendError, match="cannot load the engine here"):
        open_engine(wrap(trt, is_rtx=False), payload, [])
    assert allowed == [False]
