"""Faults behind the capture: each strikes where it says, in a running DeepSpeed, and the real alarm finds it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ds_silent.drill.faults.catalogue import FAULTS
from ds_silent.drill.faults.injection import WORDS, Collective, Injection, Target, flip_bit, top_exponent_bit
from ds_silent.drill.run_drill import DrillOptions, Outcome, exit_code, judged, trial_of
from ds_silent.drill.run_trial import TrialRun, run_trial
from ds_silent.drill.setting import DrillSetting, make_setting
from ds_silent.drill.training import Trial
from ds_silent.maths.causes import Cause
from ds_silent.practice.ranks import on_ranks
from tests.drill.cold_start import cold_start

TARGET = Target(2, 4, 3)
RESULT = torch.arange(1.0, 9.0)


# -- the injections alone ---------------------------------------------------------------------------------------------


def reduced(injection: Injection, step: int, bucket: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a reduction gives that would add 100 to its input of 1, 2, …, 8."""
    values = RESULT.to(dtype).clone()
    assert injection.reduction is not None
    injection.reduction(Collective(values, lambda: values.add_(100.0), step, (0, bucket), True))
    return values


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("contribution-missing", torch.full((8,), 100.0)),
        ("contribution-doubled", 2 * RESULT + 100.0),
        ("bucket-dropped", RESULT),
        ("division-forgotten", 4 * (RESULT + 100.0)),
        ("bucket-tail-zeroed", (RESULT + 100.0) * torch.tensor([1.0] * 6 + [0.0] * 2)),
    ],
)
def test_a_reduction_is_healthy_before_the_strike_and_wrong_from_it_on(name: str, result: Tensor) -> None:
    fault = FAULTS[name]
    injection = fault.inject(Target(2, 4, 3, fault.size), 2)
    for step in (1, 2):
        assert torch.equal(reduced(injection, step), RESULT + 100.0)
    for step in (3, 4):
        assert torch.equal(reduced(injection, step), result)
    if name in ("bucket-dropped", "bucket-tail-zeroed"):
        assert torch.equal(reduced(injection, 3, bucket=1), RESULT + 100.0)  # the first bucket only


def test_what_is_left_over_or_stale_is_of_the_step_before() -> None:
    stale, left = (FAULTS[name].inject(TARGET, 0) for name in ("bucket-stale", "partition-not-cleared"))
    for step, kept, added in ((1, 0, 0), (2, 0, 0), (3, 2, 2), (4, 2, 5)):
        for injection, expected in ((stale, kept or step), (left, step + added)):
            values = torch.full((4,), float(step))
            assert injection.reduction is not None
            injection.reduction(Collective(values, lambda: None, step, (0, 0), True))
            assert values.tolist() == [expected] * 4


@pytest.mark.parametrize("one_rank", [False, True])
def test_the_noise_has_its_size_and_is_the_same_on_all_ranks_or_on_one(one_rank: bool) -> None:
    name = "aggregate-noise-one-rank" if one_rank else "aggregate-noise"
    results = []
    for me in range(4):
        injection = FAULTS[name].inject(Target(2, 4, 3, 0.05), me)
        if one_rank and me != 2:
            assert injection == Injection()
            continue
        noise = reduced(injection, 3) - (RESULT + 100.0)
        assert float(noise.norm() / (RESULT + 100.0).norm()) == pytest.approx(0.05, rel=1e-3)
        results.append(noise)
    assert all(torch.equal(noise, results[0]) for noise in results)


