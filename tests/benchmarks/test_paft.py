"""The study of PAFT: its errors are what they are said to be and enter behind the average; its runs can be repeated."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.paft import cells
from benchmarks.paft.errors import Error, Errors, Noise, Sparse
from benchmarks.paft.methods import METHODS
from benchmarks.paft.store import Store
from benchmarks.paft.tables import mean_of
from benchmarks.paft.tasks import TASKS, shard_of
from benchmarks.paft.theory import expected_divergence
from benchmarks.paft.training import Training, make_engine, train
from ds_silent.config import BLOCK, parse
from ds_silent.drill.faults.injection import Collective, Injection
from ds_silent.drill.train_deepspeed import EngineHooks
from tests.support.distributed import run_distributed

ELEMENTS, VARIANCE, RATE = 20_000, 0.04, 0.05
HEALTHY = Training("digits", "plain", RATE, 6, "none", None, seed=3, constant_rate=True)


# -- the errors alone -------------------------------------------------------------------------------------------------


def reduced(errors: Errors, step: int, result: float = 7.0) -> Tensor:
    """What comes out of a reduction of zeros (this rank's part) that should give ``result`` everywhere."""
    values = torch.zeros(ELEMENTS)
    errors.reduce(Collective(values, lambda: values.fill_(result), step, (0, 0), True))
    return values


def test_noise_has_the_variance_and_no_mean() -> None:
    noise = reduced(Errors(Noise(VARIANCE), 0, 1, 4), 1) - 7.0
    assert float(noise.var()) == pytest.approx(VARIANCE, rel=5 * math.sqrt(2 / ELEMENTS))
    assert abs(float(noise.mean())) < 5 * math.sqrt(VARIANCE / ELEMENTS)


def test_noise_is_another_one_on_every_rank_at_every_step_attempt_and_seed() -> None:
    first, other = Errors(Noise(VARIANCE), 0, 1, 4), Errors(Noise(VARIANCE), 0, 2, 4)
    drawn = [reduced(first, 1), reduced(first, 1), reduced(first, 2), reduced(other, 1)]
    drawn.append(reduced(Errors(Noise(VARIANCE), 1, 1, 4), 1))
    correlations = torch.corrcoef(torch.stack(drawn)).fill_diagonal_(0.0)
    assert float(correlations.abs().max()) < 5 / math.sqrt(ELEMENTS)
    again = Errors(Noise(VARIANCE), 0, 1, 4)
    assert all(torch.equal(reduced(again, step), want) for step, want in zip((1, 1, 2), drawn[:3], strict=True))
    assert first.attempts == 3


@pytest.mark.parametrize("kind", ["noise", "flip", "dropped", "stale"])
def test_a_sparse_error_strikes_one_rank_at_its_steps_and_a_repetition_is_clean(kind: str) -> None:
    for step in (4, 8):
        struck = 0
        for rank in range(4):
            errors = Errors(Sparse(kind, 4, variance=1.0), seed=0, rank=rank, ranks=4)
            assert torch.equal(reduced(errors, step - 1, 5.0), torch.full((ELEMENTS,), 5.0))
            struck += not torch.equal(reduced(errors, step), torch.full((ELEMENTS,), 7.0))
            assert torch.equal(reduced(errors, step), torch.full((ELEMENTS,), 7.0))
        assert struck == 1


@pytest.mark.parametrize(("kind", "result"), [("dropped", 0.0), ("stale", 5.0)])
def test_what_a_lost_reduction_leaves(kind: str, result: float) -> None:
    errors = Errors(Sparse(kind, 4, all_ranks=True), 0, 0, 4)
    reduced(errors, 3, 5.0)
    assert torch.equal(reduced(errors, 4), torch.full((ELEMENTS,), result))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind must be noise"):
        reduced(Errors(Sparse("noisy", 1, all_ranks=True), 0, 0, 4), 1)


# -- in a real training -----------------------------------------------------------------------------------------------


def _applied(error: Error, folder: str) -> list[float]:
    """One step of plain SGD: what was applied on this rank."""
    engine = make_engine(HEALTHY, folder)
    errors = Errors(error, 0, dist.get_rank(), dist.get_world_size())
    before = torch.cat([p.detach().reshape(-1).clone() for p in engine.module.parameters()])
    loss = engine(*TASKS["digits"].batch(3, 1, dist.get_rank(), dist.get_world_size()))
    with EngineHooks(engine, Injection(reduction=errors.reduce)) as hooks, hooks.backward(1, 0, last=True):
        engine.backward(loss)
        engine.step()
    after = torch.cat([p.detach().reshape(-1) for p in engine.module.parameters()])
    engine.destroy()
    assert errors.attempts == 1
    applied: list[float] = ((before - after) / RATE).tolist()
    return applied


def _trainings() -> tuple[Any, ...]:
    rank = dist.get_rank()
    folder = f"/nowhere/{rank}"  # nothing is written without a block
    noisy = replace(HEALTHY, error=Noise(VARIANCE), divergence=True)
    return (
        _applied(None, folder),
        _applied(Noise(VARIANCE), folder),
        [train(HEALTHY), train(HEALTHY), train(noisy), train(noisy), train(replace(HEALTHY, seed=4))],
    )


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_distributed(_trainings, 2)


def test_the_noise_enters_after_the_average_and_differs_between_the_ranks(ranks: list[Any]) -> None:
    (clean, *_), (clean_1, *_) = ranks
    assert clean == clean_1
    noise = torch.tensor([rank[1] for rank in ranks]) - torch.tensor(clean)
    for own in noise:  # divided by the number of ranks, or averaged, it would be 1/4 or 1/2 of that
        assert float(own.var()) == pytest.approx(VARIANCE, rel=0.06)
    assert abs(float(torch.corrcoef(noise)[0, 1])) < 0.05


def test_a_run_is_reproducible_and_only_an_error_sets_replicas_apart(ranks: list[Any]) -> None:
    healthy, again, noisy, noisy_again, other = ranks[0][2]
    assert isinstance(healthy["hash"], str)  # one for all ranks
    assert healthy["hash"] == again["hash"] != other["hash"]
    assert len(set(noisy["hash"])) == 2
    assert noisy["hash"] == noisy_again["hash"]
    assert healthy["divergence"] == 0.0
    assert healthy["attempts"] == 1.0
    assert healthy["relative_noise"] == 0.0


def test_the_bytes_of_a_plain_run_are_those_of_the_gradient(ranks: list[Any]) -> None:
    elements = sum(parameter.numel() for parameter in TASKS["digits"].model(0).parameters())
    assert ranks[0][2][0]["bytes_per_step"] == 4 * elements


def test_replicas_walk_apart_as_the_formula_says(ranks: list[Any]) -> None:
    elements = sum(parameter.numel() for parameter in TASKS["digits"].model(0).parameters())
    expected = expected_divergence([RATE] * 6, VARIANCE, elements, 2, None)
    assert ranks[0][2][2]["divergences"] == pytest.approx(expected, rel=0.05)


# -- formula, tables, store -------------------------------------------------------------------------------------------


def test_the_formula_against_a_simulated_walk() -> None:
    rates, ranks, elements = [0.1, 0.2, 0.3, 0.1, 0.1], 4, 4_000
    generator = torch.Generator().manual_seed(0)
    place, walked = torch.zeros(ranks, elements, dtype=torch.float64), []
    for step, rate in enumerate(rates, start=1):
        place -= rate * 0.5 * torch.randn(ranks, elements, generator=generator, dtype=torch.float64)
        if step % 3 == 0:
            place[:] = place.mean(0)
        walked.append(float((place - place.mean(0)).square().sum(1).mean()))
    expected = expected_divergence(rates, 0.25, elements, ranks, 3)
    assert expected[2] == 0.0
    assert walked == pytest.approx(expected, rel=0.1, abs=1e-20)


def test_standard_error_of_a_mean() -> None:
    assert mean_of([1.0, 2.0, 3.0, 4.0]).error == pytest.approx(math.sqrt(5 / 3 / 4))
    assert str(mean_of([90.0])) == "90.0 ± 0.0"


def test_ranks_share_an_epoch_without_repetition() -> None:
    rows = torch.cat([shard_of(64, 4, 0, step, rank, 4) for step in range(1, 5) for rank in range(4)])
    assert sorted(rows.tolist()) == list(range(64))
    assert not torch.equal(shard_of(64, 4, 0, 1, 0, 4), shard_of(64, 4, 0, 5, 0, 4))


def test_every_method_is_a_block_that_is_accepted() -> None:
    for name, method in METHODS.items():
        block = method.block("somewhere")
        assert (block is None) == (name == "none")
        assert block is None or parse({BLOCK: block}) is not None


def test_every_run_ends_just_before_an_averaging() -> None:
    periods = [method.period for method in METHODS.values() if method.period]
    assert periods == [5, 10, 50]
    assert all((cells.STEPS + 1) % period == 0 for period in periods)


def test_what_is_kept_is_not_run_again_and_a_torn_line_is(tmp_path: Path) -> None:
    path, kept = tmp_path / "results.jsonl", {"key": HEALTHY.key, "scores": [1.0]}
    path.write_text(json.dumps(kept) + "\n" + '{"key": "to')
    store = Store(path)
    store.complete([HEALTHY])
    assert store[HEALTHY] == kept
    assert replace(HEALTHY, seed=5) not in store
    assert replace(HEALTHY, error=Noise(0.1)).key != replace(HEALTHY, error=Sparse("noise", 25, 0.1)).key
