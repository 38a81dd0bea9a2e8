"""The device layer: on the CPU what DeepSpeed's accelerator gives, on a device the functions of torch's module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from ds_silent import device


@pytest.fixture(autouse=True)
def _asked_again() -> Iterator[None]:
    """What was found is remembered for the process: each test asks anew, and leaves nothing."""
    device.kind.cache_clear()
    yield
    device.kind.cache_clear()


class Pretended:
    """A module of torch for a device that is not here; it notes what is done to it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def get_device_name(self) -> str:
        return "Pretended 9000"

    def current_device(self) -> int:
        return 3

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(name="Pretended 9000", uuid=UUID(int=device))

    def initial_seed(self) -> int:
        return 7

    def manual_seed_all(self, seed: int) -> None:
        self.calls.append(("seed", seed))

    def get_rng_state(self) -> torch.Tensor:
        return torch.tensor([1, 2, 3], dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.calls.append(("state", state.tolist()))

    def Stream(self) -> str:  # noqa: N802 - torch's own name
        return "side"

    def Event(self) -> Any:  # noqa: N802
        return SimpleNamespace(
            record=lambda stream: self.calls.append(("record", stream)),
            synchronize=lambda: self.calls.append("waited"),
        )

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.calls.append(("on", stream))
        yield
        self.calls.append(("off", stream))


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    module = Pretended()
    monkeypatch.setattr(torch, "npu", module, raising=False)
    monkeypatch.delenv(device.VARIABLE, raising=False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    return module


def test_on_the_cpu_it_is_what_deepspeed_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.VARIABLE, "cpu")
    accelerator = CPU_Accelerator()
    assert device.kind() == accelerator.device_name() == "cpu"
    device.seed_all(11)
    assert device.initial_seed() == accelerator.initial_seed() == torch.initial_seed() == 11
    assert torch.equal(device.generator_state(), accelerator.get_rng_state())
    assert device.model_name() is None
    assert (device.name(), device.serial()) == ("cpu", None)


def test_a_generator_goes_back_to_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.VARIABLE, "cpu")
    state = device.generator_state()
    drawn = torch.rand(3)
    device.set_generator_state(state)
    assert torch.equal(torch.rand(3), drawn)


def test_the_variable_wins_over_a_device_that_is_there(npu: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.VARIABLE, "cpu")
    assert device.kind() == "cpu"


@pytest.mark.parametrize("told", ["", "random", "no-such-device"])
def test_what_torch_does_not_have_is_looked_for(npu: Pretended, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.VARIABLE, told)
    assert device.kind() == "npu"


def test_without_any_device_it_is_the_cpu(npu: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.kind() == "cpu"


def test_a_device_is_asked_through_its_own_module(npu: Pretended) -> None:
    assert device.kind() == "npu"
    assert device.model_name() == "Pretended 9000"
    assert (device.name(), device.serial()) == ("npu:3", "00000000-0000-0000-0000-000000000003")
    assert device.initial_seed() == 7
    assert device.generator_state().tolist() == [1, 2, 3]
    device.seed_all(5)
    device.set_generator_state(torch.tensor([4], dtype=torch.uint8))
    assert npu.calls == [("seed", 5), ("state", [4])]


def test_a_device_without_a_serial_says_none(npu: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu, "get_device_properties", lambda device: SimpleNamespace(name="Pretended 9000"))
    assert device.serial() is None
    monkeypatch.setattr(npu, "get_device_properties", None)
    assert device.serial() is None


def test_a_side_stream_marks_its_end_before_the_stream_is_left(npu: Pretended) -> None:
    side = device.SideStream(SimpleNamespace(type="npu"))  # type: ignore[arg-type]  # torch knows no such device here
    with side.working():
        npu.calls.append("copy")
    side.wait()
    assert npu.calls == [("on", "side"), "copy", ("record", "side"), ("off", "side"), "waited"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_values_come_to_the_host_beside_the_training() -> None:
    values = torch.arange(1000.0, device="cuda")
    host, side = device.pinned(values), device.SideStream(values.device)
    torch.cuda.synchronize()
    with side.working():
        host.copy_(values, non_blocking=True)
    side.wait()
    assert host.is_pinned()
    assert torch.equal(host, values.cpu())
