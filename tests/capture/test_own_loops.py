"""Loops of a script's own, in real trainings: samples, epochs and coverage are those of its loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    random_split,
)
from torch.utils.data.distributed import DistributedSampler

import ds_silent
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import each, run_distributed


class Pairs(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, rows: int, seed: int = 5):
        self.inputs = torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "labels": self.inputs[index, :2] * 0.5}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, edges: torch.Tensor | None = None) -> torch.Tensor:
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


def unlike_loop(output_dir: str, style: str) -> None:
    """A loop under DDP whose tensors hold another number of rows than the loader's batches."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer, data = torch.optim.SGD(model.parameters(), lr=1e-3), Pairs(160)
    sampler: Any = DistributedSampler(data)
    config, place = (
        {"output_dir": output_dir, "tensorboard": False, "interval": 5 if style == "replay, interval 5" else 1},
        dict(zip(data.inputs[:, 0].tolist(), range(160), strict=True)),
    )
    accumulation = 2 if style in ("row by row", "fakes", "twice") else 1
    loader, kept = DataLoader(data, batch_size=2, sampler=sampler), list[tuple[torch.Tensor, torch.Tensor]]()
    with ds_silent.observe(model, optimizer, config=config, loader=loader, accumulation=accumulation) as observer:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch in loader:
                inputs, labels = batch["inputs"], batch["labels"]
                if style == "pairs with ids":
                    observer.observe_batch([place[first] for first in inputs[:, 0].tolist()])
                if style in ("plain", "edges"):
                    edges = {"edges": torch.zeros(9, 9)} if style == "edges" else {}
                    model(inputs=inputs, labels=labels, **edges).backward()
                elif "pairs" in style:
                    model(torch.cat([inputs, inputs + 1.0]), torch.cat([labels, labels])).backward()
                elif style == "fakes":
                    model(inputs, labels).backward()
                    model(torch.randn(inputs.shape), labels).backward()
                elif style == "twice":
                    model(inputs, labels).backward()
                    model(inputs.clone(), labels).backward()
                elif style == "packed":
                    model(inputs.flatten(0, 1)[None].unflatten(1, (-1, 6)), labels[None]).backward()
                elif style.startswith("replay"):
                    model(inputs, labels).backward()
                else:
                    for one, label in zip(inputs, labels, strict=True):
                        model(one[None], label[None]).backward()
                optimizer.step()
                optimizer.zero_grad()
                kept.append((inputs.clone(), labels.clone()))
                if style.startswith("replay") and len(kept) > 3:  # rows of a while ago, as of a buffer
                    model(*kept[len(kept) // 2]).backward()
                    optimizer.step()
                    optimizer.zero_grad()


QUICK = ("pairs", "pairs with ids", "packed", "row by row", "plain", "edges")


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of all loops, each with its own."""
    directory = tmp_path_factory.mktemp("loops")
    run_distributed(each, 2, (unlike_loop, {style: (str(directory / style), style) for style in QUICK}))
    return directory


@pytest.mark.parametrize("style", ["pairs", "pairs with ids", "packed", "row by row"])
def test_samples_and_epochs_are_those_of_the_data(style: str, loops: Path) -> None:
    """160 rows, 2 ranks with 2 rows a step: 40 steps an epoch."""
    records = read_metrics(loops / style / "metrics.jsonl")
    assert len(records) == 80
    for record in records[34:]:  # by then it is sure that packed rows are meant
        assert (record["samples"], record["epoch"]) == (4 * record["step"], record["step"] / 40), record["step"]
    for record in records:
        assert record["epoch"] in (None, record["step"] / 40)
    seen = [record["coverage"]["seen"] for record in records]
    assert seen.count(1.0) == 2 if style in ("row by row", "pairs with ids") else seen == [None] * 80
    assert [event for event in read_events(loops / style / "events.jsonl") if event["severity"] != "info"] == []


def test_a_constant_beside_the_batch_changes_no_number(loops: Path) -> None:
    """It has 9 rows and comes first by name; a batch has 2."""
    plain, beside = (read_metrics(loops / style / "metrics.jsonl") for style in ("plain", "edges"))
    names = ("samples", "epoch", "noise_scale", "coverage")
    assert [[record[name] for name in names] for record in plain] == [
        [record[name] for name in names] for record in beside
    ]


def split_loop(output_dir: str, seeds: tuple[int, int], given: bool) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seeds[dist.get_rank()])
    data, _ = random_split(Pairs(160), [120, 40], generator)
    sampler: Any = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    config = {"output_dir": output_dir, "tensorboard": False}
    with ds_silent.observe(model, optimizer, config=config, loader=loader if given else None):
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for batch in loader:
                model(**batch).backward()
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.long
def test_data_that_each_rank_splits_in_its_own_way_are_told_at_once(given: bool, tmp_path: Path) -> None:
    run_distributed(split_loop, 2, (str(tmp_path / "unlike"), (1, 2), given))
    events = [event for event in read_events(tmp_path / "unlike" / "events.jsonl") if event["severity"] != "info"]
    assert [(event["step"], event["kind"], event["severity"], event["where"]) for event in events] == [
        (0 if given else 1, "data-order-mismatch", "error", "the data set's subset")
    ]
    assert "120 of 160 rows, first " in events[0]["message"]
    assert "random_split" in events[0]["remedy"]
    run_distributed(split_loop, 2, (str(tmp_path / "alike"), (1, 1), given))
    assert read_events(tmp_path / "alike" / "events.jsonl") == []


@pytest.mark.parametrize("style", ["fakes", "twice"])
@pytest.mark.long
def test_rows_that_no_loader_has_dealt_are_no_share_of_the_data(style: str, tmp_path: Path) -> None:
    """A discriminator takes each batch and as many fakes; a batch that is trained twice by mistake is told as such."""
    run_distributed(unlike_loop, 2, (str(tmp_path), style))
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(record["samples"], record["epoch"]) for record in records] == [(4 * n, n / 40) for n in range(1, 81)]
    seen, repeated = ([record["coverage"][name] for record in records] for name in ("seen", "repeated"))
    if style == "fakes":
        assert (set(seen[4:]), set(repeated[4:])) == ({None}, {0.0})
    else:
        assert seen[3:20] == pytest.approx([n / 40 for n in range(4, 21)])
        assert repeated[3:20] == pytest.approx([n / 40 for n in range(4, 21)])


def test_rows_that_are_replayed_between_measured_steps_are_none_of_the_epoch(tmp_path: Path) -> None:
    run_distributed(unlike_loop, 2, (str(tmp_path), "replay, interval 5"))
    assert [event for event in read_events(tmp_path / "events.jsonl") if event["severity"] != "info"] == []
    records = [record for record in read_metrics(tmp_path / "metrics.jsonl") if record["epoch"] <= 1.0]
    assert len(records) == 15
    for record in records:
        assert record["coverage"]["seen"] == pytest.approx(record["epoch"])
        assert record["coverage"]["repeated"] == pytest.approx(0.0, abs=1e-9)


def test_rows_that_a_script_replays_beside_its_loader_are_none_of_the_epoch(tmp_path: Path) -> None:
    """They were a warning that rows come again, and the epoch ended with half of its rows seen."""
    run_distributed(unlike_loop, 2, (str(tmp_path), "replay"))
    assert [event for event in read_events(tmp_path / "events.jsonl") if event["severity"] != "info"] == []
    passes = [record["coverage"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert len(passes) == 80 + 77
    assert {one["repeated"] for one in passes if one["seen"] < 1.0} == {0.0}  # then it may be the data once more
    dealt = [1, 2, 3, *(n for n in range(4, 41) for _ in range(2))]
    assert [one["seen"] for one in passes[: len(dealt)]] == pytest.approx([n / 40 for n in dealt])
    assert [one["seen"] for one in passes[len(dealt) :: 2]] == pytest.approx([n / 40 for n in range(1, 41)])


def buffer_loop(output_dir: str, style: str) -> None:
    """As PPO: two batches of the loader are kept, and trained in mini-batches that are cut anew in each pass."""
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(Net())
    optimizer, data = torch.optim.SGD(model.parameters(), lr=1e-3), Pairs(160)
    sampler: Any = DistributedSampler(data)
    loader, block = DataLoader(data, batch_size=4, sampler=sampler), {"output_dir": output_dir, "tensorboard": False}
    with ds_silent.observe(model, optimizer, config={**block, "interval": 5 if "interval" in style else 1}):
        for epoch in range(2):
            sampler.set_epoch(epoch)
            batches = iter(loader)
            for number, batch in enumerate(batches):
                kept = [batch, next(batches)]
                inputs, labels = (torch.cat([one[name] for one in kept]) for name in ("inputs", "labels"))
                passes = [torch.randperm(8) for _ in range(1 if style.startswith("once") else 3)]
                chosen = [part for order in passes for part in order.split(4)]
                if style == "once, and a batch twice":
                    chosen.insert(number % 2, chosen[number // 2 % 2])
                if style == "stuck" and number > 5:
                    chosen = chosen[:1] * len(chosen)
                if style == "stopped early" and number % 3 == 1:
                    chosen = chosen[:3]
                for part in chosen:
                    model(inputs[part], labels[part]).backward()
                    optimizer.step()
                    optimizer.zero_grad()


@pytest.mark.parametrize("style", ["whole", "interval 5", "stopped early"])
def test_a_buffer_that_is_trained_several_times_is_a_note(style: str, tmp_path: Path) -> None:
    """They were a warning that rows come again, and an epoch that ended with a third of its rows seen."""
    run_distributed(buffer_loop, 2, (str(tmp_path), style))
    [event] = read_events(tmp_path / "events.jsonl")
    assert (event["kind"], event["severity"], event["ranks"]) == ("data-order-mismatch", "info", [0, 1])
    assert event["message"].startswith("Each row is trained 3 times before the next ones are dealt")
    passes = [record["coverage"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert {one["repeated"] for one in passes} == {0.0}
    if style != "whole":
        return
    dealt = [16 * buffer + min(16, 8 * step) for buffer in range(10) for step in range(1, 7)]  # 6 steps for each
    assert [one["seen"] for one in passes if one["seen"] is not None] == pytest.approx(2 * [n / 160 for n in dealt])


@pytest.mark.parametrize("style", ["once, and a batch twice", "stuck"])
def test_a_batch_of_a_buffer_that_comes_twice_by_mistake_is_told(style: str, tmp_path: Path) -> None:
    run_distributed(buffer_loop, 2, (str(tmp_path), style))
    events = [event for event in read_events(tmp_path / "events.jsonl") if event["severity"] != "info"]
    assert "data-order-mismatch" in {event["kind"] for event in events}


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
@pytest.mark.long
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
@pytest.mark.long
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


def page_example(directory: str, code: str) -> None:
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


def test_the_example_of_rows_with_ids(tmp_path: Path) -> None:
    text = Path(__file__).parents[2].joinpath("docs", "ways-in.md").read_text()
    codes = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    [code] = [one for one in codes if "observe_batch" in one and "DistributedSampler" in one]
    assert len(code.splitlines()) <= 12
    run_distributed(page_example, 2, (str(tmp_path), code))
    records = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert len(records) == 3 * 7
    assert [round(records[7 * epoch + 6]["coverage"]["seen"], 9) for epoch in range(3)] == [1.0] * 3
    assert [event for event in read_events(tmp_path / "events.jsonl") if event["step"] > 0] == []
