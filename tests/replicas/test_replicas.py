"""One changed bit changes the checksum; groups, tensors and the first bad step follow from checksums alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_silent
from ds_silent.distributed.parts import parts_of
from ds_silent.kernels import checksums
from ds_silent.kernels.checksums import SCRATCH, Bits, Checksums, checksum, combined
from ds_silent.kernels.launches import Choice
from ds_silent.maths.mixing import ROW, keys_of, word_keys
from ds_silent.replicas.compare import Replicas
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import run_distributed
from tests.support.training import Case

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)


def naive(tensor: Tensor) -> int:
    """The formula of the docstring, with Python's integers."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    whole = len(data) // 8
    words = [int.from_bytes(data[8 * i : 8 * i + 8], "little") for i in range(whole)]
    keys, places = keys_of(1024).tolist(), word_keys().tolist()
    total = sum(word * keys[index // ROW] * places[index % ROW] for index, word in enumerate(words))
    if len(data) % 8:
        total += int.from_bytes(data[8 * whole :].ljust(8, b"\0"), "little") * keys[0]
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 3, 8, 1000, 40_001])
def test_checksum_is_its_formula_and_sees_every_bit(numel: int, dtype: torch.dtype) -> None:
    values = torch.randint(0, 100, (numel,), generator=torch.Generator().manual_seed(numel)).to(dtype)
    right = int(checksum(values))
    assert right == naive(values)
    if dtype == torch.bool:
        assert int(checksum(~values)) != right
        return
    raw = values.clone().view(torch.uint8)
    for place in {0, len(raw) // 2, len(raw) - 1}:
        for bit in range(8):
            changed = raw.clone()
            changed[place] ^= 1 << bit
            assert int(checksum(changed.view(dtype))) != right


def test_of_a_training_on_a_device_nothing_comes_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam keeps its step on the host and its moments on the device. The host would wait for these; and to read a step
    of 4 bytes it would compile its functions, for 5 s at step 100."""
    meta, chosen = torch.device("meta"), []
    monkeypatch.setattr(checksums, "choice", lambda device: chosen.append(device.type) or Choice("torch", ""))
    step, moments = ("step", torch.ones(1)), ("exp_avg", torch.empty(64, device=meta))
    assert Bits()([step, moments]).device == meta
    assert Bits(meta)([step]).device == meta
    assert chosen == ["meta"]
    assert Bits()([step]).device.type == "cpu"
    assert chosen == ["meta", "cpu"]


@pytest.mark.parametrize("numel", [64, 40_000, 3 * 4 * ROW])
def test_changes_that_are_equal_and_opposite_are_seen(numel: int) -> None:
    """As of an update in bf16 that has left a unit in the last place here and there; and words that change places."""
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator).to(torch.bfloat16)
    right = int(checksum(values))
    for _ in range(200):
        lane = int(torch.randint(4, (1,), generator=generator))
        one, other = torch.randperm(numel // 4, generator=generator)[:2].tolist()
        changed = values.clone()
        changed.view(torch.int16)[4 * one + lane] += 1
        changed.view(torch.int16)[4 * other + lane] -= 1
        assert int(checksum(changed)) != right
        words = values.clone().view(torch.int64)
        words[[one, other]] = words[[other, one]]
        assert torch.equal(words, values.view(torch.int64)) or int(checksum(words)) != right


def test_a_device_without_products_of_int64_matrices_makes_the_same() -> None:
    tensors = [torch.randn(numel) for numel in (6, 40_001, 2 * (SCRATCH + 3) * ROW)]
    sums, pieces = (Checksums([4 * len(one) for one in tensors], torch.device("cpu")) for _ in range(2))
    pieces._multiplies = False
    assert torch.equal(pieces(tensors), sums(tensors))
    assert torch.equal(pieces(tensors), sums(tensors))  # with what the first call has left


def test_where_a_tensor_lies_in_memory_makes_no_difference() -> None:
    for numel in (5, 5_000_003):
        values = torch.arange(numel + 1, dtype=torch.float32)
        assert int(checksum(values[1:])) == int(checksum(values[1:].clone()))  # 4 bytes off an 8-byte boundary
    strided = torch.arange(12.0).view(3, 4).T
    assert int(checksum(strided)) == int(checksum(strided.contiguous()))


def test_order_of_rows_and_of_tensors_counts() -> None:
    first, second = torch.full((2 * ROW,), 1.0), torch.full((2 * ROW,), 2.0)
    assert int(checksum(torch.cat((first, second)))) != int(checksum(torch.cat((second, first))))
    one, two = torch.tensor([5, 9]), torch.tensor([9, 5])
    assert int(combined(one)) != int(combined(two))


def test_groups_are_by_value_largest_first() -> None:
    assert parts_of([7, 3, 7, 7, 3]) == ((0, 2, 3), (1, 4))
    assert parts_of([1, 2]) == ((0,), (1,))


def drift(interval: int, bad_step: int, struck: str) -> tuple[int, Any]:
    """Rank 2's weight or buffer is changed before ``bad_step``; compared at multiples of ``interval``."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(100) for name in ("first", "second", "third")}
    buffer = torch.zeros(3)
    replicas = Replicas(list(tensors.items()), lambda: [("buffer", buffer)], history=interval + 1)
    for step in range(1, 100):
        if step == bad_step and dist.get_rank() == 2:
            if struck == "buffer":
                buffer[1] = 1.0
            else:
                tensors[struck].view(torch.int32)[17] ^= 1
        replicas.remember(step)
        if step % interval == 0:
            mine = replicas.check(step)
            everybody = [torch.zeros_like(mine) for _ in range(4)]
            dist.all_gather(everybody, mine)
            if len(set(map(int, everybody))) > 1:
                return step, replicas.localise(dist.group.WORLD)
        for tensor in tensors.values():
            tensor.mul_(0.999)  # the same update everywhere
    return 0, None


def cases() -> list[tuple[int, Any]]:
    return [drift(10, 33, "second"), drift(1, 5, "third"), drift(10, 40, "first"), drift(10, 33, "buffer")]


def test_the_tensor_the_rank_and_the_first_bad_step_are_found() -> None:
    results = run_distributed(cases, 4)
    for found in results:
        by_weights, at_once, at_a_check, buffer = found
        assert by_weights[0] == 40
        # the checksum that step 33 found was wrong already, so it was the update of step 32 that left it so
        assert (by_weights[1].names, by_weights[1].groups, by_weights[1].since) == (("second",), ((0, 1, 3), (2,)), 32)
        assert (at_once[0], at_once[1].since) == (5, 4)
        assert (at_a_check[0], at_a_check[1].names, at_a_check[1].since) == (40, ("first",), 39)
        assert (buffer[0], buffer[1].names, buffer[1].since) == (40, ("buffer",), None)


class WithStatistics(nn.Module):
    """Running statistics of each rank's own batches are no drift; a buffer of another kind that differs is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(rows)))).square().mean() * self.scale[0]


def trained_with_statistics(directory: str) -> bool:
    torch.manual_seed(0)
    model = WithStatistics()
    config = Case().config(Path(directory), enabled=True)
    config["silent_consistency"]["integrity"]["replica_interval"] = 1
    config["train_micro_batch_size_per_gpu"], config["train_batch_size"] = 5, 10
    engine, *_ = ds_silent.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, 7):
        if step == 5 and dist.get_rank() == 1:
            model.scale[1] += 1.0
        engine.backward(engine(torch.randn(5, 6, generator=generator)))
        engine.step()
    engine.destroy()
    means = [torch.empty_like(model.norm.running_mean) for _ in range(2)]
    dist.all_gather(means, model.norm.running_mean)
    return torch.equal(*means)


def test_running_statistics_of_a_batch_are_no_drift(tmp_path: Path) -> None:
    assert run_distributed(trained_with_statistics, 2, (str(tmp_path),)) == [False, False]
    found = [event for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "replica-drift"]
    assert [(event["step"], event["where"]) for event in found] == [(5, "buffer scale")]
    observed = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["observed"]
    assert (observed["replicas"], observed["running statistics"]) == (True, False)  # what was left out is written
