"""Whether ranks that each take all of their data set take the same rows: by what it holds, and in trainings."""

from __future__ import annotations

import random
from functools import partial
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
from ds_silent.capture.data_set import held_by, rows_held_by
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import each, run_distributed


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


class Rows(list[Any]):
    """Rows that are made as they are asked for."""

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("a data set is asked for no row")


class Made(Texts):
    def __init__(self) -> None:
        super().__init__()
        self.more = Rows(range(100))


class Numbered(Dataset[Any]):
    """Names that are equal on all ranks, and what reads them."""

    def __init__(self, read: Any):
        self.names, self.read = [f"row {row}" for row in range(100)], read

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return self.read(self.names[index])


class Files(Numbered):
    """Copies of the same files."""

    def __init__(self, root: str):
        super().__init__(None)
        self.names = [f"{root}/{name}.png" for name in self.names]


class Reader:
    def __init__(self, root: int):
        self.root = root

    def read(self, name: str) -> int:
        return self.root


def read_at(root: int, name: str) -> int:
    return root


def in_a_closure(rank: int) -> Any:
    class Part(Texts):
        def __getitem__(self, index: int) -> Any:
            return self.rows[2 * index + rank]

    return Part()


def by_default(rank: int) -> Any:
    def read(name: str, root: int = rank) -> int:
        return root

    return Numbered(read)


START = 0


class Offset(Texts):
    def __getitem__(self, index: int) -> Any:
        return self.rows[START + index]


def from_a_global(rank: int) -> Any:
    global START
    START = rank
    return Offset()


def of_a_class(rank: int) -> Any:
    return type("Part", (Texts,), {"first": rank})()


def half(seed: int, columns: bool) -> TensorDataset:
    """Rows of which every second, or every fourth number of each, is a rank's own."""
    rows = torch.randn(500, 64, generator=torch.Generator().manual_seed(9))
    part = rows[:, 1::4] if columns else rows[1::2]
    part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(seed)))
    return TensorDataset(rows)


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
        *[(partial(half, 1, columns), partial(half, 2, columns)) for columns in (False, True)],
        (lambda: ConcatDataset([tensors(), Texts()]), lambda: ConcatDataset([tensors(), Texts(seed=1)])),
        (lambda: [(float(row), row % 3) for row in range(64)], lambda: [(row + 0.5, row % 3) for row in range(64)]),
        *[
            (partial(make, 0), partial(make, 1))
            for make in (
                lambda rank: Numbered(Reader(rank).read),
                lambda rank: Numbered(partial(read_at, rank)),
                *(in_a_closure, by_default, from_a_global, of_a_class),
            )
        ],
    ],
)
def test_data_sets_made_twice_are_the_same_and_others_are_not(make: Any, other: Any) -> None:
    assert held(make(), shuffle=True) == held(make()) > 0
    assert held(other()) not in (held(make()), 0.0)
    assert held(make()) == float(torch.tensor(held(make()), dtype=torch.float32))


def test_of_rows_that_are_dealt_only_the_rows_count() -> None:
    rows = rows_held_by
    assert rows(tensors()) == rows(tensors()) > 0.0
    assert rows(tensors()) != rows(tensors(seed=1))
    assert rows(Texts()) == rows(Subset(Texts(seed=0), range(50)))  # what is chosen of them the preflight compares
    noted = Texts()
    noted.folder = "rank-1"  # type: ignore[attr-defined]
    assert rows(noted) == rows(Texts()) != held(Texts())
    assert rows(ByRank()) == rows(Drawn()) == rows(Texts())
    assert rows(Numbered(object())) == rows(Numbered(Reader(1))) > 0.0
    assert rows(torch.arange(100)) == rows(Hidden()) == 0.0
    cached = [Texts(), Texts()]
    for first, one in zip((0, 50), cached, strict=True):
        one.cache = [f"row {row}" if first <= row < first + 20 else None for row in range(100)]  # type: ignore[attr-defined]
    assert rows(cached[0]) == rows(cached[1]) == rows(Texts())
    staged = [Files(root) for root in ("/tmp/0", "/tmp/1")]
    assert rows(staged[0]) == rows(staged[1]) > 0.0
    assert held(staged[0]) != held(staged[1])


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
        Made,
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


class Images(Dataset[Any]):
    """Rows that never come again bit for bit, if ``noise`` is not 0."""

    def __init__(self, rows: int, seed: int, noise: float):
        self.images = torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))
        self.noise = noise

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index] + self.noise * torch.randn(6)


def own_rows(rows: list[Tensor]) -> Tensor:
    """Every rank has drawn the same batch, and takes a part of it."""
    return torch.stack(rows)[dist.get_rank() :: dist.get_world_size()]


def seeded(rank: int, worker: int) -> None:
    torch.manual_seed(10 * rank + worker)  # the loader's own seed is alike where its order is


