"""How samplers deal rows to ranks: what each says, and what is known of all of them while they train."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler

import ds_silent
from ds_silent.capture.deals import Deal, deal_of, dealt_by_all
from ds_silent.capture.loaders import LoaderWatch
from ds_silent.config import DetectorsConfig
from ds_silent.detectors import Judge
from ds_silent.measure.deal import DealFollower
from ds_silent.measure.evidence import Evidence, OrderAgain
from ds_silent.preflight.inventory import sampler_facts, sampler_items
from ds_silent.records import DataDealt, Event, StepRecord
from ds_silent.runs.report.figures import plot_context
from ds_silent.runs.report.tables import facts_of
from ds_silent.runs.run import read_run
from ds_silent.runs.verdict import verdict_of
from ds_silent.sinks.jsonl import read_events
from finetune.sampler import Plan, ResumableSampler
from tests.capture.test_own_loaders import Stream
from tests.capture.test_own_loops import Net, Pairs
from tests.support.distributed import each, run_on_kept_ranks
from tests.support.preflight import outcome_of

ROWS: Any = list(range(40))


class ByLength(DistributedSampler[int]):
    def __iter__(self) -> Any:
        return iter(sorted(super().__iter__()))


class Batches:
    """A batch sampler of a script's own."""

    def __init__(self, rows: Any) -> None:
        self.sampler = rows

    def __iter__(self) -> Any:
        return iter([[row] for row in self.sampler])


class GPTDataset(list[int]):
    shuffle_index = ()


class MegatronPretrainingSampler:
    def __init__(self) -> None:
        self.total_samples, self.micro_batch_size, self.data_parallel_rank, self.data_parallel_size = 40, 2, 1, 4

    def __iter__(self) -> Any:
        return iter([[2, 3], [10, 11]])

    def __len__(self) -> int:
        return 2


class MegatronPretrainingRandomSampler(MegatronPretrainingSampler):
    def __init__(self, data_sharding: bool) -> None:
        super().__init__()
        self.data_sharding = data_sharding


def shares(rank: int = 1, ranks: int = 4, **given: Any) -> DistributedSampler[int]:
    return DistributedSampler(ROWS, num_replicas=ranks, rank=rank, **given)


def of_accelerate(sampler: Any, rank: int = 1) -> Any:
    shard = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    return shard(BatchSampler(sampler, 2, False), num_processes=4, process_index=rank)


def seedable() -> Any:
    return pytest.importorskip("accelerate.data_loader").SeedableRandomSampler(ROWS, data_seed=3)


def finetune(mode: Any) -> ResumableSampler:
    return ResumableSampler(Plan(40, 4, 2, 1, mode), seed=3, rank=1)


