"""Whether ranks that each take all of their data set take the same rows: by what it holds, and in trainings."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    TensorDataset,
    random_split,
)

import ds_silent
from ds_silent.capture.data_set import held_by
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import run_distributed


def held(data: Any, **given: Any) -> float:
    return held_by(iter(DataLoader(data, 4, **given)))


def tensors(rows: int = 100, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(rows, 3, generator=generator), torch.arange(rows) % 5)


class Texts(Dataset[Any]):
    """Lists of tokens, as most fine-tunes have."""

    def __init__(self, rows: int = 100, seed: int = 0, rank: int | None = None):
        draws = random.Random(seed)
        self.rows = [{"input_ids": [draws.randrange(50) for _ in range(20)], "labels": [1] * 20} for _ in range(rows)]
        self.transform = lambda row: (row, seed)
        if rank is not None:
            self.chosen: Any = range(rank, rows, 2)

    def __len__(self) -> int:
        return len(getattr(self, "chosen", self.rows))

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Chosen(Texts):
    """Rows that something chooses which cannot be read."""

    def __init__(self, rank: int):
        super().__init__()
        self.chosen = memoryview(bytes(range(rank, 100, 2)))


class Drawn(Texts):
    def __getitem__(self, index: int) -> Any:
        return self.rows[random.randrange(len(self.rows))]


class ByRank(Texts):
    def __getitem__(self, index: int) -> Any:
        return self.rows[(index + dist.get_rank()) % len(self.rows)]


class Stream(Dataset[Any]):
    """Tokens in blocks."""

    def __init__(self, seed: int):
        self.tokens = np.random.default_rng(seed).integers(0, 50, 1000).astype(np.uint16)

    def __len__(self) -> int:
        return len(self.tokens) // 10

    def __getitem__(self, index: int) -> Any:
        return self.tokens[10 * index : 10 * index + 10]


class Hidden(Dataset[Any]):
    """Only places and offsets can be read, and what is to be filled."""

    def __init__(self) -> None:
        self.file, self.order, self.offsets = object(), torch.randperm(100).tolist(), list(range(0, 300, 3))
        self.buffer, self.classes = torch.zeros(100, 3), torch.arange(100) // 10

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return index


def parts(seed: int, one: int) -> Any:
    return random_split(tensors(), [50, 50], torch.Generator().manual_seed(seed))[one]


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (tensors, lambda: tensors(seed=1)),
        (Texts, lambda: Texts(seed=1)),
        (Texts, lambda: Texts(rows=101)),
        (lambda: Texts(rank=0), lambda: Texts(rank=1)),
        (lambda: Stream(0), lambda: Stream(1)),
        (lambda: Subset(tensors(), range(0, 100, 2)), lambda: Subset(tensors(), range(1, 100, 2))),
        (lambda: parts(3, 0), lambda: parts(3, 1)),
        (lambda: ConcatDataset([tensors(), Texts()]), lambda: ConcatDataset([tensors(), Texts(seed=1)])),
        (lambda: [(float(row), row % 3) for row in range(64)], lambda: [(row + 0.5, row % 3) for row in range(64)]),
    ],
)
def test_data_sets_made_twice_are_the_same_and_others_are_not(make: Any, other: Any) -> None:
    assert held(make(), shuffle=True) == held(make()) > 0
    assert held(other()) not in (held(make()), 0.0)
    assert held(make()) == float(torch.tensor(held(make()), dtype=torch.float32))


def test_hugging_faces_data_sets_are_known() -> None:
    data = pytest.importorskip("datasets").Dataset.from_dict({"a": list(range(30))})
    assert held(data) > 0
    assert held(data.select(range(0, 30, 2))) not in (0.0, held(data.select(range(1, 30, 2))))


@pytest.mark.parametrize(
    "make",
    [
        Hidden,
        lambda: Subset(Hidden(), torch.randperm(50).tolist()),  # type: ignore[arg-type]
        lambda: Chosen(0),
        Drawn,
        ByRank,
        lambda: Subset(ByRank(), range(50)),
        lambda: TensorDataset(torch.zeros(100, 3)),  # a buffer that is to be filled
        lambda: list(range(100)),
        lambda: [object() for _ in range(100)],
    ],
)
def test_what_does_not_tell_its_rows_is_unknown(make: Any) -> None:
    assert held(make()) == 0.0


def test_a_pass_that_does_not_take_each_row_once_is_none_of_the_whole_data() -> None:
    data = tensors()
    for sampler in (RandomSampler(data, True), RandomSampler(data, num_samples=50), DistributedSampler(data, 2, 0)):
        assert held(data, sampler=sampler) == 0.0
    assert held_by(iter(DataLoader(data, None))) > 0  # one row at a time
    assert held_by(iter([1])) == 0.0


# -- in trainings -----------------------------------------------------------------------------------------------------


class Augmented(Dataset[Any]):
    """Rows that never come again bit for bit."""

    def __init__(self, rows: int, seed: int):
        self.images = torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index] + 0.01 * torch.randn(6)


def trained(directory: str, style: str, batch: int, workers: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data: Any = Augmented(2000, seed=rank if style == "own" else 0)
    order = None if style == "in order" else torch.Generator().manual_seed(rank if style == "each" else 3)
    sampler: Any = DistributedSampler(data) if style == "dealt" else None
    if style == "one pair":
        order = torch.Generator().manual_seed(min(rank, ranks - 2))  # the last two alike
    shuffle = style not in ("in order", "dealt")
    loader = DataLoader(data, batch, shuffle, sampler, generator=order, num_workers=workers)
    torch.manual_seed(rank)
    config = {"output_dir": directory, "tensorboard": False}
    with ds_silent.observe(model, optimizer, config=config):
        for step, rows in enumerate(loader):
            if step == 6:
                break
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()


def events(directory: Path, kind: str = "duplicate-data") -> list[tuple[int, str, list[int]]]:
    found = [event for event in read_events(directory / "events.jsonl") if event["kind"] == kind]
    return [(event["step"], event["severity"], event["ranks"]) for event in found]


@pytest.mark.parametrize(
    ("style", "ranks", "batch", "workers", "expected"),
    [
        ("each", 2, 8, 0, [(1, "warning", [0, 1])]),
        ("alike", 3, 8, 0, [(1, "error", [0, 1, 2])]),
        ("in order", 2, 4, 0, [(2, "error", [0, 1])]),  # eight rows tell the order
        ("alike", 2, 4, 2, [(1, "error", [0, 1])]),  # the workers have drawn ahead
        ("one pair", 3, 8, 0, [(1, "error", [1, 2])]),
        ("own", 2, 8, 0, []),  # all drawn with one seed, as a script does that gives each rank a part
        ("dealt", 2, 8, 0, []),
    ],
)
def test_ranks_that_each_take_all_rows_are_told_at_once_though_no_row_is_seen_twice(
    style: str, ranks: int, batch: int, workers: int, expected: Any, tmp_path: Path
) -> None:
    run_distributed(trained, ranks, (str(tmp_path), style, batch, workers))
    assert events(tmp_path) == expected
