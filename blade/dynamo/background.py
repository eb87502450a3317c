# SPDX-License-Identifier: Apache-2.0
"""``options={"background": True}``: a graph that the original answers until its engines are there.

graph = BackgroundGraph(original, "graph_0", make, kept=[0], strict=False)   # make(): compiles the graph
graph(x)                                   # the original's answer; a thread compiles and lets engines compete
wait(timeout=60)                           # True: nothing runs any more

The thread starts at the first call, when Dynamo has finished with the graph, and takes copies of that call's
inputs. It leaves torch's random generators alone; graphs that draw from them are compiled in the foreground.
Graphs are compiled one after the other. A fork has no such thread: there the next call starts it again.
"""

import atexit
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.fx import Graph, GraphModule

from blade.core.attempt import attempt
from blade.core.cluster import draws_numbers
from blade.core.reason import Code, Reason, Stage
from blade.dynamo.live_graphs import forget, track
from blade.errors import BackendError, BladeError, ConfigError, InputError
from blade.fallback.isolated_convert import end_conversions
from blade.graph.fx.random_ops import may_draw
from blade.process.torch_state import generators_left_alone
from blade.report import READY, SEARCHING, Report

if TYPE_CHECKING:
    from blade.runtime.engine import Engine

EXIT_S = 60.0  # s; a compilation that runs when the interpreter exits takes seconds at most
Compiled = Callable[..., Any]

IN_FOREGROUND = Reason(
    Stage.SELECT,
    Code.RANDOM,
    None,
    "the graph",
    "options={'background': True} has no effect on a graph that draws from torch's random generators.",
)


def draws(graph: GraphModule) -> bool:
    """Whether a run of ``graph`` may draw random numbers."""
    return any(
        may_draw(node) and draws_numbers(cast(Any, node.target), node.args, node.kwargs)
        for node in graph.graph.nodes
    )


class BackgroundGraph:
    """Has the inputs and outputs of ``graph``, which ``make`` may change.

    ``kept``: the inputs that ``make`` binds, which are not copied.
    """

    def __init__(
        self,
        graph: GraphModule,
        name: str,
        make: Callable[[], Compiled],
        kept: Sequence[int],
        strict: bool,
    ) -> None:
        self.name, self.error = name, cast("BladeError | None", None)
        self._original, self._make = _copy_of(graph), make
        self._kept, self._strict = frozenset(kept), strict
        self._compiled: Compiled | None = None
        self._reasons: tuple[Reason, ...] = ()
        self._begin = threading.Lock()
        self._begun = False
        track(self)

    def __call__(self, *args: Any) -> Any:
        original = self._original  # read first: it goes once the graph is compiled
        if (compiled := self._compiled) is not None:
            return compiled(*args)
        if not self._begun:
            self._start(args)
        return original.forward(*args)

    def engines(self) -> "Mapping[str, Engine]":
        """None: the original answers."""
        return {}

    def report(self) -> Report:
        """The report before there are engines, or why there will be none."""
        state = READY if self._reasons else SEARCHING
        return Report(reasons=self._reasons, state=state)

    def compile(self, args: Sequence[Any]) -> None:
        """Compile, and let the engines compete at ``args``; from then on they answer."""
        try:
            found = attempt(Stage.CONVERT, None, self.name, lambda: self._compile(args))
        except (ConfigError, InputError) as error:
            found = Reason(Stage.CONVERT, Code.CONVERSION_FAILED, None, self.name, str(error))
        if isinstance(found, Reason):
            self._reasons = (found,)
            if self._strict:
                self.error = BackendError(f"{found.detail}\n{found.error or ''}".strip())
            return
        self._compiled = found
        self._original, self._make = GraphModule({}, Graph()), _nothing
        forget(self)

    def begin_again(self) -> None:
        """In a fork: the thread that compiled is not here."""
        self._begin = threading.Lock()
        self._begun = False

    def _compile(self, args: Sequence[Any]) -> Compiled:
        compiled = self._make()
        compiled(*args)  # the engines compete
        return compiled

    def _start(self, args: Sequence[Any]) -> None:
        with self._begin:
            if self._begun:
                return
            self._begun = True
            copies = [one if i in self._kept else _copy(one) for i, one in enumerate(args)]
            if any(isinstance(one, torch.Tensor) and one.is_cuda for one in copies):
                torch.cuda.current_stream().synchronize()  # the thread has a stream of its own
            _queue.add(self, copies)


class _CompileQueue:
    """The graphs that wait, and the thread that compiles them in order."""

    def __init__(self) -> None:
        self.waiting: list[tuple[BackgroundGraph, list[Any]]] = []
        self.unfinished: list[BackgroundGraph] = []
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None
        self.ends = False

    def add(self, graph: BackgroundGraph, args: list[Any]) -> None:
        with self.changed:
            if self.ends:
                return
            self.waiting.append((graph, args))
            self.unfinished.append(graph)
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="blade-compile", daemon=True)
                self.thread.start()

    def wait(self, timeout: float | None) -> bool:
        end = None if timeout is None else monotonic() + timeout
        with self.changed:
            while self.unfinished:
                left = None if end is None else end - monotonic()
                if left is not None and left <= 0:
                    return False
                self.changed.wait(left)
        return True

    def end(self) -> None:
        """At exit: start nothing more, and wait for what runs. A thread that is in native code when the
        interpreter is finalized would crash the process."""
        with self.changed:
            self.ends, thread = True, self.thread
            self.waiting.clear()
        if thread is not None:
            end_conversions()
            thread.join(EXIT_S)

    def _run(self) -> None:
        while True:
            with self.changed:
                if not self.waiting:
                    self.thread = None
                    return
                graph, args = self.waiting.pop(0)
            try:
                with torch.inference_mode(False), torch.no_grad(), generators_left_alone():
                    graph.compile(args)
                if graph.error is not None:
                    _errors.append(graph.error)
            finally:
                del args
                with self.changed:
                    self.unfinished.remove(graph)
                    self.changed.notify_all()


def wait(timeout: float | None = None) -> bool:
    """Wait at most ``timeout`` seconds until no graph of ``torch.compile`` is compiled in the background.

    With ``options={"strict": True}`` raises ``BackendError`` if that failed for a graph.
    """
    done = _queue.wait(timeout)
    if _errors:
        raise _errors.pop()
    return done


def _copy_of(graph: GraphModule) -> GraphModule:
    """The nodes of ``graph``, over the same tensors."""
    made = Graph()
    made.output(made.graph_copy(graph.graph, {}))
    return GraphModule(graph, made)


def _copy(one: Any) -> Any:
    if not isinstance(one, torch.Tensor):
        return one
    with torch.inference_mode(False), torch.no_grad():
        return one.detach().clone()


def _nothing() -> Compiled:
    raise AssertionError("this graph is compiled already")


def _after_fork() -> None:
    """In the child: what the parent compiles, it compiles alone."""
    global _queue
    unfinished = _queue.unfinished
    _queue = _CompileQueue()
    for graph in unfinished:
        graph.begin_again()


_queue = _CompileQueue()
_errors: list[BladeError] = []
os.register_at_fork(after_in_child=_after_fork)
atexit.register(lambda: _queue.end())