@pytest.mark.parametrize(
    ("make", "dealt", "says"),
    [
        (lambda: shares(), "random", "DistributedSampler, shuffled"),
        (lambda: DataLoader(ROWS, 2, sampler=shares()), "random", "DistributedSampler, shuffled"),
        (lambda: iter(DataLoader(ROWS, 2, sampler=shares())), "random", "DistributedSampler, shuffled"),
        (lambda: shares(shuffle=False), "own-shard", "not shuffled"),
        (lambda: shares(ranks=2), "unknown", "2 shares for 4 ranks"),
        (lambda: ByLength(ROWS, num_replicas=4, rank=1), "unknown", "ByLength"),
        (lambda: of_accelerate(seedable()), "random", "SeedableRandomSampler, shuffled"),
        (lambda: of_accelerate(RandomSampler(ROWS)), "random", "RandomSampler, shuffled"),
        (lambda: of_accelerate(SequentialSampler(ROWS)), "own-shard", "not shuffled"),
        (lambda: of_accelerate(RandomSampler(ROWS, replacement=True)), "unknown", "replacement"),
        (lambda: of_accelerate(shares(ranks=1, rank=0)), "unknown", "DistributedSampler"),
        (lambda: iter(DataLoader(ROWS, batch_sampler=of_accelerate(seedable()))), "random", "BatchSamplerShard"),
        (lambda: DataLoader(ROWS, batch_sampler=MegatronPretrainingSampler()), "unknown", "in any order"),  # type: ignore[arg-type]
        (
            lambda: iter(DataLoader(GPTDataset(ROWS), batch_sampler=MegatronPretrainingSampler())),  # type: ignore[arg-type]
            "random",
            "one shuffled order for all ranks",
        ),
        (lambda: MegatronPretrainingRandomSampler(True), "own-shard", "a bucket for each rank"),
        (lambda: MegatronPretrainingRandomSampler(False), "random", "one order"),
        (lambda: finetune("sharded"), "random", "ResumableSampler, shuffled"),
        (lambda: finetune("replicated"), "unknown", "1 share for 4 ranks"),
        (lambda: DataLoader(ROWS, shuffle=True), "unknown", "RandomSampler"),
        (lambda: iter(DataLoader(ROWS)), "unknown", "SequentialSampler"),
        (lambda: iter(DataLoader(Stream())), "unknown", "DataLoader,"),
        (lambda: DataLoader(ROWS, batch_sampler=Batches(shares())), "random", "r, shuffled, in batches of Batches"),
        (lambda: iter(DataLoader(ROWS, batch_sampler=Batches(ROWS))), "unknown", "Batches, which may"),
        (lambda: None, "unknown", "no loader has been seen so far"),
        (lambda: iter(ROWS), "unknown", "list_iterator"),
    ],
)
def test_what_a_sampler_says_of_the_deal(make: Any, dealt: str, says: str) -> None:
    deal = deal_of(make(), 4)
    assert (deal.dealt, says in deal.by) == (dealt, True), deal
    assert bool(deal.order) == (dealt != "unknown")
    assert (deal.word < 0) == (dealt == "own-shard")
    assert deal.pass_rows == (40 if deal.by.startswith("RandomSampler, which") else None)


def test_a_generator_of_its_own_that_nobody_has_seeded_is_said() -> None:
    """As accelerate 1.5 made one for each loader; what draws from torch's own is seeded with the run."""

    def said(sampler: Any) -> bool:
        return "nobody has seeded" in deal_of(of_accelerate(sampler), 4).by

    generator = torch.Generator()
    assert said(RandomSampler(ROWS, generator=generator))
    torch.randperm(4, generator=generator)
    assert said(RandomSampler(ROWS, generator=generator)), "in a later pass"
    assert said(SubsetRandomSampler(range(4), generator=torch.Generator()))
    assert not said(RandomSampler(ROWS, generator=generator.manual_seed(3)))
    assert not said(RandomSampler(ROWS))
    assert not said(seedable())
    assert "nobody" not in deal_of(DataLoader(ROWS, generator=torch.Generator()), 4).by, "in order"


@pytest.mark.parametrize(("held", "dealt"), [((0, 0), "unknown"), ((0, 1), "random")])
def test_one_share_on_all_ranks_is_not_told_as_dealt_at_random(held: tuple[int, ...], dealt: str) -> None:
    """The console said so directly above the error."""
    ranks = [sampler_items(sampler_facts(shares(rank, ranks=2)), 2) for rank in held]
    hashes = np.array([[item.hash for item in items] for items in ranks], dtype=np.int32)
    told = dealt_by_all(outcome_of(ranks[0], hashes), deal_of(shares(0, ranks=2), 2))
    assert (told.dealt, "not one share for each rank" in told.by) == (dealt, dealt == "unknown")


@pytest.mark.parametrize("make", [shares, lambda rank: of_accelerate(seedable(), rank)])
def test_all_ranks_of_one_deal_send_the_same_and_others_do_not(make: Any) -> None:
    words = {deal_of(make(rank), 4).word for rank in range(4)}
    assert len(words) == 1
    other = make(2)
    inner = other if isinstance(other, DistributedSampler) else other.batch_sampler.sampler
    inner.set_epoch(1)
    assert deal_of(other, 4).word not in words
    assert 0 < deal_of(shares(seed=1), 4).word not in words
    assert all(word == float(torch.tensor(word, dtype=torch.float32)) for word in words)


