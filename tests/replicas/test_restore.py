"""Comparing, restoring and averaging replicas against what the words say, in float64, on real ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.kernels.checksums import Bits, Replica
from ds_silent.replicas import repair
from ds_silent.replicas.compare import compare
from ds_silent.replicas.repair import Averaging, average, restore
from ds_silent.respond import responder as respond
from tests.support.distributed import run_on_kept_ranks

CPU = torch.device("cpu")


def replica() -> list[tuple[str, Tensor]]:
    """The same on every rank: odd sizes, every kind of dtype, an empty one, single numbers."""
    generator = torch.Generator().manual_seed(3)
    return [
        ("weight", torch.randn(7, 5, generator=generator)),
        ("bias", torch.randn(33, generator=generator).bfloat16()),
        ("empty", torch.zeros(0)),
        ("step", torch.tensor(41.0)),
        ("count", torch.tensor([5, 2**40 + 1])),
        ("mask", torch.tensor([True, False, True])),
        ("wide", torch.randn(11, generator=generator, dtype=torch.float64)),
    ]


def group() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def raw(items: list[tuple[str, Tensor]]) -> list[bytes]:
    return [tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for _, tensor in items]


def restored() -> dict[str, Any]:
    """Rank 1 has another weight and mask, rank 2 another count; no rank has two right neighbours in everything."""
    rank, items = dist.get_rank(), replica()
    own = dict(items)
    if rank == 1:
        own["weight"][3, 2] += 1e-6
        own["mask"][1] = True
        own["bias"][32] = -0.0
    if rank == 2:
        own["count"][1] -= 1
    bits = Bits()
    found = compare(items, bits, group())
    sent = restore(items, found, group(), CPU)
    still = compare(items, bits, group())
    return {
        "names": [items[place][0] for place in found.apart],
        "groups": found.groups,
        "right": raw(items) == raw(replica()),
        "equal": still.equal,
        "sent": sent,
        "agree": compare(replica(), bits, group()).groups,
    }


def test_each_tensor_gets_the_bits_of_its_own_majority() -> None:
    for result in run_on_kept_ranks(restored, 3):
        assert result["names"] == ["weight", "bias", "count", "mask"]
        assert result["groups"] == ((0,), (1,), (2,))  # no whole replica has a majority
        assert result["right"]
        assert result["equal"]
        assert result["sent"] == 4 * 35 + 4 * 17 + 16 + 4  # padded to whole words
        assert result["agree"] == ((0, 1, 2),)


def averaged() -> dict[str, Any]:
    repair.BUCKET = 16  # several buckets, and tensors larger than one
    rank = dist.get_rank()
    tensors = [torch.full((40,), float(rank)), torch.tensor([1.0 + rank]).bfloat16(), torch.tensor(10.0 + rank)]
    tensors += [torch.tensor([rank, 7 - rank]), torch.tensor([math.nan if rank == 1 else 2.0 * rank])]
    lost = torch.full((3,), math.inf)  # on every rank: nothing to average with
    sent, repeated = average([*tensors, lost], group(), CPU)
    return {"values": [tensor.tolist() for tensor in tensors], "lost": lost.tolist(), "sent": sent, "again": repeated}


def test_the_mean_is_that_of_finite_replicas_and_counts_take_the_largest() -> None:
    for result in run_on_kept_ranks(averaged, 3):
        mean, narrow, step, counts, finite = result["values"]
        assert mean == [1.0] * 40
        assert narrow == [2.0]
        assert step == 12.0
        assert counts == [2, 7]
        assert finite == [2.0]  # of ranks 0 and 2
        assert result["lost"] == [math.inf] * 3
        assert result["again"] == 0


def unlike() -> dict[str, Any]:
    """Ranks that do not even hold the same tensors: said, and nothing is exchanged of the rest."""
    items = replica()[: 3 + dist.get_rank()]
    found = compare(items, Bits(), group())
    return {"comparable": found.comparable, "equal": found.equal, "apart": found.apart}


def test_ranks_without_the_same_tensors_are_not_comparable() -> None:
    assert run_on_kept_ranks(unlike, 2) == [{"comparable": False, "equal": False, "apart": ()}] * 2


class _Sampled:
    """As much of a capture as the next interval needs."""

    def __init__(self, gradient: Tensor):
        self.group, self.device = group(), CPU
        self._gradient = gradient

    def gradient_sample(self, stride: int) -> Tensor:
        part = self._gradient[::stride]
        return torch.tensor([float(part.square().sum()), float(part.numel())])


def next_intervals() -> dict[str, Any]:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(9)) + 0.01 * torch.randn(
        1000, generator=generator
    )
    gradient = 0.1 * torch.randn(1000, generator=generator)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (weights.double(), gradient.double()))
    mean = torch.stack([own for own, _ in everybody]).mean(0)
    stride = respond.SAMPLE
    ratios = [float(g[::stride].norm() / (own - mean)[::stride].norm()) for own, g in everybody]
    expected = sum(ratios) / len(ratios)
    found = {}
    for largest in (5, 1000):
        capture: Any = _Sampled(gradient)
        dynamic = respond._Dynamic(capture, lambda: Replica([], lambda: None), largest)
        averaging = Averaging([weights], group(), CPU).start()
        found[largest] = dynamic._next_interval(averaging)
    capture = _Sampled(torch.zeros(1000))
    found[0] = respond._Dynamic(capture, lambda: Replica([], lambda: None), 9)._next_interval(
        Averaging([weights], group(), CPU).start()
    )
    return {"found": found, "expected": expected}


def test_the_next_interval_is_the_formula_within_its_bounds() -> None:
    for result in run_on_kept_ranks(next_intervals, 3):
        assert 5 < result["expected"] < 1000
        assert result["found"] == {5: 5, 1000: int(result["expected"]), 0: 1}
