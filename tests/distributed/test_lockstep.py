"""Whatever ranks do at different times: what runs without an observer runs with one, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_silent
from ds_silent.exchange.observation import ASTRAY, BROKE, LEFT, Gathered, Status
from ds_silent.observing.lockstep import Lockstep
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed
from tests.support.made_observations import gathered_of
from tests.support.training import LENGTH, ROWS, VOCABULARY, Case, _hash_weights, engine_of

ITERATIONS = 9
Act = Callable[[Any, Any, int], None]  # (engine, observer or None, iteration), on rank 1 after its step


def nothing(engine: Any, observer: Any, iteration: int) -> None:
    """The step like any other."""


def steps_again(engine: Any, observer: Any, iteration: int) -> None:
    if iteration == 3:
        for _ in range(3):
            engine.step()


def closes(engine: Any, observer: Any, iteration: int) -> None:
    if iteration == 3 and observer is not None:
        observer.close()


def evaluates(engine: Any, observer: Any, iteration: int) -> None:
    if iteration % 2:
        engine.eval()
        with torch.no_grad():
            engine(torch.zeros(1, LENGTH, dtype=torch.int64), False)
        engine.train()


def flushes(engine: Any, observer: Any, iteration: int) -> None:
    if observer is not None:
        observer.flush()
        observer.state_dict()


def counts_on(engine: Any, observer: Any, iteration: int) -> None:
    """As a checkpoint does that only this rank loads."""
    if iteration == 3:
        engine.global_steps += 10


def loads_state(engine: Any, observer: Any, iteration: int) -> None:
    if iteration == 3 and observer is not None:
        observer.load_state_dict(observer.state_dict())


@dataclass(frozen=True)
class Different:
    """What rank 1 does that the others do not."""

    name: str
    act: Act = nothing
    skips: tuple[int, ...] = ()  # iterations without engine.step()
    accumulation: tuple[int, int] = (1, 1)  # of the others, of rank 1
    everybody: bool = False  # all ranks do the same
    backwards: int = 1  # per step, on all ranks
    block: dict[str, Any] = field(default_factory=dict)
    odd: tuple[int, ...] | None = None  # ranks of the event observer-off; None: observed to the end
    elsewhere: str | None = None  # place of the error about rank 1, where it counts another step
    steps: tuple[int, ...] | None = None  # records; None: not looked at


def train(different: Different, stage: int, directory: Path, enabled: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    accumulation = different.accumulation[rank == 1]
    config = Case(stage=stage, accumulation=accumulation).config(directory, enabled)
    if enabled:
        config["silent_consistency"] |= different.block
    engine = engine_of(config)
    observer = ds_silent.observer_of(engine)
    generator = torch.Generator().manual_seed(99 + rank)
    other = rank == 1 or different.everybody
    losses = torch.zeros(1)
    for iteration in range(1, ITERATIONS + 1):
        for _ in range(accumulation):
            for _ in range(different.backwards):
                loss = engine(torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), False)
                engine.backward(loss)
            if not (other and iteration in different.skips):
                engine.step()
        if other:
            different.act(engine, observer, iteration)
        losses += loss.detach()
        dist.all_reduce(losses)  # a script's own collective, on the same ranks
    observing = observer is not None and observer.measures(0)
    if observer is not None:
        observer.close()
    dist.barrier()
    found: dict[str, Any] = {"weights": _hash_weights(engine), "losses": float(losses), "observing": observing}
    if enabled and rank == 0:
        found["events"] = [
            (event["kind"], tuple(event["ranks"]), event["message"], event["where"], event["severity"])
            for event in read_events(directory / "events.jsonl")
        ]
        found["steps"] = tuple(record["step"] for record in read_metrics(directory / "metrics.jsonl"))
    engine.destroy()
    return found


def both(cases: tuple[Different, ...], stage: int, directory: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each training without and with an observer."""
    return [
        (train(case, stage, Path(directory), False), train(case, stage, Path(directory) / case.name, True))
        for case in cases
    ]


ALL = tuple(range(1, ITERATIONS + 1))
MAJORITY = {"respond": {"on_replica_drift": "majority"}, "integrity": {"replica_interval": 2}}
EVERY_STAGE = (
    Different("nothing", steps=ALL),
    Different("evaluates", evaluates, steps=ALL),
    Different("flushes", flushes, steps=ALL),
    Different("closes", closes, odd=(1,)),
    Different("counts-on", counts_on, elsewhere="optimizer step", steps=ALL),
    Different("counts-on-interval", counts_on, elsewhere="optimizer step", block={"interval": 2}, steps=(2, 4, 6, 8)),
    Different("all-count-on", counts_on, everybody=True, steps=(3, 16, 18), block={"interval": 3}),
)
STAGE_0 = (
    *EVERY_STAGE,
    Different("accumulation", accumulation=(2, 4), odd=(1,), steps=()),
    Different("skips", skips=(3,), odd=(1,)),
    Different("skips-first", skips=(1,), odd=(1,)),
    Different("skips-twice", skips=(3, 4), odd=(1,)),
    Different("skips-interval", skips=(4,), odd=(1,), block={"interval": 3}),
    Different("skips-exact", skips=(3, 4), odd=(1,), block={"direction": {"method": "exact", "sketch_size": 1024}}),
    Different("steps-again", steps_again, elsewhere="optimizer step", steps=ALL),
    Different("two-backwards", backwards=2, steps=ALL[1:]),
    Different("majority", loads_state, steps=ALL, block=MAJORITY),
    Different("majority-closes", closes, odd=(1,), block=MAJORITY),
)