def passes(loader: Any, epochs: tuple[int, ...]) -> list[Deal]:
    watch, found = LoaderWatch(4).connect(), []
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        for _ in loader:
            watch.forward()
            found.append(watch.deal)
    watch.remove()
    return found


def test_a_pass_whose_epoch_is_not_new_keeps_each_ranks_rows() -> None:
    loader = DataLoader(ROWS, batch_size=5, sampler=shares())
    assert [deal.dealt for deal in passes(loader, (0, 1, 2))] == ["random"] * 6
    told = passes(loader, (0, 0, 1, 0))
    assert [deal.dealt for deal in told] == ["random"] * 2 + ["own-shard"] * 2 + ["random"] * 2 + ["own-shard"] * 2
    assert "epoch does not advance" in told[2].by
    assert told[4].by == "DistributedSampler, shuffled, epoch advances"


def test_loaders_that_take_turns_deal_nobody_knows_how() -> None:
    watch = LoaderWatch(4).connect()
    for _ in zip(DataLoader(ROWS, sampler=shares()), DataLoader(ROWS, sampler=shares(seed=1)), strict=True):
        watch.forward()
    one, two = (iter(DataLoader(ROWS, sampler=shares(seed=seed))) for seed in (2, 3))
    for iterator in (one, two, one):
        next(iterator)
        watch.forward()
    watch.remove()
    assert watch.deal == Deal(by="loaders that take turns")


def test_a_sampler_that_the_script_has_named_is_asked_at_each_step() -> None:
    watch = LoaderWatch(4)
    assert watch.deal == Deal()
    watch.given = finetune("sharded")
    before = watch.deal
    for _ in range(watch.given.plan.steps_per_epoch):
        watch.given.step()
    assert (before.dealt, watch.deal.dealt, before.word == watch.deal.word) == ("random", "random", False)


# -- of all ranks -----------------------------------------------------------------------------------------------------


def told(words: list[float], deal: Deal, rows: int | None = 100, steps: int = 1, start: int = 0) -> list[str]:
    follower = DealFollower()
    found = []
    for step in range(start + 1, start + steps + 1):
        one = follower.step(torch.tensor(words, dtype=torch.float64), deal, step * 10, 10, rows)
        found.append(one.dealt)
    return found


class Repeated(Sampler[int]):
    """A sampler of the script's own, as timm's and torchvision's of repeated augmentation."""

    num_replicas, rank, epoch, seed, shuffle = 4, 1, 0, 3, True

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(self.seed + self.epoch))
        return iter(order.repeat_interleave(3)[self.rank :: self.num_replicas].tolist())


