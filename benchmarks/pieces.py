"""Where the training's thread is: ds_silent's functions wrapped from outside, each a piece of a step.

    pieces = Pieces(time.thread_time)
    with installed(pieces):
        observer.connect()               # what is connected from now on is wrapped
        train_one_step()
    pieces.spent["gradient hooks"].seconds

A piece's time is its own: what another piece does inside it, and the training's own functions that a wrapper calls,
count elsewhere. The modes of torch split or count what happens in a piece.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from threading import get_ident
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ds_silent.patches import Patches

PIECES = {
    "forward": "capture.forwards:Forwards: forward forwarded loss share",
    "objective": "capture.objective:LocalObjective: begins handed numbers start; capture.objective:: _flows_in",
    "settings": "capture.local_settings:LocalSettings: before_forward after_forward look_at_modes code; "
    "capture.settings_check:SettingsCheck: agree note",
    "rules": "capture.breaches:BreachCheck: _safely code agree",
    "end of backward": "observing.step_loop:StepLoop: before_reduction",
    "gradients, together": "capture.step:StepMoments: accumulated",
    "reduced share": "capture.step:StepMoments: reduced",
    "before the update": "observing.step_loop:StepLoop: before_update",
    "waiting for the judge": "observing.recorder:Recorder: finish",
    "exchange, collect": "exchange.gather:Exchange: collect",
    "publish": "observing.publisher:Publisher: publish",
    "replicas": "replicas.compare:ReplicaChecks: capture take_due localise",
    "observation": "capture.step:StepCapture: observation",
    "aggregate": "capture.reduced_gradient:ReducedGradient: observed; kernels.checksums:LayerChecksums: __call__",
    "exchange, pack and post": "exchange.gather:Exchange: post",
    "responses": "respond.responder:Responder: before_update after_update",
    "applied": "capture.step:StepMoments: applying; capture.reduced_gradient:ReducedGradient: compare_applied",
    "after the step": "observing.step_loop:StepLoop: after_update",
    ": sketch, norm": "kernels.accumulator:Accumulator: add add_all",
    ": fold": "kernels.accumulator:Accumulator: take peek",
    ": checksum": "kernels.checksums:Checksums: __call__",
    ": remembered": "capture.reduced_gradient:Remembered: __init__ moved differs",
}
"""Each piece's functions, ``module:class: names``; one that begins with a colon is a part of the piece around it."""
BETWEEN = "wrappers, between"
HOOKS = {
    "register_hook": "gradient hooks",
    "register_forward_pre_hook": "forward",
    "register_forward_hook": "forward",
    "register_step_pre_hook": "optimizer hooks",
    "register_step_post_hook": "optimizer hooks",
}
"""The piece of each hook, by how it is registered."""
JUDGE, WRITER = "the judge's thread", "the writer's thread"
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
Clock = Callable[[], float]


@dataclass
class Spent:
    """What one piece took of one step."""

    calls: int = 0
    inner: int = 0  # pieces, or functions of the training, that were called from it
    seconds: float = 0.0
    compiled: float = 0.0  # CPU time inside torch or a compiled function
    operations: int = 0
    moved: int = 0  # bytes
    gradient: int = 0  # bytes


@dataclass(frozen=True)
class Cost:
    """Seconds that a wrapper adds to its own piece, and to the one around it."""

    own: float = 0.0
    around: float = 0.0


