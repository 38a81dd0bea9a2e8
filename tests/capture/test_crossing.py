"""A loss that is made of other ranks' rows is known by its graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn as collectives
from torch import Tensor

from ds_silent.capture.crossing import BACKWARDS, NODES, Crossing


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
