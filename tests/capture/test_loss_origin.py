"""Which loss a backward begins with: the forward's own, made of it, divided, of other ranks' rows, or another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn as collectives
from torch import Tensor

from ds_silent.capture.loss_origin import BACKWARDS, NODES, Crossing, comes_of, is_share, made_by, reduction_near


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(4, 10, generator=torch.Generator().manual_seed(0)).requires_grad_()


def loss_of(logits: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, torch.arange(4))


def test_a_loss_is_found_in_what_is_made_of_it(logits: Tensor) -> None:
    loss = loss_of(logits)
    made = made_by(loss)
    for root in (loss, loss / 2, 3 * loss.float() + logits.square().mean(), (loss / 4).to(torch.bfloat16)):
        assert comes_of(root, made)


def test_a_loss_by_the_way_is_not(logits: Tensor) -> None:
    """As TRL's DPO: labels are given for the sake of the logarithms of probabilities."""
    made = made_by(loss_of(logits))
    assert not comes_of(-logits.log_softmax(-1)[:, 0].mean(), made)
    assert not comes_of(loss_of(logits), made)  # the same number, another forward's
    assert not comes_of(loss_of(logits), None)


class Sink(torch.autograd.Function):
    """As DistributedDataParallel's, which every output goes through."""

    @staticmethod
    def forward(ctx: object, *outputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def test_a_node_with_several_outputs(logits: Tensor) -> None:
    loss, other = loss_of(logits), logits.mean()
    behind, by_the_way = Sink.apply(loss, other)
    assert comes_of(behind, made_by(loss))
    assert not comes_of(by_the_way, made_by(loss))
    assert not comes_of(behind, made_by(other))


def test_a_share(logits: Tensor) -> None:
    loss = loss_of(logits)
    made = made_by(loss)
    assert is_share(loss / 4, made, 4)
    assert not is_share(loss / 2, made, 4)
    assert not is_share(loss * 0.25, made, 4)
    assert not is_share(loss, made, 4)
    assert not is_share(loss / 1, made, 1)
    assert not is_share(loss_of(logits) / 4, made, 4)


@pytest.mark.parametrize(("reduction", "found"), [("none", 0), ("mean", 1), ("sum", 2)])
def test_the_reduction_of_the_nearest_loss_is_read(logits: Tensor, reduction: str, found: int) -> None:
    loss = torch.nn.functional.cross_entropy(logits, torch.arange(4), reduction=reduction).sum()
    assert reduction_near(loss / 2 + logits.square().mean()) == found
    assert reduction_near(logits.square().mean() + loss / 2) == found
    assert reduction_near(logits.square().mean()) is None
    assert reduction_near(logits.detach()) is None


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A group of one rank, whose collectives have gradients as those of many."""
    store = dist.FileStore(str(Path(tmp_path_factory.mktemp("store"), "store")), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield None
    dist.destroy_process_group()


def _deep(x: Tensor) -> Tensor:
    for _ in range(NODES + 8):
        x = x * 2.0
    return x


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("made", "found"),
    [
        (lambda x: torch.cat(collectives.all_gather(x)), True),
        (lambda x: collectives.all_reduce(x), True),
        (lambda x: x.exp() + collectives.all_reduce(x), True),
        (lambda x: functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD).wait(), True),
        (lambda x: x * x.exp(), False),
        (lambda x: _deep(collectives.all_reduce(x)), False),  # deep in a model, as between experts
    ],
)
def test_a_gather_with_a_gradient_near_the_loss_is_found(made: Callable[[Tensor], Tensor], found: bool) -> None:
    crossing = Crossing()
    crossing.look(made(torch.ones(3, requires_grad=True) * 2.0).sum())
    assert crossing.found is found


@pytest.mark.usefixtures("alone")
def test_only_the_first_backwards_are_looked_at_and_what_has_no_graph_is_nothing() -> None:
    crossing = Crossing()
    for root in (None, torch.ones(1), torch.ones(1, requires_grad=True), *[torch.ones(1)] * (BACKWARDS - 3)):
        crossing.look(root)
    crossing.look(collectives.all_reduce(torch.ones(1, requires_grad=True)))
    assert not crossing.found
