"""Samples of weights are the same elements however the weights are cut, and are not copied whole."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_silent.capture.traced import WeightSamples
from ds_silent.trace import sample_counts, sampled

Part = tuple[int, int, Tensor]


@pytest.fixture(autouse=True)
def _rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)


def samples_of(shapes: list[tuple[int, ...]], parts: list[list[Part]], sharded: bool = True) -> list[WeightSamples]:
    """Of several ranks, each of which yields its parts."""

    def framework(own: list[Part]) -> Any:
        def weights() -> Iterator[Part]:
            return iter(own)

        numels = [torch.Size(shape).numel() for shape in shapes]
        device = torch.device("cpu")
        return SimpleNamespace(numels=numels, weights_sharded=sharded, weights=weights, group=None, device=device)

    return [WeightSamples(framework(own)) for own in parts]


def oracle(tensors: list[Tensor]) -> Tensor:
    picked = []
    for tensor in tensors:
        count = min(16, tensor.numel())
        flat = tensor.reshape(-1).tolist()
        picked += [flat[int((i + 0.5) * tensor.numel() / count)] for i in range(count)]
    return torch.tensor(picked)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_any_sharding_gives_the_same_elements(ranks: int) -> None:
    shapes: list[tuple[int, ...]] = [(5, 7), (3,), (1000,), (), (0, 4), (64, 3, 2)]
    tensors = [torch.randn(shape) for shape in shapes]
    parts: list[list[Part]] = [[] for _ in range(ranks)]
    for index, tensor in enumerate(tensors):
        edges = sorted(torch.randint(0, tensor.numel() + 1, (ranks - 1,)).tolist())
        for rank, (low, high) in enumerate(zip([0, *edges], [*edges, tensor.numel()], strict=True)):
            parts[rank].append((index, low, tensor.reshape(-1)[low:high]))
    everybody = samples_of(shapes, parts)
    values = [one.values() for one in everybody]
    whole = everybody[0].whole(sum(value for value in values if value is not None))  # type: ignore[arg-type]
    assert whole is not None
    assert torch.equal(whole, oracle(tensors))
    assert all(torch.equal(one.values(), value) for one, value in zip(everybody, values, strict=True))  # once more


def test_a_tensor_that_is_not_contiguous_is_read_in_its_own_order_and_not_copied() -> None:
    tensor, bf16 = torch.randn(40, 30).t(), torch.randn(50).bfloat16()
    [samples] = samples_of([(30, 40), (50,)], [[(0, 0, tensor), (1, 0, nn.Parameter(bf16).detach())]])
    values = samples.values()
    assert values is not None
    assert torch.equal(values[:-1], oracle([tensor, bf16.float()]))
    largest, known = [], {one.untyped_storage().data_ptr() for one in (tensor, bf16)}

    class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in known:
                largest.append(result.numel())
            return result

    with Allocations():
        samples.values()
    assert max(largest) <= 33


def test_what_is_missing_or_held_twice_is_not_known() -> None:
    tensor = torch.randn(100)
    halves: list[Part] = [(0, 0, tensor[:50]), (0, 50, tensor[50:])]

    def whole(parts: list[list[Part]]) -> Tensor | None:
        everybody = samples_of([(100,)], parts)
        return everybody[0].whole(sum(one.values() for one in everybody))  # type: ignore[arg-type,misc]

    assert whole([[halves[0]], [halves[1]]]) is not None
    assert whole([[halves[0]], []]) is None
    assert whole([halves, [halves[1]]]) is None
    assert whole([[]]) is None

    class Quantised(Tensor):
        pass

    assert whole([[(0, 0, tensor.as_subclass(Quantised))]]) is None


def test_only_the_first_rank_answers_where_all_hold_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[Part] = [(0, 0, torch.randn(100))]
    [first] = samples_of([(100,)], [parts], sharded=False)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    [second] = samples_of([(100,)], [parts], sharded=False)
    assert first.values() is not None
    assert second.values() is None


def test_of_many_tensors_fewer_elements_are_sampled_and_of_each_at_least_one() -> None:
    assert sample_counts([100, 3, 0]) == [16, 3, 0]
    assert sample_counts([100] * 1024) == [4] * 1024
    assert sample_counts([100] * 100_000) == [1] * 100_000
    assert len(sampled(100, 16)) == 16
