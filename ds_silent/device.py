"""The device that a training runs on, by torch alone: no framework is asked which one it has chosen.

    kind()                                          # "cpu", "cuda", "npu", ...: of this process
    seed_all(42), initial_seed(), generator_state() # of its generator; on the CPU torch's own
    model_name()                                    # what stands on the device; None on the CPU
    name(), serial()                                # which one this process uses: "cuda:3", its UUID where it tells
    side = SideStream(tensor.device)                # brings values to the host beside the training
    with side.working():
        host.copy_(tensor, non_blocking=True)
    side.wait()
    order = stream_order(tensor.device)             # of several streams that use the same memory; None on the CPU
    order.enter()

Each kind is a module of torch (``torch.cuda``, ``torch.npu`` and ``torch.xpu`` have the same functions), so that
nothing newer than torch 2.4 is needed. ``DS_ACCELERATOR``, by which DeepSpeed is told its device, is read here too:
both then mean the same one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

VARIABLE = "DS_ACCELERATOR"


@functools.cache
def kind() -> str:
    """Return what this process trains on: what ``DS_ACCELERATOR`` names, where torch has it; else the first."""
    _load_npu()
    wanted = os.environ.get(VARIABLE, "")
    if hasattr(getattr(torch, wanted, None), "device_count"):
        return wanted
    return next((name for name in ("xpu", "npu", "cuda") if _available(name)), "cpu")


def _load_npu() -> None:
    """Load ``torch.npu``, which comes with Ascend's package; torch 2.5 and newer import that by themselves."""
    if not hasattr(torch, "npu"):
        with contextlib.suppress(ImportError):
            importlib.import_module("torch_npu")


def _available(name: str) -> bool:
    module = getattr(torch, name, None)
    return module is not None and bool(module.is_available()) and module.device_count() > 0


def module_of(name: str) -> Any:
    """Return ``torch.cuda`` for ``"cuda"``: streams, events and generators of that kind of device."""
    return getattr(torch, name)


def seed_all(seed: int) -> None:
    """Seed the generators of all devices that this process sees."""
    if kind() == "cpu":
        torch.manual_seed(seed)
    else:
        module_of(kind()).manual_seed_all(seed)


def initial_seed() -> int:
    """Return what the device's generator was seeded with."""
    return int(torch.initial_seed() if kind() == "cpu" else module_of(kind()).initial_seed())


def generator_state() -> Tensor:
    """Return the state of the device's generator, uint8 on the host. Reading it may synchronise with the device."""
    state: Tensor = torch.get_rng_state() if kind() == "cpu" else module_of(kind()).get_rng_state()
    return state.cpu()


def set_generator_state(state: Tensor) -> None:
    """Put back what :func:`generator_state` gave."""
    if kind() == "cpu":
        torch.set_rng_state(state)
    else:
        module_of(kind()).set_rng_state(state)


def model_name() -> str | None:
    """Return the device's model as its driver names it; None on the CPU and where a device does not say."""
    name = getattr(getattr(torch, kind(), None), "get_device_name", None)
    return None if name is None else str(name())


def name() -> str:
    """Return ``"cuda:3"``: the device that this process uses, as it counts them; ``"cpu"``."""
    return kind() if kind() == "cpu" else f"{kind()}:{module_of(kind()).current_device()}"


def serial() -> str | None:
    """What tells this device from every other one, wherever it is plugged in: the UUID of its properties (CUDA from
    torch 2.4 on); None on the CPU and where a device does not say."""
    module = getattr(torch, kind(), None)
    properties = getattr(module, "get_device_properties", None)
    if kind() == "cpu" or module is None or properties is None:
        return None
    uuid = getattr(properties(module.current_device()), "uuid", None)
    return None if uuid is None else str(uuid)


def pinned(like: Tensor) -> Tensor:
    """Return host memory of the same shape and dtype that a device copies into without the host's waiting."""
    return torch.empty(like.shape, dtype=like.dtype).pin_memory()


def local_of(value: Any) -> Any:
    """Return what this rank holds of a sharded tensor; anything else as it is."""
    return value.to_local() if hasattr(value, "to_local") else value


def placed(values: Tensor, device: torch.device) -> Tensor:
    """Return ``values`` on a device; from the host by pinned memory, so that the host does not wait."""
    if values.device.type == "cpu" and device.type not in ("cpu", "meta"):
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


class ReadLater:
    """Bring a few numbers to the host beside the training; :attr:`ready` asks whether they are there."""

    def __init__(self, values: Tensor):
        self.values = values  # on the host, once they are there
        self._event: Any = None
        if values.device.type != "cpu":
            self.values = pinned(values)
            self.values.copy_(values, non_blocking=True)
            self._event = module_of(values.device.type).Event()
            self._event.record()

    @property
    def ready(self) -> bool:
        """Whether the numbers are there; it never waits."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait for them."""
        if self._event is not None:
            self._event.synchronize()


class SideStream:
    """A stream of a device beside that of the training, and an event at the end of what was put on it."""

    def __init__(self, device: torch.device):
        self._module = module_of(device.type)
        self._stream = self._module.Stream()
        self._done = self._module.Event()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Launch on this stream what is launched inside."""
        with self._module.stream(self._stream):
            yield
            self._done.record(self._stream)

    def wait(self) -> None:
        """Block the host until what ran in the last :meth:`working` is done."""
        self._done.synchronize()


class StreamOrder:
    """Memory that is used on several streams of a device, in the order in which the host asks for it.

    Autograd calls a hook on the stream of the operation whose gradient it brings. What one use has queued is complete
    before another stream's use begins, because that stream waits for it; the host never does. Each use waits for the
    one before, so the last waits for all. Gradients need no more: autograd itself tells the allocator on which stream
    a hook is given them, and none is kept.

    Args:
        current_stream: gives the calling thread's stream, which compares by ``!=`` and has ``wait_stream(other)``.
        handle: gives that stream's number, for nearly nothing: ``torch.cuda.current_stream`` takes the host 20 us.
    """

    def __init__(self, current_stream: Callable[[], Any], handle: Callable[[], int] | None = None):
        self._current_stream, self._handle = current_stream, handle
        self._last: Any = None
        self._entered: int | None = None

    def enter(self) -> None:
        """Make what the current stream does from here on come after all earlier uses."""
        if self._handle is not None:
            before, self._entered = self._entered, self._handle()
            if self._entered == before:
                return
        current = self._current_stream()
        if self._last is not None and current != self._last:
            current.wait_stream(self._last)
        self._last = current


def stream_order(device: torch.device) -> StreamOrder | None:
    """Return the order for memory on a device; None on the CPU, where everything is in order."""
    if device.type in ("cpu", "meta"):
        return None
    number = getattr(torch._C, f"_{device.type}_getCurrentRawStream", None)  # torch 2.4 to 2.13; not of an NPU
    handle = None if number is None or device.index is None else functools.partial(number, device.index)
    return StreamOrder(getattr(torch, device.type).current_stream, handle)
