"""What is trained: a small residual network on scikit-learn's digits, and the drill's language model.

    task = TASKS["digits"]
    model = task.model(seed=0)
    loss = model(*task.batch(seed=0, step=1, rank=2, ranks=4))
    task.score(model)                      # accuracy, %; or the loss on held-out rows

GroupNorm, not BatchNorm: the running statistics of BatchNorm differ between healthy replicas, which keep each rank's
own rows in them, and would be a drift of the task itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from ds_silent.practice.model import PracticeModel, PracticeRows, make_rows, warm_up

TEST_IMAGES = 600  # of 1,797; the split is the same for every seed
HELD_OUT_ROWS, TRAINING_ROWS = 512, 4096


@dataclass(frozen=True)
class Task:
    """``batch(seed, step, rank, ranks)``: what the model's forward takes. ``score(model)``: see ``measure``."""

    model: Callable[[int], nn.Module]
    batch: Callable[[int, int, int, int], tuple[Tensor, Tensor]]
    score: Callable[[nn.Module], float]
    measure: str
    micro_batch: int
    better: int  # 1: more is better, -1: less is


def shard_of(rows: int, micro_batch: int, seed: int, step: int, rank: int, ranks: int) -> Tensor:
    """(micro_batch,) int64: this rank's rows of ``step`` (from 1), without repetition within an epoch."""
    per_epoch = rows // (micro_batch * ranks)
    epoch, within = divmod(step - 1, per_epoch)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed * 1_000 + epoch))
    first = (within * ranks + rank) * micro_batch
    return order[first : first + micro_batch]


# -- digits ----------------------------------------------------------------------------------------------------------

DIGITS_BATCH, CHANNELS, GROUPS = 16, 16, 4


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (n, 1, 8, 8) fp32 of mean about 0 and labels (n,) int64: training, then test."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 8.0 - 1.0
    known = torch.tensor(labels, dtype=torch.int64)[order]
    return pixels[TEST_IMAGES:], known[TEST_IMAGES:], pixels[:TEST_IMAGES], known[:TEST_IMAGES]


class Block(nn.Module):
    """Two 3 x 3 convolutions with GroupNorm beside a shortcut, as in ResNet-18; ``stride`` 2 doubles the channels."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        width = channels * stride
        self.first = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(GROUPS, width) for _ in range(2))
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(images)))
        return F.relu(self.norms[1](self.second(inner)) + self.shortcut(images))


class DigitsNet(nn.Module):
    """A residual network for 8 x 8 images; its forward gives the loss, as the language model's does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, CHANNELS, 3, 1, 1, bias=False)
        self.norm = nn.GroupNorm(GROUPS, CHANNELS)
        self.blocks = nn.Sequential(Block(CHANNELS, 1), Block(CHANNELS, 2))
        self.head = nn.Linear(2 * CHANNELS, 10)

    def logits(self, images: Tensor) -> Tensor:
        hidden = self.blocks(F.relu(self.norm(self.stem(images))))
        result: Tensor = self.head(hidden.mean(dim=(2, 3)))
        return result

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(images), labels)


def digits_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return DigitsNet()


def digits_batch(seed: int, step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    images, labels, *_ = digits()
    rows = shard_of(len(images), DIGITS_BATCH, seed, step, rank, ranks)
    return images[rows], labels[rows]


def accuracy(model: nn.Module) -> float:
    """Per cent of the test images; a replica with a NaN in its logits has recognised nothing."""
    assert isinstance(model, DigitsNet)
    *_, images, labels = digits()
    with torch.no_grad():
        logits = model.logits(images)
    right = (logits.argmax(dim=1) == labels) & logits.isfinite().all(dim=1)
    return 100.0 * float(right.double().mean())


# -- language --------------------------------------------------------------------------------------------------------

LANGUAGE_BATCH = 8


@cache
def rows() -> tuple[PracticeRows, PracticeRows]:
    """Training rows and held-out rows, of the distribution that the warm-up has not seen."""
    return make_rows(TRAINING_ROWS, seed=1), make_rows(HELD_OUT_ROWS, seed=2)


@cache
def _warm() -> dict[str, Tensor]:
    torch.manual_seed(42)
    model = PracticeModel()
    warm_up(model)
    return model.state_dict()


def language_model(seed: int) -> nn.Module:
    """The drill's model, warmed up; a seed changes the rows, the dropout and the errors."""
    model = PracticeModel()
    model.load_state_dict(_warm())
    torch.manual_seed(seed)
    return model


def language_batch(seed: int, step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    known, _ = rows()
    own = shard_of(TRAINING_ROWS, LANGUAGE_BATCH, seed, step, rank, ranks)
    return known.tokens[own], known.labels[own]


def held_out_loss(model: nn.Module) -> float:
    """Nats per token on the held-out rows, without dropout."""
    _, held_out = rows()
    model.eval()
    with torch.no_grad():
        loss = float(model(held_out.tokens, held_out.labels))
    model.train()
    return loss


TASKS = {
    "digits": Task(digits_net, digits_batch, accuracy, "accuracy, %", DIGITS_BATCH, 1),
    "language": Task(language_model, language_batch, held_out_loss, "held-out loss", LANGUAGE_BATCH, -1),
}