class Drawn(Repeated):
    """Another that has an epoch, of which its order does not follow."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(len(ROWS))[self.rank :: self.num_replicas].tolist())


def passes_of(loaders: list[DataLoader[int]], set_epoch: bool, passes: int = 4) -> list[int]:
    """How many passes alike a watch has counted as each began; the loaders take turns, pass by pass."""
    watch, found = LoaderWatch(4).connect(), []
    for number in range(passes):
        loader: Any = loaders[number % len(loaders)]
        if set_epoch:
            loader.sampler.set_epoch(number)
        for _ in loader:
            if watch.forward():
                found.append(watch.deal.alike)
    watch.remove()
    return found


def test_passes_of_one_sampler_are_alike_while_its_epoch_stays() -> None:
    def loader(sampler: Any) -> DataLoader[int]:
        return DataLoader(ROWS, batch_size=2, sampler=sampler)

    assert passes_of([loader(shares())], set_epoch=False) == [1, 2, 3, 4]
    assert passes_of([loader(shares())], set_epoch=True) == [1, 1, 1, 1]
    assert passes_of([loader(shares()), loader(shares())], set_epoch=False) == [1, 1, 1, 1]  # data of one size
    assert passes_of([loader(shares(shuffle=False))], set_epoch=False) == [1, 1, 1, 1]
    assert passes_of([loader(ByLength(ROWS, num_replicas=4, rank=1))], set_epoch=False) == [1, 1, 1, 1]  # type: ignore[arg-type]
    assert passes_of([loader(Repeated())], set_epoch=False) == [1, 2, 3, 4]  # its code reads its epoch
    assert passes_of([loader(Repeated())], set_epoch=True) == [1, 1, 1, 1]
    assert passes_of([loader(Drawn())], set_epoch=False) == [1, 1, 1, 1]


def test_a_sampler_whose_epoch_stays_is_noted_once_where_the_rows_do_not_show_it() -> None:
    def notes(*alike: int, **found: Any) -> list[tuple[int, str, str]]:
        judge = Judge(DetectorsConfig())
        events = [
            event
            for step, passes in enumerate(alike, 1)
            for event in judge.step(StepRecord(step, step, None, 4), Evidence(passes_alike=passes, **found))
        ]
        return [(event.step, event.kind, event.severity) for event in events]

    assert notes(1, 1, 2, 2, 3, 3, 4) == [(5, "same-order", "info")]
    assert notes(1, 2, 1, 2, 1) == []
    again = OrderAgain(True, 1e6, 100, shuffled=True)  # the rows came again bit for bit
    assert notes(1, 2, 3, 4, same_order=again) == [(1, "same-order", "warning")]


RANDOM = Deal("random", "DistributedSampler, shuffled", 7.0, by_epoch=True)


def test_only_what_all_ranks_say_alike_is_known() -> None:
    assert told([7.0] * 4, RANDOM) == ["random"]
    assert told([7.0, 7.0, 8.0, 7.0], RANDOM) == ["unknown"]
    assert told([7.0, 7.0, 0.0, 7.0], RANDOM) == ["unknown"]
    assert told([7.0, 7.0, -7.0, 7.0], RANDOM) == ["unknown"]
    assert told([0.0] * 4, Deal()) == ["unknown"]
    assert told([-3.0, -3.0, -4.0, -3.0], Deal("own-shard", "shards", 3.0)) == ["own-shard"]
    assert told([7.0], RANDOM) == ["unknown"]


def test_an_order_is_new_for_as_many_rows_as_an_epoch_has() -> None:
    assert told([7.0] * 4, RANDOM, steps=13) == ["random"] * 11 + ["own-shard"] * 2
    assert told([7.0] * 4, RANDOM, rows=None, steps=13) == ["random"] * 13
    assert told([7.0] * 4, replace(RANDOM, by_epoch=False), steps=13) == ["random"] * 13


def test_a_resume_remembers_for_how_long_an_order_has_been_dealt() -> None:
    before, after = DealFollower(), DealFollower()
    words = torch.full((4,), 7.0, dtype=torch.float64)
    for step in range(1, 9):
        before.step(words, RANDOM, step * 10, 10, 100)
    after.load_state_dict(before.state_dict())
    found = [after.step(words, RANDOM, step * 10, 10, 100).dealt for step in range(9, 14)]
    assert found == ["random"] * 3 + ["own-shard"] * 2


# -- in trainings -----------------------------------------------------------------------------------------------------


ROW_KINDS = {"data-order-mismatch", "low-coverage", "same-order", "duplicate-data", "batch-size-mismatch"}


def trained(directory: str, style: str, passes: int, advance: bool, coverage: bool = True) -> list[str]:
    """A training with DDP as people write it: on the writing rank, what its detectors knew at each step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    known, judged = [], Judge.step

    def step(judge: Judge, record: StepRecord, extras: Evidence) -> list[Event]:
        known.append(extras.dealt)
        return judged(judge, record, extras)

    Judge.step = step  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data: Any = Pairs(48)
    if style == "own":
        data = Pairs(8 if rank == 0 else 40, seed=rank)
        again = (batch for _ in range(1000) for batch in DataLoader(data, batch_size=4, shuffle=True))
        loader: Any = islice(again, 40)  # as many steps on each rank
    elif style == "all":
        torch.manual_seed(rank)
        loader = DataLoader(Pairs(96), batch_size=4, shuffle=True)
    else:
        one_else = style == "one other" and rank == ranks - 1
        sampler = DistributedSampler(data, shuffle=style != "in order", seed=7 if one_else else 0)
        loader = DataLoader(data, batch_size=4, sampler=sampler)
    config = {"output_dir": directory, "tensorboard": False, "coverage": coverage}
    with ds_silent.observe(model, optimizer, config=config):
        for epoch in range(passes):
            if advance and style not in ("own", "all"):
                sampler.set_epoch(epoch)
            for batch in loader:
                optimizer.zero_grad()
                model(**batch).backward()
                optimizer.step()
    Judge.step = judged  # type: ignore[method-assign]
    return known


