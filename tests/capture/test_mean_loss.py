"""Which loss a backward begins with: the forward's own, made of it, divided, or another one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ds_silent.capture.loss_origin import comes_of, is_share, made_by


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
