"""Weights and gradients that do not lie in memory as their elements are counted: nothing is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.capture.reduced_gradient import Remembered
from ds_silent.drill.training import hash_of
from ds_silent.frameworks.torch_common import cut, nth_share, row_of
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import each, run_distributed

STEPS, RANKS = 4, 4


class Pictures(nn.Module):
    """Convolutions, a transposed weight, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied_again = nn.Linear(6, 6, bias=False)
        self.tied_again.weight = self.tied.weight
        self.turned = nn.Parameter(torch.randn(6, 8).t() * 0.1)
        assert not self.turned.is_contiguous()

    def forward(self, pictures: Tensor) -> Tensor:
        hidden = self.second(torch.relu(self.norm(self.first(pictures)))).mean((2, 3))
        out = self.tied_again(torch.relu(self.tied(self.head(hidden) + hidden @ self.turned)))
        return out.square().mean()


def clipped(module: nn.Module, norm: float) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), norm)


def expanded(module: nn.Module, norm: float) -> None:
    """A gradient of one number, shown to the optimizer as many times as the bias is long."""
    clipped(module, norm)
    bias = module.second.bias  # type: ignore[union-attr]
    bias.grad = bias.grad.mean().expand_as(bias)


def by_hand(module: nn.Module, norm: float) -> None:
    """The gradients as views into one buffer, which is clipped at once."""
    whole = torch.cat([p.grad.permute(_memory(p)).reshape(-1) for p in module.parameters()])
    whole.mul_(min(1.0, norm / float(whole.norm())))
    begin = 0
    for parameter in module.parameters():
        order = _memory(parameter)
        part = whole[begin : begin + parameter.numel()].view([parameter.shape[dim] for dim in order])
        parameter.grad = part.permute([order.index(dim) for dim in range(len(order))])
        begin += parameter.numel()


def _memory(tensor: Tensor) -> list[int]:
    return sorted(range(tensor.ndim), key=tensor.stride, reverse=True)


def train(directory: str, clip: Callable[[nn.Module, float], None], odd: int | None, options: dict[str, Any]) -> Any:
    """On every rank; ``odd`` clips by a norm of its own."""
    torch.manual_seed(0)
    module = Pictures().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = DistributedDataParallel(module, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(7 + rank)
    observer = None
    if directory:
        block = {"output_dir": directory, "tensorboard": False, "integrity": {"replica_interval": 2}}
        observer = ds_silent.attach(model, block, optimizer=optimizer)
    for _ in range(STEPS):
        pictures = torch.randn(4, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)
        model(pictures).backward()
        clip(module, 1e-4 if rank == odd else 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    if observer is not None:
        observer.close()
    events = list(read_events(Path(directory, "events.jsonl"))) if directory and not rank else []
    records = list(read_metrics(Path(directory, "metrics.jsonl"))) if directory and not rank else []
    return events, records, hash_of(module.parameters())


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(7, 3, 3, 3),
    "channels_last": lambda: torch.randn(7, 3, 3, 3).to(memory_format=torch.channels_last),
    "channels_last, one row": lambda: torch.randn(1, 6, 3, 3).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.randn(5, 4, 2, 2, 2).to(memory_format=torch.channels_last_3d),
    "transposed": lambda: torch.randn(6, 9).t(),
    "expanded": lambda: torch.randn(()).expand(11),
    "expanded rows": lambda: torch.randn(5).expand(6, 5),
    "every second": lambda: torch.randn(20)[::2],
    "a view into a buffer": lambda: torch.randn(100)[13:41].view(4, 7),
    "a number": lambda: torch.randn(()),
    "nothing": lambda: torch.randn(0, 3),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_shares_make_up_the_whole_and_are_views_of_any_layout(ranks: int) -> None:
    gradients = [make() for make in LAYOUTS.values()]
    numels, rows = [g.numel() for g in gradients], [row_of(g) for g in gradients]
    parts: list[list[Tensor]] = [[] for _ in gradients]
    for rank in range(ranks):
        for piece in nth_share(numels, rank, ranks, rows):
            part = cut(gradients[piece.index], piece)
            assert part is not None
            assert part.numel() == piece.numel
            assert part.untyped_storage().data_ptr() == gradients[piece.index].untyped_storage().data_ptr()
            parts[piece.index].append(part.reshape(-1))
    for gradient, own in zip(gradients, parts, strict=True):
        assert torch.equal(torch.cat(own) if own else torch.zeros(0), gradient.reshape(-1))


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "nothing" and "expanded" not in name])
def test_a_write_to_a_gradient_of_any_layout_shows_and_nothing_else_does(name: str) -> None:
    gradient = LAYOUTS[name]()

    def share() -> list[Tensor]:
        pieces = nth_share([gradient.numel()], 0, 1, [row_of(gradient)])
        return [part for piece in pieces if (part := cut(gradient, piece)) is not None]

    before = Remembered(share())
    between = [torch.randn(gradient.numel()) for _ in range(8)]  # memory that a copy may have had
    assert not before.moved(share())
    assert before.differs(share()) == 0
    gradient.mul_(0.5)
    assert before.moved(share())
    assert before.differs(share()) == 1
    del between


WAYS = {
    "channels_last": (clipped, {}),
    "channels_last, views": (clipped, {"gradient_as_bucket_view": True}),
    "channels_last, static graph": (clipped, {"static_graph": True}),
    "channels_last, unused allowed": (clipped, {"find_unused_parameters": True}),
    "views into a buffer": (by_hand, {}),
    "expanded": (expanded, {}),
}


def train_all(directory: str, odd: int | None) -> dict[str, Any]:
    return {
        name: train(str(Path(directory, name)) if directory else "", clip, odd, options)
        for name, (clip, options) in WAYS.items()
    }


def test_clipping_a_gradient_of_any_layout_is_no_change_that_is_hidden(tmp_path: Path) -> None:
    cases = {"observed": (str(tmp_path), None), "plain": ("", None)}
    observed, plain = run_distributed(each, RANKS, (train_all, cases))[0].values()
    for name, (events, records, weights) in observed.items():
        assert [one for one in events if one["severity"] != "info" or one["kind"] == "gradient-changed"] == [], name
        assert len(records) == STEPS, name
        assert weights == plain[name][2], name


def test_a_rank_that_clips_by_another_norm_is_one_error(tmp_path: Path) -> None:
    for name, (events, _, _) in run_distributed(train_all, RANKS, (str(tmp_path), 2))[0].items():
        errors = [event for event in events if event["severity"] != "info"]
        assert [(one["kind"], one["ranks"], one["step"]) for one in errors] == [("aggregation-error", [2], 1)], name
        scaled = name != "expanded"  # there each rank's gradient is no multiple of the aggregate any more
        assert ("rank 2 applied" if scaled else "The script has changed") in errors[0]["message"], name
        assert ("Clip by the norm of the whole" if scaled else "Look first for code") in errors[0]["remedy"], name
        assert not scaled or "network" not in errors[0]["remedy"], name