@pytest.mark.parametrize(("dtype", "bytes_"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_one_bit_of_the_largest_element_flips_once_and_its_size_is_known(dtype: torch.dtype, bytes_: int) -> None:
    healthy = (RESULT + 100.0).to(dtype)
    largest = float(healthy[7])
    for byte in range(4):
        injection = FAULTS[f"aggregate-flip-byte-{byte}"].inject(TARGET, 0)
        assert torch.equal(reduced(injection, 2, dtype=dtype), healthy)
        flipped = reduced(injection, 3, dtype=dtype)
        reduced(injection, 3, bucket=1, dtype=dtype)  # the size is relative to all buckets
        assert torch.equal(reduced(injection, 4, dtype=dtype), healthy)
        assert injection.change is not None
        change, norm = injection.change(), 2**0.5 * float(healthy.double().norm())
        if byte >= bytes_:
            assert (change, torch.equal(flipped, healthy)) == (0.0, True)
            continue
        # 2^6 <= largest < 2^7: the weight of bit i of the mantissa is 2^(6 - 23 + i), or 2^(6 - 7 + i) in bf16
        sizes = {(4, 0): 2.0 ** (7 - 17), (4, 1): 2.0 ** (15 - 17), (4, 2): None, (4, 3): 2 * largest}
        sizes |= {(2, 0): None, (2, 1): 2 * largest}
        size = sizes[bytes_, byte]
        if size is None:  # the lowest bit of the exponent: twice or half
            assert float(flipped[7]) in (2 * largest, largest / 2)
            size = abs(float(flipped[7]) - largest)
        assert change == pytest.approx(size / norm, rel=1e-6)
        assert torch.equal(flipped[:7], healthy[:7])


def test_the_optimizers_input_and_its_step() -> None:
    weight = torch.nn.Parameter(torch.ones(3))

    def applied(name: str, step: int, me: int = 2) -> tuple[list[float] | None, Any]:
        optimizer = torch.optim.SGD([weight], lr=0.0)
        weight.grad = torch.tensor([1.0, 2.0, 2.0])
        fault = FAULTS[name]
        update = fault.inject(Target(2, 4, 3, fault.size), me).update
        if update is None:
            return None, None
        ran = update(optimizer, lambda: "ran", step)
        return weight.grad.tolist(), ran

    assert applied("applied-factor-4", 2, me=0) == ([1, 2, 2], "ran")
    assert applied("applied-factor-4", 3, me=0) == ([4, 8, 8], "ran")
    assert applied("applied-factor-4-one-rank", 3, me=0) == (None, None)
    assert applied("update-skipped", 3) == ([1, 2, 2], None)
    assert applied("update-skipped", 4) == ([1, 2, 2], "ran")
    noisy, ran = applied("applied-noise", 3)
    assert noisy is not None
    assert float((torch.tensor(noisy) - torch.tensor([1.0, 2.0, 2.0])).norm()) == pytest.approx(0.15, rel=1e-4)
    assert ran == "ran"


@pytest.mark.parametrize("name", ["gathered-weights-stale", "gathered-weights-bit"])
def test_a_piece_of_the_gathered_weights(name: str) -> None:
    gathering = FAULTS[name].inject(TARGET, 2).gathering
    assert gathering is not None
    for step in (2, 3):
        weights = torch.zeros(8)
        gathering(Collective(weights, partial(weights.fill_, 1.0), step, (0, 0), True))
        wrong = (weights != 1.0).nonzero().flatten().tolist()
        assert wrong == ([] if step == 2 else [6, 7] if name.endswith("stale") else [6])
    assert FAULTS[name].inject(TARGET, 1).gathering is None


def test_every_bit_can_be_flipped() -> None:
    for dtype, width in ((torch.float32, 32), (torch.bfloat16, 16)):
        for bit in range(width):
            values = torch.tensor([1.5, 1.5], dtype=dtype)
            flip_bit(values, 1, bit)
            integers = values.view(WORDS[values.element_size()])
            assert int(integers[0] ^ integers[1]) & (2**width - 1) == 1 << bit


def test_a_flip_of_the_top_exponent_bit_is_a_factor_of_two_to_the_128() -> None:
    values = torch.tensor([0.75, 2.0**-20, 3.0])
    flip_bit(values, 1, top_exponent_bit(values))
    assert values.tolist() == [0.75, 2.0**108, 3.0]


# -- in real trainings -------------------------------------------------------------------------------------------------

BLOCK: dict[str, Any] = {"detectors": {"enabled": True}}
CELLS: tuple[tuple[int, str, int, tuple[str, ...]], ...] = (
    (0, "fp32", 1, ("contribution-missing", "bucket-dropped", "aggregate-flip-one-rank", "update-skipped")),
    (0, "bf16", 2, ("micro-batch-missing", "gradients-not-cleared", "weight-changed")),
    (1, "fp32", 1, ("aggregate-flip-lowest-bit", "aggregate-flip-byte-0", "gathered-weights-bit")),
    (2, "bf16", 2, ("bucket-stale", "wrong-group", "aggregate-noise", "applied-factor-4", "parameter-unreduced")),
)
HIT_BY: dict[str, tuple[str, tuple[str, ...], Any]] = {
    # fault of the first cell -> the functions without which it cannot be found, and what they say instead
    "contribution-missing": ("ds_silent.measure.reduction_check", ("explain",), Cause("noise", (0,))),
    "update-skipped": ("ds_silent.detectors", ("reduction_errors.reduction", "replica_errors.replicas"), []),
}


def setting_of(cell: tuple[int, str, int, tuple[str, ...]]) -> DrillSetting:
    stage, dtype, accumulation, _ = cell
    return make_setting({"silent_consistency": BLOCK, "gradient_accumulation_steps": accumulation}, 4, stage, dtype)


def trials_of(cell: tuple[int, str, int, tuple[str, ...]]) -> list[Trial]:
    return [trial_of(FAULTS[name], DrillOptions(), setting_of(cell)) for name in cell[3]]


Key = tuple[int, str, str]
"""A training: the number of its cell, ``intact`` or ``disabled`` (with a piece of the alarm taken out), its fault."""
ALL: tuple[Key, ...] = tuple((number, "intact", name) for number, cell in enumerate(CELLS) for name in cell[3])
FEW: tuple[Key, ...] = (
    (2, "intact", "aggregate-flip-lowest-bit"),
    (2, "intact", "aggregate-flip-byte-0"),
    *((0, "disabled", name) for name in HIT_BY),
)


def perform(send: Callable[[Any], None], directory: str, keys: tuple[Key, ...]) -> None:
    for number in sorted({number for number, *_ in keys}):
        stage, dtype, accumulation, _ = CELLS[number]
        practice = cold_start(BLOCK, stage, dtype, accumulation)
        trials = {trial.name: trial for trial in trials_of(CELLS[number])}
        for _, state, name in (key for key in keys if key[0] == number):
            with ExitStack() as taken_out:
                if state == "disabled":
                    place, functions, nothing = HIT_BY[name]
                    for function in functions:
                        instead = patch(f"{place}.{function}", lambda *given, nothing=nothing: nothing)
                        taken_out.enter_context(instead)
                folder = Path(directory, str(number), state, name)
                send(((number, state, name), run_trial(practice, trials[name], folder)))


@pytest.fixture(scope="module")
def all_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, TrialRun]:
    return dict(on_ranks(perform, (str(tmp_path_factory.mktemp("all")), ALL), 4))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, TrialRun]:
    return dict(on_ranks(perform, (str(tmp_path_factory.mktemp("few")), FEW), 4))


