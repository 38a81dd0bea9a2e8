"""Scripts with a loader of their own: what it holds, where its epochs begin, and whether it is told of a new one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

import ds_silent
from ds_silent.capture.data_facts import DataFacts, Walk, data_facts
from ds_silent.capture.loaders import LoaderWatch
from ds_silent.config import DetectorsConfig
from ds_silent.detectors import Evidence, Judge
from ds_silent.exchange.row_ids import pack_ids
from ds_silent.measure.rows import RowsOfStep, RowTracker
from ds_silent.records import Event, StepRecord
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.distributed import run_distributed

# -- what a loader says -----------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


class Unsure(list[int]):
    def __len__(self) -> int:
        raise TypeError("who knows")


def shards(rows: int, shuffle: bool = True) -> DistributedSampler[int]:
    return DistributedSampler(list(range(rows)), num_replicas=4, rank=1, shuffle=shuffle)  # type: ignore[arg-type]


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


# -- epochs that end within a step ------------------------------------------------------------------------------------


class Deal:
    """Real samplers and loaders of every rank, cut into optimizer steps across the epochs; tracked and judged."""

    def __init__(
        self, rows: int, ranks: int, batch: int, accumulation: int, drop_last: bool, watched: bool, told: bool
    ):
        self.rows, self.ranks, self.watched, self.told = rows, ranks, watched, told
        self.accumulation, self.own_rows = accumulation, batch * accumulation
        data: Any = list(range(rows))
        self.samplers = [DistributedSampler(data, num_replicas=ranks, rank=r, seed=3) for r in range(ranks)]
        self.loaders = [DataLoader(data, batch, sampler=s, drop_last=drop_last) for s in self.samplers]
        self.tracker, self.judge = RowTracker(), Judge(DetectorsConfig())
        self.events: list[Event] = []
        self.said: list[RowsOfStep] = []
        self.steps_of_epochs: list[int] = []
        self._waiting: list[tuple[bool, list[torch.Tensor]]] = []

    def epoch(self, number: int | None, limit: int = 10**9) -> None:
        """One pass; ``number`` is given to ``set_epoch``, None is forgotten."""
        for sampler in self.samplers:
            if number is not None:
                sampler.set_epoch(number)
        for index, batches in enumerate(zip(*self.loaders, strict=True)):
            if index == limit:
                break
            self._waiting.append((index == 0, list(batches)))
            if len(self._waiting) == self.accumulation:
                self._step()
        self.steps_of_epochs.append(len(self.said))

    def _step(self) -> None:
        taken, self._waiting = self._waiting, []
        capacity = self.own_rows
        sent = torch.stack([pack_ids(torch.cat([m[r] for _, m in taken]), capacity) for r in range(self.ranks)])
        places = np.cumsum([0] + [len(m[0]) for _, m in taken])
        starts = tuple(int(p) for p, (first, _) in zip(places, taken, strict=False) if first)
        walk = Walk(DataFacts(self.rows, True), starts if self.watched else (), self.watched, self.told)
        told = self.tracker.step(sent.double(), self.own_rows, self.rows, walk)
        assert told is not None
        self.said.append(told)
        evidence = Evidence(
            duplicates=told.pairs,
            rows_per_rank=told.rows,
            own_rows=told.own_rows,
            own_repeats=told.own_repeats,
            coverage=told.epoch,
            same_order=told.same_order,
        )
        record = StepRecord(len(self.said), 0, None, self.ranks)
        self.events += self.judge.step(record, evidence)


CUTS = [
    *((103, 4, 2, 1), (103, 4, 8, 4), (26, 4, 2, 4), (26, 4, 2, 1)),
    *((1000, 2, 8, 4), (1001, 3, 4, 4), (57, 2, 3, 1), (640, 4, 5, 3)),
]
"""Rows, ranks, rows of a micro-batch, micro-batches of a step."""


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("rows", "ranks", "batch", "accumulation"), CUTS)
def test_healthy_epochs_are_silent_wherever_they_end(
    rows: int, ranks: int, batch: int, accumulation: int, drop_last: bool, watched: bool
) -> None:
    """Short last batches, rows that the sampler fills up with, steps that an epoch ends in."""
    deal = Deal(rows, ranks, batch, accumulation, drop_last, watched, told=True)
    for epoch in range(12):
        deal.epoch(epoch)
    assert deal.events == []
    for told in deal.said:
        assert told.epoch is not None
        assert told.coverage.repeated is not None
        fill = (-rows) % ranks
        assert told.coverage.repeated <= (fill + (0 if watched else ranks)) / rows + 1e-9


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize(("rows", "ranks", "batch", "accumulation"), CUTS)
def test_forgetting_set_epoch_is_told_in_the_second_epoch(
    rows: int, ranks: int, batch: int, accumulation: int, watched: bool, told: bool
) -> None:
    deal = Deal(rows, ranks, batch, accumulation, drop_last=False, watched=watched, told=told)
    for _ in range(3):
        deal.epoch(None)
    assert [(event.kind, event.severity, event.ranks) for event in deal.events] == [
        ("same-order", "warning", tuple(range(ranks)))
    ]
    assert "set_epoch" in deal.events[0].remedy
    first, second, third = deal.steps_of_epochs
    per_rank = -(-rows // ranks)  # the sum of log n over the rows that come again: too little for chance in tiny epochs
    enough = sum(np.log(rows - k) for k in range(min(per_rank, 64))) > 22.2
    assert first < deal.events[0].step <= (second if enough else third)


def test_set_epoch_called_at_last_ends_it() -> None:
    deal = Deal(120, 2, 4, 1, True, True, True)
    for epoch in (None, None, 1, 2, 3, 4, 5):
        deal.epoch(epoch)
    assert [(event.kind, event.severity) for event in deal.events] == [
        ("same-order", "warning"),
        ("same-order", "info"),
    ]


def test_a_trial_batch_before_the_training_is_no_epoch() -> None:
    deal = Deal(400, 2, 4, 1, True, True, True)
    deal.epoch(0, limit=1)
    deal.epoch(0)
    deal.epoch(1)
    assert deal.events == []


def test_epochs_that_are_broken_off_are_told_of_their_order_only() -> None:
    """Ten batches of each pass: with a new shuffle healthy, without one the same ten batches again and again."""
    healthy, forgotten = (Deal(400, 2, 4, 1, True, True, True) for _ in range(2))
    for epoch in range(8):
        healthy.epoch(epoch, limit=10)
        forgotten.epoch(None, limit=10)
    assert healthy.events == []
    assert [event.kind for event in forgotten.events] == ["same-order"]


@pytest.mark.parametrize("told", [True, False])
def test_the_same_order_by_design_is_healthy(told: bool) -> None:
    """Without shuffling; and where nobody knows, with ids in their own order or with hashes, which say nothing."""
    for facts, ids in ((DataFacts(40, False), True), (DataFacts(40), True), (DataFacts(None), told)):
        tracker, judge = RowTracker(), Judge(DetectorsConfig())
        order = np.arange(40) if ids else np.random.default_rng(1).permutation(40) * 7919
        for step in range(30):
            rows = [torch.from_numpy(order[(step * 8) % 40 :][r::2][:4]) for r in range(2)]
            sent = torch.stack([pack_ids(one, 4) for one in rows]).double()
            seen = tracker.step(sent, 4, facts.rows, Walk(facts, told=ids))
            assert seen is not None
            evidence = Evidence(coverage=seen.epoch, same_order=seen.same_order)
            assert judge.step(StepRecord(step + 1, 0, None, 2), evidence) == []


def test_a_resume_within_an_epoch_goes_on() -> None:
    """The loader is made anew for the rest of the epoch, or for the whole of it."""
    for rest in (True, False):
        deal = Deal(160, 2, 4, 1, True, True, True)
        deal.epoch(0, limit=10)
        state = json.loads(json.dumps(deal.tracker.state_dict(False)))
        judged = json.loads(json.dumps(deal.judge.state_dict()))
        order = [list(iter(sampler)) for sampler in deal.samplers]
        deal.tracker, deal.judge = RowTracker(), Judge(DetectorsConfig())
        deal.tracker.load_state_dict(state)
        deal.judge.load_state_dict(judged)
        if rest:
            data: Any = list(range(160))
            whole, deal.loaders = deal.loaders, [DataLoader(data, 4, sampler=one[40:]) for one in order]
            deal.epoch(None)
            assert deal.said[-1].coverage.seen == 1.0
            deal.loaders = whole
        else:
            deal.epoch(0)
        for epoch in range(1, 4):
            deal.epoch(epoch)
        assert deal.events == []


@pytest.mark.parametrize("told", [True, False])
def test_own_permutations_are_told_by_ids_and_by_content(told: bool) -> None:
    """By content it is a warning that says what else it may be: the data may hold rows several times."""
    deal = Deal(1000, 4, 5, 1, True, True, told)
    for rank, sampler in enumerate(deal.samplers):
        sampler.seed = rank
    deal.epoch(0)
    severity = {event.kind: event.severity for event in deal.events}
    assert severity["data-order-mismatch"] == ("error" if told else "warning")
    assert ("the data hold several times" in deal.events[0].message) == (not told)


def test_rows_that_the_data_hold_twice_are_healthy_by_content() -> None:
    """Seven of a hundred rows are copies; by their ids they are rows like others."""
    order = np.random.default_rng(2)
    content = np.arange(2000) * 7919
    content[:140] = content[1000:1140]
    for told in (True, False):
        tracker, judge = RowTracker(), Judge(DetectorsConfig())
        for epoch in range(3):
            rows = order.permutation(2000)
            for step in range(250):
                taken = rows[step * 8 : step * 8 + 8]
                ids = torch.from_numpy(taken if told else content[taken])
                sent = torch.stack([pack_ids(ids[r::2], 4) for r in range(2)]).double()
                walk = Walk(DataFacts(2000, True), (0,) * (step == 0), True, told)
                seen = tracker.step(sent, 4, 2000, walk)
                assert seen is not None
                evidence = Evidence(coverage=seen.epoch, same_order=seen.same_order)
                assert judge.step(StepRecord(epoch * 250 + step + 1, 0, None, 2), evidence) == []


@pytest.mark.parametrize("watched", [True, False])
def test_data_without_a_length_tell_what_came_again(watched: bool) -> None:
    """An iterable data set: rows that came again since its loader began, against sets; nothing of an epoch."""
    tracker, visits = RowTracker(), list[int]()
    generator = np.random.default_rng(4)
    for step in range(20):
        begins = watched and step == 10
        rows = [torch.from_numpy(generator.integers(0, 60, 4)) for _ in range(3)]
        told = tracker.step(
            torch.stack([pack_ids(one, 4) for one in rows]).double(), 4, None, Walk(DataFacts(), (0,) * begins, watched)
        )
        visits = [*([] if begins else visits), *torch.cat(rows).tolist()]
        assert told is not None
        assert (told.coverage.seen, told.epoch) == (None, None)
        assert told.coverage.repeated == pytest.approx(1 - len(set(visits)) / len(visits), abs=1e-12)


# -- in trainings -----------------------------------------------------------------------------------------------------


class Pairs(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, rows: int):
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(rows, 6, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "labels": self.inputs[index, :2] * 0.5}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(inputs), labels)


def own_loop(output_dir: str, stage: int, style: str, epochs: tuple[int | None, ...], given: bool) -> Any:
    """A loop as people write it. ``style``: how batches are handed over; nothing is told to the observer but, perhaps,
    the sampler."""
    torch.manual_seed(0)
    model, data = Net(), Pairs(50)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2 if style == "tuple" else 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "silent_consistency": {"output_dir": output_dir, "tensorboard": False},
    }
    sampler: Any = DistributedSampler(data, shuffle=style != "sequential")
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=style == "tuple")
    arguments: dict[str, Any] = {"model": model, "model_parameters": model.parameters(), "config": config}
    if style == "training_data":
        engine, _, loader, _ = ds_silent.initialize(**arguments, training_data=data)
        sampler = loader.data_sampler  # type: ignore[attr-defined]
    elif given:
        engine, *_ = ds_silent.initialize(**arguments, sampler=sampler)
    else:
        engine, *_ = ds_silent.initialize(**arguments)
    if style == "deepspeed_io":
        loader = engine.deepspeed_io(data)
        sampler = loader.data_sampler  # type: ignore[attr-defined]
    taken: list[list[float]] = []
    for epoch in epochs:
        if epoch is not None:
            sampler.set_epoch(epoch)
        for batch in loader:
            taken.append(batch["inputs"][:, 0].tolist())
            loss = engine(*(batch["inputs"], batch["labels"])) if style == "tuple" else engine(**batch)
            engine.backward(loss)
            engine.step()
    observer = ds_silent.observer_of(engine)
    assert observer is not None
    observer.close()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, taken)
    return everyone


def oracle(taken: list[list[list[float]]], accumulation: int, per_epoch: int, rows: int) -> list[tuple[float, float]]:
    """(seen, repeated) after each optimizer step, counted with sets; micro-batches of an epoch: ``per_epoch``."""
    told, visits = [], list[float]()
    for micro in range(len(taken[0])):
        if micro % per_epoch == 0:
            visits = []
        visits += [row for rank in taken for row in rank[micro]]
        if (micro + 1) % accumulation == 0:
            told.append((len(set(visits)) / rows, (len(visits) - len(set(visits))) / rows))
    return told


@pytest.mark.parametrize(
    ("ranks", "stage", "style", "given"),
    [
        (2, 0, "kwargs", False),
        (3, 1, "kwargs", True),
        (2, 2, "tuple", False),
        (2, 1, "training_data", False),
        (2, 0, "deepspeed_io", False),
    ],
)
def test_coverage_without_calling_anything(ranks: int, stage: int, style: str, given: bool, tmp_path: Path) -> None:
    epochs = (0, 1, 2)
    taken = run_distributed(own_loop, ranks, (str(tmp_path), stage, style, epochs, given))[0]
    records = list(read_metrics(tmp_path / "metrics.jsonl"))
    accumulation = 2 if style == "tuple" else 1
    truth = oracle(taken, accumulation, len(taken[0]) // len(epochs), 50)
    assert len(records) == len(truth) > 8
    for record, (seen, repeated) in zip(records, truth, strict=True):
        assert record["coverage"]["seen"] == pytest.approx(seen, abs=1e-12)
        assert record["coverage"]["repeated"] == pytest.approx(repeated, abs=1e-12)
        assert record["epoch"] == pytest.approx(record["samples"] / 50)
    assert [e["kind"] for e in read_events(tmp_path / "events.jsonl") if "order" in e["kind"]] == []


@pytest.mark.parametrize(
    ("style", "epochs", "given", "told"),
    [
        ("kwargs", (None, None), False, True),
        ("training_data", (None, None), False, True),  # DeepSpeed's own loader forgets it too
        ("sequential", (None, None, None), False, False),
    ],
)
def test_a_training_that_forgets_set_epoch(
    style: str, epochs: tuple[int | None, ...], given: bool, told: bool, tmp_path: Path
) -> None:
    run_distributed(own_loop, 2, (str(tmp_path), 1, style, epochs, given))
    events = [e for e in read_events(tmp_path / "events.jsonl") if e["step"] > 0]
    assert [(e["kind"], e["severity"]) for e in events] == [("same-order", "warning")] * told
    if told:
        assert 7 < events[0]["step"] <= 14  # 25 rows per rank, 4 a step: seven steps an epoch
        assert "set_epoch" in events[0]["remedy"]


class Numbered(Pairs):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, **super().__getitem__(index)}


def readme_example(directory: str, code: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "silent_consistency": {"output_dir": directory, "tensorboard": False},
    }
    path = Path(directory, f"ds_config_{dist.get_rank()}.json")
    path.write_text(json.dumps(config))
    names = {"dataset": Numbered(50), "model": Net(), "ds_silent": ds_silent, "DataLoader": DataLoader}
    names["DistributedSampler"] = DistributedSampler
    exec(code.replace("ds_config.json", str(path)), names)
    ds_silent.observer_of(names["engine"]).close()  # type: ignore[union-attr]


def test_the_example_of_the_readme(tmp_path: Path) -> None:
    text = Path(__file__).parents[2].joinpath("README.md").read_text()
    [code] = [part.split("```")[0] for part in text.split("```python\n")[1:] if "observe_batch" in part.split("```")[0]]
    assert len(code.splitlines()) <= 12
    run_distributed(readme_example, 2, (str(tmp_path), code))
    records = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert len(records) == 3 * 7
    assert [round(records[7 * epoch + 6]["coverage"]["seen"], 9) for epoch in range(3)] == [1.0] * 3
    assert [event for event in read_events(tmp_path / "events.jsonl") if event["step"] > 0] == []
