"""Loaders of a script's own: what they say of the data, and what is counted of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from ds_silent.capture import loaders
from ds_silent.capture.forwards import RowsOfData
from ds_silent.capture.loader_rules import WorkerRows
from ds_silent.capture.loaders import DataFacts, LoaderWatch, data_facts
from ds_silent.capture.row_hashes import RowDimension, batch_tensors, rows_of
from ds_silent.patches import Patches

# -- what a loader says -----------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


class Streamed(Stream):
    """As datasets has it."""

    def __init__(self, shuffled: bool) -> None:
        self._shuffling = object() if shuffled else None

    def set_epoch(self, epoch: int) -> None:
        """It is there without a shuffle, too."""


class ByEpoch(Sampler[list[int]]):
    """Batches of a script's own."""

    def set_epoch(self, epoch: int) -> None:
        """A shuffle by it may follow."""

    def __iter__(self) -> Any:
        return iter([[1, 2], [0, 3]])

    def __len__(self) -> int:
        return 2


class Unsure(list[int]):
    def __len__(self) -> int:
        raise TypeError("who knows")


def shards(rows: int, shuffle: bool = True) -> DistributedSampler[int]:
    return DistributedSampler(list(range(rows)), num_replicas=4, rank=1, shuffle=shuffle)  # type: ignore[arg-type]


class Wrapped(list[int]):
    """A sampler as a data set: so Lightning, and Catalyst's many copies, cut a script's own sampler into shares."""

    def __init__(self, sampler: Sampler[Any]) -> None:
        super().__init__(ROWS)
        self._sampler = sampler


def wrapped(sampler: Sampler[Any]) -> DistributedSampler[int]:
    return DistributedSampler(Wrapped(sampler), num_replicas=4, rank=1, shuffle=False)  # type: ignore[arg-type]


ROWS = list(range(10))


@pytest.mark.parametrize(
    ("source", "ranks", "expected"),
    [
        (shards(10), 4, DataFacts(10, True)),
        (DataLoader(ROWS, sampler=shards(10, shuffle=False)), 4, DataFacts(10, False)),  # type: ignore[arg-type]
        (iter(DataLoader(ROWS, batch_size=2, sampler=shards(10))), 4, DataFacts(10, True)),  # type: ignore[arg-type]
        (DataLoader(ROWS, shuffle=True), 1, DataFacts(10, True)),  # type: ignore[arg-type]
        (iter(DataLoader(ROWS)), 1, DataFacts(10, False)),  # type: ignore[arg-type]
        (DataLoader(ROWS, shuffle=True), 4, DataFacts(None, True)),  # type: ignore[arg-type] # split before, or not?
        (RandomSampler(ROWS), 1, DataFacts(10, True)),
        (DataLoader(ROWS, batch_sampler=ByEpoch()), 1, DataFacts(10, None, by_epoch=True)),  # type: ignore[arg-type]
        (DataLoader(ROWS, sampler=wrapped(ByEpoch())), 4, DataFacts(10, None, by_epoch=True)),  # type: ignore[arg-type]
        (DataLoader(ROWS, sampler=wrapped(RandomSampler(ROWS))), 4, DataFacts(10, True)),  # type: ignore[arg-type]
        (DataLoader(ROWS, sampler=wrapped(SequentialSampler(ROWS))), 4, DataFacts(10, False)),  # type: ignore[arg-type]
        (DataLoader(Streamed(True)), 1, DataFacts(by_epoch=True)),
        (DataLoader(Streamed(False)), 1, DataFacts()),
        (SequentialSampler(ROWS), 1, DataFacts(10, False)),
        (RandomSampler(ROWS, replacement=True), 1, DataFacts()),
        (DataLoader(ROWS, sampler=WeightedRandomSampler([1.0] * 10, 10)), 1, DataFacts()),  # type: ignore[arg-type]
        (DataLoader(Stream()), 1, DataFacts()),
        (iter(DataLoader(Stream())), 4, DataFacts()),
        (DataLoader(Unsure(ROWS), sampler=ROWS), 1, DataFacts()),  # type: ignore[arg-type]
        (None, 4, DataFacts()),
        (iter(ROWS), 4, DataFacts()),
    ],
)
def test_what_a_loader_says(source: Any, ranks: int, expected: DataFacts) -> None:
    assert data_facts(source, ranks) == expected


def test_the_loader_of_the_training_is_found_and_torch_is_left_as_it_was() -> None:
    untouched = _BaseDataLoaderIter.__next__
    watch, other = LoaderWatch(1), LoaderWatch(1)
    watch.connect()
    other.connect()
    training = DataLoader(ROWS, batch_size=4, shuffle=True)  # type: ignore[arg-type]
    evaluation = DataLoader(list(range(3)))  # type: ignore[arg-type]
    begun = []
    for _ in range(2):
        for step, _batch in enumerate(training):
            begun.append(watch.forward())
            if step == 1:
                list(evaluation)
    assert begun == [True, False, False] * 2
    assert watch.facts == DataFacts(10, True)
    assert watch.seen
    other.remove()
    list(evaluation)
    next(iter(training))
    assert watch.forward()
    watch.remove()
    assert _BaseDataLoaderIter.__next__ is untouched
    list(training)
    assert not watch.forward()