@pytest.mark.parametrize("number", range(len(CELLS)))
@pytest.mark.long
def test_the_real_alarm_finds_them_at_their_first_step(number: int, all_runs: dict[Key, TrialRun]) -> None:
    cell = CELLS[number]
    found = [all_runs[number, "intact", name] for name in cell[3]]
    outcome = Outcome(setting_of(cell), tuple(judged(tuple(trials_of(cell)), found, setting_of(cell))), ())
    assert {result.trial.name: result.verdict for result in outcome.results if not result.right} == {}
    assert exit_code(outcome) == 0
    for result in outcome.results:
        assert result.trial.fault is not None
        if result.trial.name == "aggregate-flip-lowest-bit":
            assert result.verdict.answer == "below rounding"
            continue
        due = 5 if result.trial.fault.strikes == "replica" else 4
        assert result.verdict.step == due


@pytest.mark.parametrize("name", HIT_BY)
def test_without_a_piece_of_the_alarm_the_drill_fails(name: str, runs: dict[Key, TrialRun]) -> None:
    cell = CELLS[0]
    trials = tuple(trial for trial in trials_of(cell) if trial.name == name)
    outcome = Outcome(setting_of(cell), tuple(judged(trials, [runs[0, "disabled", name]], setting_of(cell))), ())
    assert exit_code(outcome) == 1
    # that a rank skipped a step is still seen from its optimizer's step counter, as another kind
    expected = {"contribution-missing": "wrong ranks", "update-skipped": "wrong kind"}
    assert outcome.results[0].verdict.answer == expected[name]


def test_a_flip_of_the_lowest_byte_is_judged_by_its_own_size(runs: dict[Key, TrialRun]) -> None:
    run = runs[2, "intact", "aggregate-flip-byte-0"]
    assert run.change is not None
    assert run.rounding is not None
    lowest = runs[2, "intact", "aggregate-flip-lowest-bit"].change
    assert lowest == pytest.approx(2.0**-7 * run.change, rel=1e-3)  # the same element, seven bits lower
    assert 2.0**-16 * 1e-3 < run.change < 2.0**-16  # of the largest element, which is less than the whole
    assert 1e-8 < run.rounding < 1e-6
