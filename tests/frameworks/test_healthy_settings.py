"""No setting that changes the reduction's or the optimizer's arithmetic in health is told as a fault."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks.test_oracle import chunks
from tests.support.distributed import run_on_kept_ranks
from tests.support.healthy import (
    AUTOCAST,
    SETTINGS,
    STEPS,
    SUM,
    Fault,
    Setting,
    Trace,
    clip,
    scale_data,
    train,
)
from tests.support.repairs import corrupted
from tests.support.training import DTYPES, Case
from tests.support.wrong_reductions import (
    FAULTY,
    applied,
    clipped_differently,
    contribution,
    division,
    missing_micro_batch,
    unreduced,
)

RANKS = 3  # no power of two: the division rounds
BLOCK: dict[str, Any] = {
    "tensorboard": False,
    "integrity": {"replica_interval": 2},
    "direction": {"sketch_size": 1024},
}
HARMLESS = ("outlier-rank", "drift", "data-order-mismatch", "low-coverage")  # not about what is reduced or applied


def run(settings: tuple[Setting, ...], directory: str) -> list[tuple[Trace, Trace]]:
    """On every rank: each setting with the block and without it."""
    results = []
    for setting in settings:
        folder = Path(directory) / setting.name
        results.append((train(setting, folder, BLOCK), train(setting, folder, None)))
    return results


def check(settings: tuple[Setting, ...], results: list[list[tuple[Trace, Trace]]]) -> None:
    for number, setting in enumerate(settings):
        for rank, of_rank in enumerate(results):
            observed, plain = of_rank[number]
            assert observed.state == plain.state, (setting, rank)
        check_records(setting, results[0][number][0], len(results))


def check_records(setting: Setting, trace: Trace, ranks: int) -> None:
    told = [event for event in trace.events if event["kind"] not in HARMLESS]
    notes = [event for event in told if event["severity"] == "info"]
    assert notes == told, (setting.name, told)
    late = [event for event in notes if event["where"] == "step counter"]  # a step that DeepSpeed takes by itself
    assert len(late) == (setting.case.stage == 0 and setting.case.dtype != "fp32"), (setting.name, late)
    assert len(notes) - len(late) == setting.noted, (setting.name, notes)
    assert len(trace.records) == STEPS, setting
    unit = torch.finfo(DTYPES[setting.travels]).eps / 2
    finite = [record["integrity"] for record in trace.records if not isinstance(record["loss"]["mean"], str)]
    checked = [found for found in finite if isinstance(found["relative_error"], float)]
    overflows = "fp16" in (setting.case.dtype, setting.travels) or "torch_autocast" in setting.case.top
    assert len(checked) >= (1 if overflows else STEPS), setting
    for found in checked:
        assert 0.0 < found["relative_error"] < found["rounding_bound"] < 24 * unit, (setting, found)


@pytest.mark.timeout(600)
def test_what_is_healthy_is_not_told(tmp_path: Path) -> None:
    quick = tuple(setting for setting in SETTINGS if setting.quick)
    check(quick, run_on_kept_ranks(run, RANKS, (quick, str(tmp_path)), timeout=550))


@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("settings", chunks(SETTINGS, 12), ids=lambda settings: settings[0].name)
def test_every_healthy_setting(settings: tuple[Setting, ...], tmp_path: Path) -> None:
    check(settings, run_on_kept_ranks(run, 2, (settings, str(tmp_path)), timeout=1100))


# -- and what is not healthy, under the same settings ------------------------------------------------------------------


@dataclass(frozen=True)
class Wrong:
    """A fault under a setting, and what has to be told of it."""

    setting: Setting
    fault: Fault
    says: tuple[str, ...]  # in the messages of the first step's events
    ranks: tuple[int, ...]
    kind: str = "aggregation-error"
    step: int = FAULTY


def _under(name: str, **of_case: Any) -> Setting:
    between = of_case.pop("between", None)
    return Setting(name, Case(**of_case), between=between)


MISSING, TWICE = contribution(0.0, 1), contribution(2.0, 1)
WRONG = (
    Wrong(_under("sum-0", top=SUM), MISSING, ("is not the sum of", "rank 1 0.00 times"), (1,)),
    Wrong(_under("sum-1", top=SUM, stage=1), TWICE, ("is not the sum of", "rank 1 2.00 times"), (1,)),
    Wrong(_under("sum-2-bf16", top=SUM, stage=2, dtype="bf16"), MISSING, ("rank 1 0.00 times",), (1,)),
    Wrong(_under("sum-divided", top=SUM, stage=1), division(1 / 3), ("It is 0.333 times the sum in all",), ()),
    Wrong(_under("mean-undivided"), division(3.0), ("is not the mean of", "It is 3 times the mean in all"), ()),
    Wrong(_under("sum-unreduced", top=SUM), unreduced, ("Every rank holds another one",), (), "unreduced-gradient"),
    Wrong(_under("sum-unreduced-2", top=SUM, stage=2), unreduced, ("it is 1 times the gradient of rank",), (),
          "unreduced-gradient"),
    Wrong(_under("sum-micro-batch", top=SUM, stage=2, accumulation=2), missing_micro_batch(0, 2),
          ("not the sum",), (2,)),
    Wrong(_under("autocast-0", top=AUTOCAST), MISSING, ("rank 1 0.00 times",), (1,)),
    Wrong(_under("autocast-1", top=AUTOCAST, stage=1), MISSING, ("rank 1 0.00 times",), (1,)),
    Wrong(_under("autocast-2", top=AUTOCAST, stage=2), TWICE, ("rank 1 2.00 times",), (1,)),
    Wrong(_under("autocast-sum", top={**AUTOCAST, **SUM}, stage=1), MISSING, ("the sum of", "rank 1 0.00 times"), (1,)),
    Wrong(_under("clipping", between=clip), MISSING, ("rank 1 0.00 times",), (1,)),
    Wrong(_under("clipping-bf16", between=clip, dtype="bf16"), TWICE, ("rank 1 2.00 times",), (1,)),
    Wrong(_under("clipping-unreduced", between=clip), unreduced, ("Every rank holds another",), (),
          "unreduced-gradient"),
    Wrong(_under("clipping-a-sum", between=clip, top=SUM), MISSING, ("the sum of", "rank 1 0.00 times"), (1,)),
    Wrong(_under("scaling", between=scale_data), TWICE, ("rank 1 2.00 times",), (1,)),
    Wrong(_under("clipping-applied", between=clip, clipping=1.0), applied(4.0, 1),
          ("applied 4 times the aggregated gradient", "on rank 1"), (1,)),
    Wrong(_under("clipping-apart", between=clip), clipped_differently(1),
          ("the ranks scaled the gradient differently", "rank 1 applied"), (1,)),
)  # fmt: skip


def run_wrong(directory: str, numbers: tuple[int, ...]) -> list[Trace]:
    return [train(WRONG[n].setting, Path(directory) / str(n), BLOCK, WRONG[n].fault) for n in numbers]


@pytest.fixture(scope="module")
def wrongs(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    """What rank 0 wrote."""
    arguments = str(tmp_path_factory.mktemp("wrong")), tuple(range(len(WRONG)))
    return list(run_on_kept_ranks(run_wrong, RANKS, arguments, timeout=280)[0])


@pytest.mark.parametrize("number", range(len(WRONG)), ids=lambda number: WRONG[number].setting.name)
@pytest.mark.long
def test_what_is_wrong_is_told_with_its_factor(number: int, wrongs: list[Trace]) -> None:
    wrong, events = WRONG[number], wrongs[number].events
    told = [event for event in events if event["severity"] == "error"]
    first = min(event["step"] for event in told)
    assert first == wrong.step, told
    of_first = [event for event in told if event["step"] == first and event["kind"] == wrong.kind]
    messages = " ".join(event["message"] for event in of_first)
    assert all(said in messages for said in wrong.says), messages
    assert wrong.ranks in [tuple(event["ranks"]) for event in of_first], of_first


def test_micro_batches_that_enter_a_sum_are_told_apart(tmp_path: Path) -> None:
    number = next(n for n, wrong in enumerate(WRONG) if wrong.setting.name == "sum-micro-batch")
    [trace] = run_on_kept_ranks(run_wrong, RANKS, (str(tmp_path), (number,)))[0]
    told = [event for event in trace.events if "Of the 2 micro-batches" in event["message"]]
    assert [event["ranks"] for event in told] == [[2]]
    assert "number 1 of rank 2 did not enter." in told[0]["message"]


# -- above the gather limit, under responses, and the numbers of the record -------------------------------------------

RETRY = {**BLOCK, "respond": {"on_aggregation_error": "retry"}}


ONCE = corrupted(lambda tensor: tensor.mul_(1.5), range(RANKS), at=FAULTY)  # and not when it is repeated


GUARDED = {  # each as it is, with a response, and struck
    "sum": Setting("sum", Case(top=SUM, clipping=1.0)),
    "sum-1": Setting("sum", Case(top=SUM, stage=1, accumulation=2)),
    "clipped": Setting("clipped", Case(), between=clip),
}


def run_guarded(directory: str, names: tuple[str, ...]) -> dict[str, Trace]:
    folder, traces = Path(directory), {}
    for name in names:
        setting = GUARDED[name]
        traces[name] = train(setting, folder / name, None)
        traces[f"{name}-guarded"] = train(setting, folder / f"{name}-guarded", RETRY)
        traces[f"{name}-hit"] = train(setting, folder / f"{name}-hit", RETRY, ONCE)
    return traces


def run_others(directory: str) -> dict[str, Trace]:
    folder, traces = Path(directory), run_guarded(directory, ("clipped",))
    traces["clipped-unguarded"] = train(GUARDED["clipped"], folder / "unguarded", None, ONCE)
    traces["mean"] = train(Setting("mean", Case()), folder / "mean", BLOCK)
    traces["total"] = train(Setting("total", Case(top=SUM)), folder / "total", BLOCK)
    traces["far"] = train(GUARDED["sum"], folder / "far", BLOCK, gather_limit=1)
    traces["far-missing"] = train(GUARDED["sum"], folder / "far-missing", BLOCK, MISSING, gather_limit=1)
    return traces


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Trace]]:
    return run_on_kept_ranks(run_others, RANKS, (str(tmp_path_factory.mktemp("others")),), timeout=280)


def errors(trace: Trace) -> list[dict[str, Any]]:
    return [event for event in trace.events if event["severity"] == "error"]


@pytest.mark.parametrize("name", ["sum", "sum-1"])
@pytest.mark.long
def test_a_sum_that_arrived_wrong_is_repeated(name: str, tmp_path: Path) -> None:
    ranks = run_on_kept_ranks(run_guarded, RANKS, (str(tmp_path), (name,)))
    for traces in ranks:
        assert traces[name].state == traces[f"{name}-guarded"].state == traces[f"{name}-hit"].state
    assert errors(ranks[0][f"{name}-guarded"]) == []
    told = ranks[0][f"{name}-hit"].events
    assert [event["step"] for event in told if event["kind"] == "repaired"] == [FAULTY]


def test_what_a_script_has_clipped_is_not_reduced_again(others: list[dict[str, Trace]]) -> None:
    """The repetition would bring gradients that nobody has clipped: the error is told, the step is the script's."""
    for traces in others:
        assert traces["clipped"].state == traces["clipped-guarded"].state
        assert traces["clipped-hit"].state == traces["clipped-unguarded"].state
    assert errors(others[0]["clipped-guarded"]) == []
    told = others[0]["clipped-hit"].events
    assert [event["step"] for event in errors(others[0]["clipped-hit"])] == [FAULTY]
    assert not any(event["kind"] == "repaired" for event in told)


def test_above_the_gather_limit_a_sum_is_a_sum(others: list[dict[str, Trace]]) -> None:
    assert errors(others[0]["far"]) == []
    found = [record["integrity"] for record in others[0]["far"].records]
    assert all(0.0 < f["relative_error"] < f["rounding_bound"] < 1e-5 for f in found)
    first = errors(others[0]["far-missing"])[0]
    assert first["step"] == FAULTY
    assert "is not the sum of" in first["message"]
    assert "try another DeepSpeed version, overlap_comm false, or another communication_data_type" in first["remedy"]


def test_the_other_numbers_of_a_sum_are_those_of_its_mean(others: list[dict[str, Trace]]) -> None:
    """At step 1 both have the same weights: only the aggregate is three times longer."""
    mean, total = others[0]["mean"].records[0], others[0]["total"].records[0]
    assert total["grad_norm"]["per_rank"] == mean["grad_norm"]["per_rank"]
    assert total["direction"] == mean["direction"]
    assert total["noise_scale"] == mean["noise_scale"]
    assert total["grad_norm"]["aggregated"] == pytest.approx(RANKS * mean["grad_norm"]["aggregated"], rel=1e-6)