def check(cases: tuple[Different, ...], stage: int, ranks: int, directory: Path) -> None:
    results = run_distributed(both, ranks, (cases, stage, str(directory)), timeout=550)
    for index, case in enumerate(cases):
        for rank in range(ranks):
            plain, observed = results[rank][index]
            assert observed["weights"] == plain["weights"], (case.name, rank)
            assert observed["losses"] == plain["losses"], (case.name, rank)
            if case.act is not closes or rank != 1:
                assert observed["observing"] == (case.odd is None), (case.name, rank)
        observed = results[0][index][1]
        off = [event[1:3] for event in observed["events"] if event[0] == "observer-off"]
        assert len(off) == (case.odd is not None), (case.name, observed["events"])
        if case.odd is not None:
            assert off[0][0] == (case.odd if ranks > 2 or case.act is closes or case.skips else ()), (case.name, off)
        places = ("checkpoint", "optimizer step")
        moved = [event for event in observed["events"] if event[3] in places and event[4] != "info"]
        assert [(event[1], event[3:]) for event in moved] == (
            [] if case.elsewhere is None else [((1,) if ranks > 2 else (), (case.elsewhere, "error"))]
        ), (case.name, observed["events"])
        assert not any("broke" in message for _, message in off), (case.name, off)
        if case.steps is not None:
            assert observed["steps"] == case.steps, case.name


@pytest.mark.long
def test_ranks_that_do_other_things_at_other_times(tmp_path: Path) -> None:
    check(STAGE_0, 0, 3, tmp_path)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.long
def test_under_zero_too(stage: int, tmp_path: Path) -> None:
    more = (Different("accumulation", accumulation=(2, 4), odd=(1,), steps=()),) if stage == 1 else ()
    check((*EVERY_STAGE, *more), stage, 3 - stage % 2, tmp_path)


# -- reading each other's words (pure) -----------------------------------------------------------------


def gathered(**words: list[float]) -> Gathered:
    ranks = len(next(iter(words.values())))
    return gathered_of(7, ranks, **{f"status.{name}": values for name, values in words.items()})


def test_what_ranks_say_of_themselves() -> None:
    steps, boundaries = [7.0] * 3, [6.0] * 3
    assert Lockstep(1).read(gathered(failed=[0.0] * 3, step=steps, boundary=boundaries))[1] is None
    for failed, ranks, word in (
        ([0.0, BROKE, LEFT], (1,), "broke"),
        ([0.0, LEFT, ASTRAY], (2,), "without a step"),
        ([LEFT, 0.0, 0.0], (0,), "closed"),
    ):
        _, event = Lockstep(1).read(gathered(failed=failed, step=steps, boundary=boundaries))
        assert event is not None
        assert (event.kind, event.step, event.ranks) == ("observer-off", 7, ranks)
        assert event.severity == ("error" if ASTRAY in failed else "warning")
        assert word in event.message
    for step, boundary, ranks, kind in (
        ([7.0, 8.0, 7.0], boundaries, (1,), "config-mismatch"),
        ([7.0, 8.0, 7.0], [0.0] * 3, (1,), "initial-weights-mismatch"),
        (steps, [6.0, 6.0, 5.0], (2,), "observer-off"),
        ([7.0, 8.0, 9.0], boundaries, (), "config-mismatch"),
    ):
        lockstep, event = Lockstep(1).read(gathered(step=step, boundary=boundary))
        assert event is not None
        assert (event.ranks, event.kind, event.severity) == (ranks, kind, "error")
        if kind != "observer-off":  # told once while the same ranks are elsewhere, and observation goes on
            assert lockstep.read(gathered(step=step, boundary=boundary))[1] is None
            assert lockstep.read(gathered(step=steps, boundary=boundary))[0].ahead_of_first == ()
            assert lockstep.next_base == 7 - int(boundary[0])


def test_steps_move_together_from_the_next_boundary_on() -> None:
    lockstep, event = Lockstep(1).read(gathered(step=[50.0, 50.0], boundary=[0.0, 0.0]))
    assert event is None
    assert lockstep.scheduled == 1  # some ranks may read it earlier than others, and all must count alike
    assert lockstep.passed().scheduled == 51


def test_several_backward_passes_per_step_are_learned_where_all_ranks_make_them() -> None:
    once = Lockstep(1).reduction()
    twice = once.reduction()
    assert (once.whole, twice.whole) == (True, False)
    assert twice.status(1, Status()).failed == ASTRAY
    assert twice.sent().status(1, Status()).failed == 0.0
    lockstep, event = twice.sent().passed().read(gathered(failed=[ASTRAY] * 4))
    assert event is None
    lockstep = lockstep.passed().stepped().reduction()
    assert lockstep.whole
    assert lockstep.reduction().whole
    assert not lockstep.reduction().reduction().whole
