"""Every injection does in a real training what it says, to the rank it says, from the step it says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from ds_silent.drill.faults.catalogue import FAULTS
from ds_silent.drill.faults.fault import Fault
from ds_silent.drill.faults.injection import Target
from ds_silent.drill.run_trial import run_trial
from ds_silent.drill.training import Trial
from ds_silent.sinks.jsonl import read_metrics
from tests.drill.cold_start import cold_start
from tests.drill.test_faults import EVERYWHERE
from tests.support.distributed import run_distributed

SHORT = 5
REAL = (
    *("same-batch-everywhere", "same-batch-pair", "same-content-other-ids", "no-labels", "nan-loss"),
    *("inf-gradient", "zero-gradient", "gradient-scaled-1.5", "gradient-negated", "loss-scaled"),
    *("gradient-noise-1.0", "stuck-gradient", "frozen-layers", "layer-without-gradient", "sampler-world-size-one"),
)
MORE = (  # of which only the long test says something
    *("label-noise", "other-distribution", "initial-weights-tensor"),
    *("config-value", "learning-rate", "environment-omp"),
)


@dataclass(frozen=True)
class Seen:
    """metrics.jsonl of one training, and the losses that the drill itself saw."""

    records: tuple[dict[str, Any], ...]
    losses: tuple[float, ...]


def train_with_each(directory: str, names: tuple[str, ...], zero_stage: int, dtype: str) -> dict[str, Seen]:
    start = cold_start({"direction": {"sketch_size": 1024}}, zero_stage, dtype)
    seen = {}
    for name in ("healthy", *names):
        fault: Fault | None = FAULTS.get(name)
        target = Target(2, dist.get_world_size(), 3, 1.0 if fault is None else fault.size)
        folder = Path(directory, name)
        run = run_trial(start, Trial(name, fault, target, SHORT), folder)
        records = tuple(read_metrics(folder / "metrics.jsonl")) if dist.get_rank() == 0 else ()
        seen[name] = Seen(records, run.losses)
    return seen


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    return trained_with(REAL, tmp_path_factory)


@pytest.fixture(scope="module")
def trained_more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    return trained_with(MORE, tmp_path_factory)


def trained_with(names: tuple[str, ...], made: pytest.TempPathFactory) -> dict[str, Seen]:
    results = run_distributed(train_with_each, 4, (str(made.mktemp("faults")), names, 0, "fp32"), 240.0)
    return dict(results[0])


def norms(seen: Seen, step: int) -> np.ndarray[Any, Any]:
    return np.array([float(value) for value in seen.records[step - 1]["grad_norm"]["per_rank"]])


def losses(seen: Seen, step: int) -> np.ndarray[Any, Any]:
    return np.array([float(value) for value in seen.records[step - 1]["loss"]["per_rank"]])


OTHERS = [0, 1, 3]


@pytest.mark.parametrize("name", REAL + MORE)
@pytest.mark.long
def test_nothing_happens_before_the_strike_and_never_to_another_rank(
    name: str, trained: dict[str, Seen], trained_more: dict[str, Seen]
) -> None:
    healthy, faulty = trained["healthy"], {**trained_more, **trained}[name]
    assert len(faulty.records) == len(healthy.records) == SHORT
    if name in EVERYWHERE:
        return
    for step in (1, 2) if FAULTS[name].first_step > 2 else ():
        assert norms(faulty, step).tolist() == norms(healthy, step).tolist()
        assert losses(faulty, step).tolist() == losses(healthy, step).tolist()
    # at its first step the fault has not reached the weights yet
    step = 1 if FAULTS[name].first_step == 0 else 3
    assert norms(faulty, step)[OTHERS].tolist() == norms(healthy, step)[OTHERS].tolist()


@pytest.mark.parametrize(
    ("name", "norm", "loss"), [("gradient-scaled-1.5", 1.5, 1.0), ("gradient-negated", 1.0, 1.0), ("loss-scaled", 4, 4)]
)
def test_scales_are_exact(name: str, norm: float, loss: float, trained: dict[str, Seen]) -> None:
    healthy, faulty = trained["healthy"], trained[name]
    assert norms(faulty, 3)[2] == pytest.approx(norm * norms(healthy, 3)[2], rel=1e-6)
    assert losses(faulty, 3)[2] == pytest.approx(loss * losses(healthy, 3)[2], rel=1e-6)


def test_directions(trained: dict[str, Seen]) -> None:
    healthy = trained["healthy"].records[2]["direction"]["per_rank"][2]
    assert trained["gradient-negated"].records[2]["direction"]["per_rank"][2] == pytest.approx(-healthy, rel=1e-5)
    turned = trained["gradient-noise-1.0"]
    assert turned.records[2]["direction"]["per_rank"][2] == pytest.approx(healthy / math.sqrt(2), abs=0.1)
    assert norms(turned, 3)[2] == pytest.approx(math.sqrt(2) * norms(trained["healthy"], 3)[2], rel=0.02)


def test_broken_numbers(trained: dict[str, Seen]) -> None:
    for name in ("nan-loss", "no-labels"):
        assert np.isnan(losses(trained[name], 3)).tolist() == [False, False, True, False]
    assert np.isnan(norms(trained["nan-loss"], 3)).tolist() == [False, False, True, False]
    assert norms(trained["no-labels"], 3)[2] == 0.0 or math.isnan(norms(trained["no-labels"], 3)[2])
    assert np.isfinite(norms(trained["inf-gradient"], 3)).tolist() == [True, True, False, True]
    assert norms(trained["zero-gradient"], 3)[2] == 0.0
    assert losses(trained["zero-gradient"], 3)[2] == losses(trained["healthy"], 3)[2]


def test_a_layer_that_is_left_out_takes_its_share_of_the_norm_and_nothing_of_the_loss(trained: dict[str, Seen]) -> None:
    healthy = trained["healthy"]
    for name in ("frozen-layers", "layer-without-gradient"):
        faulty = trained[name]
        assert 0.0 < norms(faulty, 3)[2] < norms(healthy, 3)[2]
        assert losses(faulty, 3)[2] == losses(healthy, 3)[2]


def test_a_stuck_gradient_is_that_of_the_step_before(trained: dict[str, Seen]) -> None:
    stuck = trained["stuck-gradient"]
    for step in (3, 4, 5):
        assert norms(stuck, step)[2] == norms(stuck, 2)[2]
        assert norms(stuck, step)[0] != norms(stuck, 2)[0]


def test_equal_rows_give_equal_gradients(trained: dict[str, Seen]) -> None:
    for name in ("same-batch-everywhere", "sampler-world-size-one"):
        assert len(set(norms(trained[name], 3).tolist())) == 1
        assert trained[name].records[2]["direction"]["min_cosine"] == pytest.approx(1.0)
    for name in ("same-batch-pair", "same-content-other-ids"):
        direction = trained[name].records[2]["direction"]
        assert direction["max_pair"] == [2, 3]
        assert direction["max_cosine"] == pytest.approx(1.0)
        assert trained["healthy"].records[2]["direction"]["max_cosine"] < 0.99


def test_the_drills_own_loss_is_the_observers(trained: dict[str, Seen]) -> None:
    recorded = [float(record["loss"]["mean"]) for record in trained["healthy"].records]
    assert trained["healthy"].losses == pytest.approx(recorded, rel=1e-6)


@pytest.mark.long
def test_under_zero_2_in_bf16_the_corruption_is_seen_before_the_reduction(tmp_path: Path) -> None:
    names = ("gradient-scaled-1.5", "zero-gradient", "nan-loss", "initial-weights-bit")
    [seen, *_] = run_distributed(train_with_each, 4, (str(tmp_path), names, 2, "bf16"), 180.0)
    healthy = seen["healthy"]
    assert norms(seen["gradient-scaled-1.5"], 3)[2] == pytest.approx(1.5 * norms(healthy, 3)[2], rel=2e-2)
    assert norms(seen["gradient-scaled-1.5"], 3)[OTHERS].tolist() == norms(healthy, 3)[OTHERS].tolist()
    assert norms(seen["zero-gradient"], 3)[2] == 0.0
    assert math.isnan(losses(seen["nan-loss"], 3)[2])