def test_evaluations_within_an_epoch_leave_the_trainings_pass(caplog: pytest.LogCaptureFixture) -> None:
    watch, evaluations = LoaderWatch(1).connect(), [iter(DataLoader(ROWS)) for _ in range(8)]  # type: ignore[arg-type]
    given = []
    for _batch in DataLoader(ROWS, batch_size=1):  # type: ignore[arg-type]
        assert watch.forward() == (not given)
        assert watch.loader_pass is not None
        given.append(watch.loader_pass.given)
        for evaluation in evaluations:  # they stay under way, more than are remembered
            next(evaluation)
    watch.remove()
    assert given == list(range(1, 11))
    assert not caplog.text


def test_only_the_trainings_data_set_is_read_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    training, held_out = (TensorDataset(torch.randn(rows, 2)) for rows in (8, 4))
    read: list[Any] = []
    monkeypatch.setattr(loaders, "held_by", lambda iterator: read.append(iterator._dataset) or 1.0)
    watch = LoaderWatch(2).connect()
    for _epoch in range(3):
        list(DataLoader(held_out))
        for _batch in DataLoader(training, batch_size=4):
            watch.forward()
    watch.remove()
    assert [one is training for one in read] == [True]


def test_a_loader_that_fetches_ahead_and_one_whose_workers_stay() -> None:
    watch = LoaderWatch(1).connect()
    begun = []
    for _ in range(2):
        iterator = iter(DataLoader(ROWS, batch_size=4))  # type: ignore[arg-type]
        batch = next(iterator, None)
        while batch is not None:
            following = next(iterator, None)
            begun.append(watch.forward())
            batch = following
    workers = DataLoader(ROWS, batch_size=4, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    begun += [watch.forward() for _ in range(2) for _ in workers]
    watch.remove()
    assert begun == [True, False, False] * 4


def test_loaders_that_take_turns_are_no_one_epoch() -> None:
    watch = LoaderWatch(1).connect()
    for _ in zip(DataLoader(ROWS), DataLoader(ROWS), strict=True):  # type: ignore[arg-type]
        watch.forward()
    one, two = iter(DataLoader(ROWS)), iter(DataLoader(ROWS))  # type: ignore[arg-type]
    for iterator in (one, two, one, two):
        next(iterator)
        watch.forward()
    watch.remove()
    assert (watch.facts, watch.seen) == (DataFacts(), False)


BATCH = 4


def _rows_by(style: str, ahead: int, rows: int, passes: int = 2) -> tuple[int, bool, bool, int]:
    """(rows that a rank's forwards of such a script count, whether they are known and unlike, rows of its batches)."""
    sampler: Any = DistributedSampler(range(rows), 1, 0)  # type: ignore[arg-type]
    watch, counted, taken, found, before = LoaderWatch(1).connect(), 0, 0, RowsOfData(), 0
    kept = list(DataLoader(range(rows), batch_size=BATCH, sampler=sampler))  # type: ignore[arg-type]
    for _ in range(passes):
        fetched: list[int] = []
        loader: Any = kept if style == "kept" else DataLoader(range(rows), batch_size=BATCH, sampler=sampler)  # type: ignore[arg-type]
        loader = iter(loader)
        while True:
            for given in loader:
                fetched.append(len(given))
                if len(fetched) > ahead:
                    break
            if not fetched:
                break
            own = fetched.pop(0)
            if style == "joined":
                own, fetched = own + sum(fetched[:2]), fetched[2:]
            taken += own
            shapes = {
                "pairs": [2 * own],
                "packed": [1],
                "in time": [37],
                "rows": [1] * own,
                "two views": [own, own],
                "half": [own // 2],
                "graphs": [2],
                "halves": [2, 2],
            }
            for shape in shapes.get(style, [own]):
                watch.forward()
                found.forward(shape, watch.forwards != before, watch.loader_pass, deals=True)
                before = watch.forwards
            labels = {"graphs": own, "half": own // 2, "halves": own}.get(style, 0)
            counted += found.of_step(sum(shapes.get(style, [own])), labels)
            # of batches that are forwarded more than once nobody knows how many were fetched ahead
            assert counted <= taken + (ahead * BATCH if style == "two views" else 0), "rows that were not trained"
    watch.remove()
    return counted, found.known, found.unlike, taken


def test_a_part_of_a_batch_that_all_ranks_have_drawn_is_no_packed_one() -> None:
    """Each of two ranks takes half; a mean over two outputs of each row has as many labels as the batch has rows."""
    watch, counted = LoaderWatch(2).connect(), []
    alone, of_two = RowsOfData(), RowsOfData(ranks=2)
    for _batch in DataLoader(range(64), batch_size=8):  # type: ignore[arg-type]
        watch.forward()
        for found in (alone, of_two):
            found.forward(4, True, watch.loader_pass, deals=True)
        counted.append((alone.of_step(4, 8.0), of_two.of_step(4, 8.0)))
    watch.remove()
    assert counted[-1] == (8, 4)


@pytest.mark.parametrize("rows", [1000, 1002])
@pytest.mark.parametrize("ahead", [0, 1, 4])
@pytest.mark.parametrize(
    ("style", "known", "unlike"),
    [
        ("plain", True, False),
        ("rows", True, False),
        ("kept", True, False),
        ("joined", True, False),
        ("pairs", True, True),
        ("two views", True, False),
        ("packed", True, True),
        ("in time", True, True),
        ("half", False, True),
    ],
)
def test_rows_of_the_data_are_counted_whatever_the_tensors_hold(
    style: str, known: bool, unlike: bool, ahead: int, rows: int
) -> None:
    counted, *told, taken = _rows_by(style, max(ahead, 2) if style == "joined" else ahead, rows)
    assert told == [known, unlike]
    assert counted == (taken // 2 if style == "half" else taken)


@pytest.mark.parametrize("rows", [1000, 1002])
def test_a_label_for_each_row_of_a_batch_tells_that_fewer_tensors_hold_them_all(rows: int) -> None:
    """Edges of graphs, (2, E), and lists of images, (3, H, W), were counted as 2 and 3 rows."""
    *told, taken = _rows_by("graphs", 0, rows)
    assert told == [taken, True, True]
    counted, *told, taken = _rows_by("halves", 0, rows)  # a script that cuts its batches
    assert (counted, told) == (taken, [True, False])


def test_a_list_of_one_tensor_for_each_row_is_the_batch() -> None:
    """As detection takes images: 3 channels were counted as rows, or as many boxes as one image had."""
    dimension = RowDimension()
    for length in (2, 2, 1, 2):
        images = [torch.ones(3, 8 + number, 9) for number in range(length)]
        targets = [{"boxes": torch.ones(2, 4)}] * length
        listed = dimension.listed((images, targets), {}, 2)
        assert listed is not None
        assert len(listed) == length
    several = RowDimension()
    for length in (2, 1):  # two inputs of a batch of two, and of the last
        inputs = [torch.ones(length, 5), torch.ones(length, 6)]
        assert several.listed((inputs,), {}, 2) is None
        assert several.rows(inputs, 2) == length
    assert RowDimension().listed(([torch.ones(3, 4)] * 2,), {}, None) is None, "nobody knows the batch"


@pytest.mark.parametrize("names", [("causal_mask", "tokens"), ("classes", "images")])
def test_a_constant_beside_the_batch_is_not_its_rows(names: tuple[str, str]) -> None:
    """By the loader where it is known, for the smaller last batch too; else masks come behind."""
    dimension = RowDimension()
    for length in (8, 8, 5):
        inputs = dict(zip(names, (torch.ones(20, 20), torch.ones(length, 20)), strict=True))
        tensors, _ = batch_tensors((), inputs)
        assert dimension.rows(tensors, 8) == length
        assert rows_of(tensors) == (length if "mask" in names[0] else 20)


class Rows(IterableDataset[Tensor]):
    """Rows that are split among the workers, or of which each worker yields all."""

    def __init__(self, how: str):
        self.how = how

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        rows = torch.arange(64.0)
        if self.how == "split" and worker is not None:
            rows = rows[worker.id :: worker.num_workers]
        if self.how == "one batch for ever":
            rows = torch.ones(64)
        if self.how == "augmented":
            rows = rows + torch.rand(64)  # each worker has a generator of its own
        return iter(rows)


@pytest.mark.parametrize(
    ("how", "workers", "found"),
    [("whole", 2, [2]), ("whole", 3, [3]), ("whole", 1, []), ("whole", 0, []), ("split", 2, [])]
    + [("one batch for ever", 2, []), ("augmented", 2, [])],
)
def test_workers_that_each_yield_all_rows_are_told(how: str, workers: int, found: list[int]) -> None:
    rule, patches = WorkerRows(lambda: 7), Patches()
    rule.connect(patches, lambda function, *arguments: function(*arguments))
    try:
        with torch.no_grad():  # an evaluation is not looked at
            list(DataLoader(Rows("whole"), 4, num_workers=2))
        assert rule.breaches() == ()
        list(DataLoader(Rows(how), 4, num_workers=workers))
    finally:
        patches.undo()
    told = [(breach.kind, breach.severity, breach.since, breach.message[:46]) for breach in rule.breaches()]
    said = [f"Each of the loader's {count} workers yields all rows" for count in found]
    assert told == [("duplicate-data", "warning", 7, one) for one in said]