def trained(directory: str, style: str, noise: float, batch: int, workers: int, steps: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data: Any = Images(2000, rank if "own" in style else 0, noise)
    seeds = {"each": rank, "two": min(rank, ranks - 2)}  # the last two alike
    order = None if style == "in order" else torch.Generator().manual_seed(seeds.get(style, 3))
    sampler: Any = DistributedSampler(data) if "dealt" in style else None
    sampler = DistributedSampler(data, 1, 0) if "one share" in style else sampler
    collate = own_rows if style == "collated" else None
    shuffle = sampler is None and style != "in order"
    more: Any = {"num_workers": workers, "worker_init_fn": partial(seeded, rank)} if workers else {}
    loader = DataLoader(data, batch, shuffle, sampler, generator=order, collate_fn=collate, **more)
    torch.manual_seed(rank)
    given = loader if "share" in style else None
    with ds_silent.observe(model, optimizer, loader=given, config={"output_dir": directory, "tensorboard": False}):
        for step, rows in enumerate(loader):
            if step == steps:
                break
            optimizer.zero_grad()
            model(rows[rank::ranks] if style == "cut" else rows).square().mean().backward()
            optimizer.step()


def told(directory: Path) -> list[tuple[int, str, list[int], bool]]:
    """Step, severity, ranks, and whether the order is said to be the same."""
    found = [event for event in read_events(directory / "events.jsonl") if event["kind"] == "duplicate-data"]
    return [(e["step"], e["severity"], e["ranks"], "in the same order" in e["message"]) for e in found]


AUGMENTED = [
    ("each", 2, 8, 0, (1, [0, 1], False)),
    ("alike", 3, 8, 0, (1, [0, 1, 2], True)),
    ("in order", 2, 4, 0, (2, [0, 1], True)),  # eight rows tell the order
    ("alike", 2, 4, 2, (1, [0, 1], True)),  # the workers have drawn ahead
    ("two", 3, 8, 0, (1, [0, 1, 2], True)),
    ("own", 2, 8, 0, None),  # all drawn with one seed, as a script does that gives each rank a part
    ("dealt", 2, 8, 0, None),
    ("own, dealt again", 2, 8, 0, None),
    ("own, one share", 2, 8, 0, None),
    ("collated", 2, 16, 0, None),  # each rank takes its part of a batch that all have drawn
    ("cut", 2, 16, 0, None),
]
REPEATED = ("alike", "in order")


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of all trainings, each with its own."""
    directory = tmp_path_factory.mktemp("trainings")
    for ranks in (2, 3):
        cases = {
            f"{style} {ranks}": (style, 0.01, batch, workers, 6)
            for style, of, batch, workers, _ in AUGMENTED
            if of == ranks
        }
        if ranks == 2:
            cases |= {"elsewhere": ("each", 0.0, 8, 0, 40), "one share": ("one share", 0.01, 8, 0, 4)}
            cases |= {f"repeated {style}": (style, 0.0, 8, 0, 4) for style in REPEATED}
        started = {name: (str(directory / name), *given) for name, given in cases.items()}
        run_distributed(each, ranks, (trained, started))
    return directory


@pytest.mark.parametrize(("style", "ranks", "batch", "workers", "expected"), AUGMENTED)
def test_augmented_rows_of_one_data_set_are_noted_though_none_is_seen_twice(
    style: str, ranks: int, batch: int, workers: int, expected: Any, trainings: Path
) -> None:
    of_all = told(trainings / f"{style} {ranks}")
    found = [(step, at, same) for step, severity, at, same in of_all if severity == "info"]
    assert found == ([] if expected is None else [expected])
    assert len(of_all) == len(found)


@pytest.mark.parametrize("style", ["own, dealt again", "dealt", "own"])
def test_rows_that_were_split_before_a_sampler_splits_them_are_noted(style: str, trainings: Path) -> None:
    events = read_events(trainings / f"{style} 2" / "events.jsonl")
    notes = [(event["step"], event["severity"]) for event in events if event["kind"] == "low-coverage"]
    assert notes == ([(1, "info")] if "again" in style else [])


def test_a_sampler_of_one_share_is_right_of_own_rows_alone(trainings: Path) -> None:
    assert told(trainings / "one share") == [(0, "error", [0, 1], False)]
    events = read_events(trainings / "own, one share 2" / "events.jsonl")
    assert [event for event in events if event["severity"] != "info"] == []


def test_a_few_rows_that_come_again_elsewhere_make_a_warning_of_it(trainings: Path) -> None:
    """Of 2,000 rows in orders of their own: after 40 steps of 8 two ranks have shared some 50."""
    (first, *note), (step, *warning) = told(trainings / "elsewhere")
    assert (first, note, warning) == (1, ["info", [0, 1], False], ["warning", [0, 1], False])
    assert 4 <= step <= 30


@pytest.mark.parametrize("style", REPEATED)
def test_the_same_rows_at_a_step_are_an_error_alone(style: str, trainings: Path) -> None:
    assert told(trainings / f"repeated {style}") == [(1, "error", [0, 1], False)]