class Pieces:
    """Where the training's thread is; nothing of what other threads do is counted.

    Attributes:
        spent: by piece, in the order in which they came.
        clock: gives seconds.
        mode: makes a mode of torch that is active in every piece, and in none of the training's functions.
        thread: the training's.
        handing: how deep in functions that get gradients; see :func:`handed_over`.
    """

    def __init__(self, clock: Clock, mode: Callable[[Pieces], Any] | None = None) -> None:
        self.spent: dict[str, Spent] = {}
        self.clock = clock
        self.mode, self.thread, self.handing = mode, get_ident(), 0
        self._modes: list[Any] = []
        self._stack: list[str | None] = [None]  # None: the training's own
        self._mark = 0.0

    def top(self) -> Spent | None:
        """The piece under way."""
        name = self._stack[-1]
        return None if name is None else self.spent[name]

    def enter(self, piece: str | None) -> None:
        around = self._stack[-1]
        if piece is not None and piece.startswith(":"):
            piece = (around or BETWEEN).partition(":")[0] + piece
        if around is not None:
            self.spent[around].inner += 1
        if piece is not None:
            self.spent.setdefault(piece, Spent()).calls += 1
        self._switch(around, piece)
        self._stack.append(piece)
        self._charge(around)

    def leave(self) -> None:
        piece = self._stack[-1]
        self._charge(piece)
        self._stack.pop()
        self._switch(piece, self._stack[-1])

    def _charge(self, piece: str | None) -> None:
        now = self.clock()
        if piece is not None:
            self.spent[piece].seconds += now - self._mark
        self._mark = now

    def _switch(self, before: str | None, after: str | None) -> None:
        if self.mode is None:
            return
        if before is None and after is not None:
            self._modes.append(self.mode(self).__enter__())
        elif before is not None and after is None:
            self._modes.pop().__exit__(None, None, None)

    def wrapped(self, function: Callable[..., Any], piece: str | None) -> Callable[..., Any]:
        """The function as a piece; None: of the training."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != self.thread:
                return function(*args, **kwargs)
            self.enter(piece)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return call

    def beside(self, act: Callable[..., Any], name: str) -> Callable[..., Any]:
        """What another thread does."""

        def call(*args: Any) -> Any:
            began = self.clock()
            try:
                return act(*args)
            finally:
                spent = self.spent.setdefault(name, Spent())
                spent.calls, spent.seconds = spent.calls + 1, spent.seconds + self.clock() - began

        return call

    def without(self, cost: Cost) -> dict[str, Spent]:
        """What was spent, without what the wrappers have added."""
        for spent in self.spent.values():
            spent.seconds -= spent.calls * cost.own + spent.inner * cost.around
        return self.spent


# -- what a mode sees --------------------------------------------------------------------------------------------------


class Split(TorchFunctionMode):
    """CPU time inside the functions of torch that a piece calls; attributes and shapes are not among them."""

    look = 0.0  # seconds between two looks at the clock

    def __init__(self, pieces: Pieces):
        super().__init__()
        self._pieces = pieces

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "__get__":
            return function(*args, **(kwargs or {}))
        return compiled(self._pieces, function, *args, **(kwargs or {}))


def compiled(pieces: Pieces, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call it; its CPU time is the piece's, in compiled code."""
    spent = pieces.top()
    began = time.thread_time()
    try:
        return function(*args, **kwargs)
    finally:
        if spent is not None:
            spent.compiled += time.thread_time() - began - Split.look


class Counted(TorchDispatchMode):
    """Operations, and the bytes of their operands and results; one that only makes a view moves none."""

    def __init__(self, pieces: Pieces):
        super().__init__()
        self._pieces = pieces

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        spent = self._pieces.top()
        if spent is not None:
            spent.operations += 1
            if not (operation.is_view or "detach" in str(operation) or "_unsafe_view" in str(operation)):
                given = tensors_in((*args, *(kwargs or {}).values()))
                new = [value for value in tensors_in((result,)) if all(value is not each for each in given)]
                spent.moved += sum(map(size_of, (*given, *new)))
                if str(operation).endswith("_.default"):  # in place: read and written
                    spent.moved += size_of(given[0])
        return result


def tensors_in(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among them, and in their lists."""
    flat = [one for value in values for one in (value if isinstance(value, (list, tuple)) else (value,))]
    return [value for value in flat if isinstance(value, Tensor)]


def size_of(values: Tensor) -> int:
    """Bytes; of a sharded tensor, of this rank's shard."""
    own: Tensor = getattr(values, "_local_tensor", values)
    return own.numel() * own.element_size()


def handed_over(pieces: Pieces, function: Callable[..., Any]) -> Callable[..., Any]:
    """Count the bytes of the tensors among the arguments, where the caller has not counted them already."""

    @wraps(function)
    def call(instance: Any, *args: Any, **kwargs: Any) -> Any:
        given = [list(arg) if isinstance(arg, Iterator) else arg for arg in args]
        spent = pieces.top()
        if spent is not None and not pieces.handing:
            flat = [part for arg in given for part in (arg if isinstance(arg, (list, tuple)) else (arg,))]
            spent.gradient += sum(map(size_of, tensors_in((*flat, *kwargs.values()))))
        pieces.handing += 1
        try:
            return function(instance, *given, **kwargs)
        finally:
            pieces.handing -= 1

    return call


# -- the wrappers ------------------------------------------------------------------------------------------------------


def functions_of(places: str) -> Iterator[tuple[Any, str]]:
    """(class or module, name) of each of :data:`PIECES`; a class that has its own beside its parent's comes too."""
    for place in places.split("; "):
        owner, names = place.rsplit(": ", 1)
        module, _, kind = owner.partition(":")
        found: Any = importlib.import_module(f"ds_silent.{module}")
        owners = [found] if not kind.strip(":") else [*family(getattr(found, kind))]
        for name in names.split():
            at = [owner for owner in owners if name in vars(owner)]
            if not at:
                raise SystemExit(f"PIECES of {__file__} names {owner}.{name}, which ds_silent does not have any more.")
            yield from ((owner, name) for owner in at)


def family(kind: type) -> Iterator[type]:
    """A class and those below it."""
    yield kind
    for below in kind.__subclasses__():
        yield from family(below)


@contextmanager
def installed(pieces: Pieces) -> Iterator[None]:
    """Wrap what is connected from now on, and what ds_silent calls inside; as it was at the end."""
    with ExitStack() as undo:

        def replace(owner: Any, name: str, new: Callable[..., Any]) -> None:
            undo.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, new)

        for piece, places in PIECES.items():
            for owner, name in functions_of(places):
                function = vars(owner)[name]
                handed = pieces.mode is Counted and piece in (": sketch, norm", ": checksum")
                replace(owner, name, pieces.wrapped(handed_over(pieces, function) if handed else function, piece))
        wrap_patches(pieces, replace)
        wrap_threads(pieces, replace)
        if pieces.mode is not None:
            undo.callback(unwrapped, wrap_libraries(pieces))
        yield