DEALT = (
    (2, "shuffled", True, True, ["random"] * 18),
    (2, "shuffled", True, False, ["random"] * 18),
    (2, "shuffled", False, True, ["random"] * 6 + ["own-shard"] * 12),
    (2, "in order", True, True, ["own-shard"] * 18),
    (3, "one other", True, True, ["unknown"] * 12),
)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[list[str]]]]:
    """The directory of each of the trainings, and what each rank's detectors knew, by place in the table."""
    directory, found = tmp_path_factory.mktemp("dealt"), {}
    for ranks in (2, 3):
        cases = {
            place: (str(directory / str(place)), style, 3, advance, coverage)
            for place, (of, style, advance, coverage, _) in enumerate(DEALT)
            if of == ranks
        }
        known = run_on_kept_ranks(each, ranks, (trained, cases))
        found |= {place: (directory / str(place), [of_rank[place] for of_rank in known]) for place in cases}
    return found


@pytest.mark.parametrize("place", range(len(DEALT)))
def test_in_a_training(place: int, trainings: dict[int, tuple[Path, list[list[str]]]]) -> None:
    _, style, advance, _, expected = DEALT[place]
    directory, known = trainings[place]
    assert known[0] == expected
    assert not any(known[1:])
    facts = json.loads((directory / "run.json").read_text())
    assert facts["data"]["dealt"] == expected[-1]
    assert list(directory.glob("*.new")) == []
    if style == "shuffled":
        assert facts["data"]["by"].startswith("DistributedSampler, shuffled, ")
        assert facts["data"]["by"].endswith("epoch advances" if advance else "its epoch does not advance")
    run = read_run(directory)
    assert run.data == DataDealt(**facts["data"]).sentence
    assert ("data", run.data) in facts_of(plot_context(run, verdict_of(run)))
    before = json.loads((directory / "preflight.json").read_text())
    assert before["data"]["dealt"] == "unknown"  # no loader had been named


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_its_own_files_and_one_has_few(ranks: int, tmp_path: Path) -> None:
    """Rank 0 has two batches, which come again and again; the rows are known by their content."""
    known = run_on_kept_ranks(trained, ranks, (str(tmp_path), "own", 1, True))[0]
    assert len(known) == 40
    assert known[0] == "unknown"
    assert known[-1] == "own-shard"
    assert "random" not in known
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["data"]["dealt"] == "own-shard"
    found = [event for event in read_events(tmp_path / "events.jsonl") if event["severity"] != "info"]
    assert [event for event in found if event["kind"] in ROW_KINDS] == []


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.long
def test_each_rank_shuffles_all_rows(ranks: int, tmp_path: Path) -> None:
    """Nobody has thought of a DistributedSampler: each rank's pass takes every row."""
    run_on_kept_ranks(trained, ranks, (str(tmp_path), "all", 2, True))
    [event] = [event for event in read_events(tmp_path / "events.jsonl") if event["kind"] in ROW_KINDS]
    assert (event["kind"], event["severity"], event["ranks"]) == ("duplicate-data", "warning", list(range(ranks)))
    assert event["step"] < 24  # in the first pass
    assert f"an epoch takes each row {ranks} times" in event["message"]
    assert event["remedy"].startswith("Give the DataLoader a DistributedSampler")