def wrap_patches(pieces: Pieces, replace: Callable[..., None]) -> None:
    """What ds_silent puts on foreign objects; the functions around which it lies are the training's."""
    hook, around, wrap, wrap_method = Patches.hook, Patches.around, Patches.wrap, Patches.wrap_method
    piece = partial(pieces.wrapped, piece=BETWEEN)

    def around_training(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return piece(wrapper)(pieces.wrapped(function, None), *args, **kwargs)

        return call

    def hooked(self: Patches, register: Any, act: Any, **how: Any) -> None:
        hook(self, register, pieces.wrapped(act, HOOKS.get(register.__name__, BETWEEN)), **how)

    def put_around(self: Patches, instance: Any, name: str, before: Any = None, after: Any = None) -> None:
        around(self, instance, name, before and piece(before), after and piece(after))

    def wrapped(self: Patches, instance: Any, name: str, wrapper: Any) -> None:
        wrap(self, instance, name, around_training(wrapper))

    def method_wrapped(self: Patches, kind: type, name: str, wrapper: Any, inherited: type | None = None) -> None:
        reads_frames = "behind_method" in getattr(wrapper, "__qualname__", "")  # it looks for its caller's name
        wrap_method(self, kind, name, wrapper if reads_frames else around_training(wrapper), inherited)

    for name, new in (("hook", hooked), ("around", put_around), ("wrap", wrapped), ("wrap_method", method_wrapped)):
        replace(Patches, name, new)


def wrap_threads(pieces: Pieces, replace: Callable[..., None]) -> None:
    """The thread that judges, and the one that writes."""
    from ds_silent.sinks.worker import Background, OneTask

    judge, put = OneTask._do, Background._put
    replace(OneTask, "_do", pieces.beside(judge, JUDGE))
    replace(Background, "_put", lambda self, act, *urgent: put(self, pieces.beside(act, WRITER), *urgent))


def wrap_libraries(pieces: Pieces) -> list[Any]:
    """Functions of the libraries that ctypes has opened, each of which has a class for its own; those classes."""

    def call(function: Any, *args: Any) -> Any:
        spent = pieces.top() if get_ident() == pieces.thread else None
        if spent is None:
            return native(function, *args)
        spent.operations += 1
        return compiled(pieces, native, function, *args)

    native = ctypes._CFuncPtr.__call__  # type: ignore[attr-defined]
    kinds = [one._FuncPtr for one in gc.get_objects() if type(one) is ctypes.CDLL]
    for kind in kinds:
        kind.__call__ = call
    return kinds


def unwrapped(kinds: list[Any]) -> None:
    """As they were."""
    for kind in kinds:
        del kind.__call__


def cost_of_wrappers(clock: Clock) -> Cost:
    """The typical cost of one around a function that does nothing."""
    owns, arounds = [], []
    for _ in range(50):
        pieces = Pieces(clock)
        inner = pieces.wrapped(lambda: None, "inner")

        def around(inner: Callable[[], None] = inner) -> None:
            for _ in range(200):
                inner()

        pieces.wrapped(around, "around")()
        owns.append(pieces.spent["inner"].seconds / 200)
        arounds.append(pieces.spent["around"].seconds / 200)
    return Cost(statistics.median(owns), statistics.median(arounds))


def cost_of_looks() -> float:
    """The typical cost of looking at the thread's CPU time around a function that does nothing."""
    looks = []
    for _ in range(50):
        pieces = Pieces(time.thread_time)
        pieces.enter("one")
        for _ in range(200):
            compiled(pieces, int)
        looks.append(pieces.spent["one"].compiled / 200)
    return statistics.median(looks)
