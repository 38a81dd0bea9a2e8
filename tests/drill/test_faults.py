"""Every injection does what it says, to the rank it says, from the step it says: alone, and in real trainings."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.drill.deepspeed.rehearsal import Start, Trial, rehearse
from ds_silent.drill.deepspeed.setting import make_setting
from ds_silent.drill.faults import inputs
from ds_silent.drill.faults.catalogue import FAULTS
from ds_silent.drill.faults.fault import Fault
from ds_silent.drill.faults.injection import NOTHING, Batch, Shard, Strike
from ds_silent.practice.model import IGNORED, PracticeModel, Rows, make_rows, warm_up
from ds_silent.sinks.jsonl import read_metrics
from tests.distributed import run_distributed

KINDS = {
    *("duplicate-data", "data-order-mismatch", "low-coverage", "outlier-rank", "non-finite", "zero-gradient"),
    *("unreduced-gradient", "aggregation-error", "replica-drift"),
    *("seed-mismatch", "config-mismatch", "initial-weights-mismatch"),
}
STRIKE = Strike(rank=2, ranks=4, step=3)
EVERYWHERE = {
    *("same-batch-everywhere", "same-batch-everywhere-without-ids"),
    *("sampler-seed-every-rank", "sampler-world-size-one", "sampler-world-size-twice"),
    *("micro-batch-missing-everywhere", "bucket-dropped", "parameter-unreduced", "wrong-group", "division-forgotten"),
    *("bucket-stale", "bucket-tail-zeroed", "aggregate-noise", "aggregate-burst", "gradients-not-cleared"),
    *(
        "partition-not-cleared",
        "applied-factor-4",
        "aggregate-flip-lowest-bit",
        *(f"aggregate-flip-byte-{byte}" for byte in range(4)),
    ),
    *("retry-burst", "retry-burst-twice", "retry-burst-always", "retry-bucket-dropped"),
}
TWO_RANKS = {"majority-two-ranks", "majority-tie"}


def rows_of(rank: int, step: int) -> Tensor:
    return torch.tensor([1000 * rank + 10 * step, 1000 * rank + 10 * step + 1])


def a_batch() -> Batch:
    rows = make_rows(8, seed=3)
    return Batch(torch.arange(8), rows.tokens, rows.labels)


# -- the catalogue ----------------------------------------------------------------------------------------------------


def test_the_catalogue_is_large_enough_and_speaks_of_known_events() -> None:
    assert len(FAULTS) == 107
    assert {fault.strikes for fault in FAULTS.values()} == {
        *("data", "seed", "weights", "hyper-parameter", "environment", "gradient", "loss"),
        *("reduction", "update", "replica"),
    }
    for name, fault in FAULTS.items():
        assert name == fault.name
        assert fault.kinds
        assert set(fault.kinds) <= KINDS
        assert pickle.loads(pickle.dumps(fault)).name == name  # it travels to the ranks


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_touches_the_ranks_that_it_names_and_no_other(name: str) -> None:
    fault = FAULTS[name]
    touched = {rank for rank in range(4) if fault.inject(STRIKE, rank) != NOTHING}
    assert touched == (set(range(4)) if name in EVERYWHERE else {2, 3} if name in TWO_RANKS else {2})


def test_who_must_be_named() -> None:
    everyone = (0, 1, 2, 3)
    assert FAULTS["nan-loss"].expected_ranks(STRIKE) == ((2,),)
    assert FAULTS["same-batch-pair"].expected_ranks(Strike(3, 4, 1)) == ((0, 3),)
    assert FAULTS["same-batch-everywhere"].expected_ranks(STRIKE)[0] == everyone
    assert FAULTS["repeated-batch"].expected_ranks(STRIKE) == ((2,),)
    assert FAULTS["sampler-seed-one-rank"].expected_ranks(STRIKE) == ((2,), everyone)
    two = Strike(1, 2, 1)
    assert FAULTS["gradient-negated"].expected_ranks(two) == ((0, 1), ())  # nobody is outvoted
    assert FAULTS["nan-loss"].expected_ranks(two) == ((1,),)  # no comparison needed
    receiver = FAULTS["aggregate-noise-one-rank"]
    assert receiver.expected_ranks(STRIKE) == ((2,),)
    assert receiver.expected_ranks(Strike(2, 4, 3, stage=1)) == ((),)  # nobody else holds the piece
    owner = FAULTS["bucket-dropped"]
    assert owner.expected_ranks(STRIKE) == ((),)
    assert owner.expected_ranks(Strike(2, 4, 3, stage=2)) == ((), (0,), (1,), (2,), (3,))
    assert FAULTS["division-forgotten"].expected_ranks(STRIKE) == ((),)


# -- data -------------------------------------------------------------------------------------------------------------


def rows(name: str, me: int, step: int) -> list[int]:
    function = FAULTS[name].inject(STRIKE, me).rows
    return rows_of(*((me, step) if function is None else function(me, step))).tolist()


@pytest.mark.parametrize("me", range(4))
def test_rows_are_the_samplers_before_the_strike_and_wrong_from_it_on(me: int) -> None:
    for name in ("same-batch-everywhere", "same-batch-pair", "repeated-batch"):
        assert rows(name, me, 2) == rows_of(me, 2).tolist()
    for step in (3, 4, 9):
        assert rows("same-batch-everywhere", me, step) == rows_of(0, step).tolist()
        assert rows("same-batch-pair", me, step) == rows_of(3 if me == 2 else me, step).tolist()
        assert rows("repeated-batch", me, step) == rows_of(me, 2 if me == 2 else step).tolist()


def test_content_under_other_ids() -> None:
    injection = FAULTS["same-content-other-ids"].inject(STRIKE, 2)
    assert injection.rows is None
    assert injection.content is not None
    assert injection.content(2, 2) == (2, 2)
    assert injection.content(2, 3) == (3, 3)


def test_what_a_sampler_believes() -> None:
    shards = {
        name: [FAULTS[name].inject(STRIKE, me).shard for me in range(4)]
        for name in ("sampler-seed-one-rank", "sampler-seed-every-rank", "sampler-world-size-one")
    }
    told = {
        name: [Shard(4, me, 42) if shard is None else shard(Shard(4, me, 42)) for me, shard in enumerate(given)]
        for name, given in shards.items()
    }
    assert [shard.seed for shard in told["sampler-seed-one-rank"]] == [42, 42, 43, 42]
    assert [shard.seed for shard in told["sampler-seed-every-rank"]] == [42, 43, 44, 45]
    assert told["sampler-world-size-one"] == [Shard(1, 0, 42)] * 4


def test_batches_are_untouched_before_the_strike() -> None:
    for name in ("no-labels", "label-noise", "other-distribution"):
        change = FAULTS[name].inject(STRIKE, 2).batch
        assert change is not None
        batch = a_batch()
        assert change(batch, 2) is batch


def test_labels_that_are_gone_or_random() -> None:
    batch = a_batch()
    learnt = batch.labels != IGNORED
    no_labels, noise = (FAULTS[name].inject(STRIKE, 2).batch for name in ("no-labels", "label-noise"))
    assert no_labels is not None
    assert noise is not None
    assert bool((no_labels(batch, 3).labels == IGNORED).all())
    noisy = noise(batch, 3)
    assert torch.equal(noisy.tokens, batch.tokens)
    assert torch.equal(noisy.labels != IGNORED, learnt)  # as many labels as before, at the same places
    assert set(noisy.labels[learnt].tolist()) <= set(batch.labels[learnt].tolist())
    assert float((noisy.labels == batch.labels)[learnt].float().mean()) < 0.2


def test_the_share_of_noisy_labels_is_the_size() -> None:
    batch = a_batch()
    learnt = batch.labels != IGNORED
    untouched = inputs.label_noise(Strike(2, 4, 1, size=0.0), 2).batch
    some = inputs.label_noise(Strike(2, 4, 1, size=0.2), 2).batch
    assert untouched is not None
    assert some is not None
    assert torch.equal(untouched(batch, 1).labels, batch.labels)
    assert 0.05 < float((some(batch, 1).labels != batch.labels)[learnt].float().mean()) < 0.35


# -- before the training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_of_one_weight(dtype: torch.dtype) -> None:
    model = PracticeModel().to(dtype)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    change = FAULTS["initial-weights-bit"].inject(STRIKE, 2).model
    assert change is not None
    change(model)
    flips = sum(_bits(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert flips == 1


def _bits(a: Tensor, b: Tensor) -> int:
    one, other = (t.detach().contiguous().view(torch.uint8).numpy() for t in (a, b))
    return int(np.unpackbits(one ^ other).sum())


def test_hyper_parameters_and_configuration() -> None:
    optimizer = torch.optim.AdamW(PracticeModel().parameters(), lr=1e-3, weight_decay=0.01)
    for name in ("learning-rate", "weight-decay"):
        fault = FAULTS[name]
        change = fault.inject(Strike(2, 4, 1, fault.size), 2).optimizer
        assert change is not None
        change(optimizer)
    assert optimizer.param_groups[0]["lr"] == 2e-3
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.06)
    fault = FAULTS["config-value"]
    edit = fault.inject(Strike(2, 4, 1, fault.size), 2).config
    assert edit is not None
    given = {"gradient_clipping": 1.0}
    assert edit(given)["gradient_clipping"] != 1.0
    assert given == {"gradient_clipping": 1.0}  # the other ranks' configuration may be the same object


# -- gradients --------------------------------------------------------------------------------------------------------


def test_torch_hands_a_hooks_result_to_the_hooks_that_came_later() -> None:
    """What every gradient fault relies on: the observer's hook, registered later, sees the corrupted gradient."""
    parameter, seen = torch.nn.Parameter(torch.ones(3)), []
    parameter.register_hook(lambda gradient: gradient * 1.5)
    parameter.register_hook(lambda gradient: seen.append(gradient.clone()))
    parameter.sum().backward()
    assert seen[0].tolist() == [1.5] * 3
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.5] * 3


def corrupt(name: str, gradient: Tensor, step: int, **strike: float) -> Tensor:
    fault = FAULTS[name]
    change = fault.inject(Strike(2, 4, 3, strike.get("size", fault.size)), 2).gradient
    assert change is not None
    change("layers.0.up.weight", gradient, 2)  # the step before, for those that remember
    return change("layers.0.up.weight", gradient, step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_elements(dtype: torch.dtype) -> None:
    gradient = (torch.randn(50, generator=torch.Generator().manual_seed(1)) * 0.01).to(dtype)
    infinite = corrupt("inf-gradient", gradient, 3)
    assert int(infinite.isinf().sum()) == 1
    flipped = corrupt("bit-flip", gradient, 3)
    assert _bits(gradient, flipped) == 1
    assert float(flipped.abs().max()) > 1e30
    for name in ("inf-gradient", "bit-flip"):
        assert torch.equal(corrupt(name, gradient, 4), gradient)  # at one step only


@pytest.mark.parametrize("size", [0.2, 1.0])
def test_the_noise_has_the_size_that_was_asked_for(size: float) -> None:
    gradient = torch.randn(4000, generator=torch.Generator().manual_seed(1))
    noise = corrupt("gradient-noise-1.0", gradient, 3, size=size) - gradient
    assert float(noise.norm() / gradient.norm()) == pytest.approx(size, rel=1e-4)
    assert abs(float(torch.cosine_similarity(noise, gradient, dim=0))) < 0.06


def test_the_practice_model_learns_and_its_rows_repeat_exactly() -> None:
    rows, again = make_rows(16, seed=1), make_rows(16, seed=1)
    assert torch.equal(rows.tokens, again.tokens)
    assert torch.equal(rows.labels[rows.labels != IGNORED], rows.tokens[rows.labels != IGNORED])
    assert bool((rows.labels != IGNORED).any(dim=1).all())
    torch.manual_seed(0)
    torch.set_num_threads(1)
    assert warm_up(PracticeModel(), steps=20) < 0.95 * math.log(64)


# -- in real trainings ------------------------------------------------------------------------------------------------

SHORT = 5
REAL = (
    *("same-batch-everywhere", "same-batch-pair", "same-content-other-ids", "no-labels", "label-noise", "nan-loss"),
    *("other-distribution", "inf-gradient", "zero-gradient", "gradient-scaled-1.5", "gradient-negated", "loss-scaled"),
    *("gradient-noise-1.0", "stuck-gradient", "frozen-layers", "layer-without-gradient", "sampler-world-size-one"),
    *("initial-weights-tensor", "config-value", "learning-rate", "environment-omp"),
)


@dataclass(frozen=True)
class Seen:
    """metrics.jsonl of one training, and the losses that the drill itself saw."""

    records: tuple[dict[str, Any], ...]
    losses: tuple[float, ...]


def cold_start(block: dict[str, Any], zero_stage: int, dtype: Any, accumulation: int = 1) -> Start:
    """Without the warm-up: what an injection does to a gradient does not depend on it."""
    quiet = {"detectors": {"enabled": False}, "coverage": False, "preflight": False}
    given = {"silent_consistency": {**quiet, **block}, "gradient_accumulation_steps": accumulation}
    setting = make_setting(given, dist.get_world_size(), zero_stage, dtype)
    torch.manual_seed(7)
    weights = {name: value.clone() for name, value in PracticeModel().state_dict().items()}
    rows: Rows = make_rows(16 * setting.micro_batch * accumulation * dist.get_world_size(), seed=1)
    return Start(setting, rows, weights)


def train_with_each(directory: str, names: tuple[str, ...], zero_stage: int, dtype: str) -> dict[str, Seen]:
    start = cold_start({"direction": {"sketch_size": 1024}}, zero_stage, dtype)
    seen = {}
    for name in ("healthy", *names):
        fault: Fault | None = FAULTS.get(name)
        strike = Strike(2, dist.get_world_size(), 3, 1.0 if fault is None else fault.size)
        folder = Path(directory, name)
        run = rehearse(start, Trial(name, fault, strike, SHORT), folder)
        records = tuple(read_metrics(folder / "metrics.jsonl")) if dist.get_rank() == 0 else ()
        seen[name] = Seen(records, run.losses)
    return seen


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    directory = tmp_path_factory.mktemp("faults")
    results: list[dict[str, Seen]] = run_distributed(train_with_each, 4, (str(directory), REAL, 0, "fp32"), 240.0)
    return results[0]


def norms(seen: Seen, step: int) -> np.ndarray[Any, Any]:
    return np.array([float(value) for value in seen.records[step - 1]["grad_norm"]["per_rank"]])


def losses(seen: Seen, step: int) -> np.ndarray[Any, Any]:
    return np.array([float(value) for value in seen.records[step - 1]["loss"]["per_rank"]])


OTHERS = [0, 1, 3]


@pytest.mark.parametrize("name", REAL)
def test_nothing_happens_before_the_strike_and_never_to_another_rank(name: str, trained: dict[str, Seen]) -> None:
    healthy, faulty = trained["healthy"], trained[name]
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


def test_under_zero_2_in_bf16_the_corruption_is_seen_before_the_reduction(tmp_path: Path) -> None:
    names = ("gradient-scaled-1.5", "zero-gradient", "nan-loss", "initial-weights-bit")
    [seen, *_] = run_distributed(train_with_each, 4, (str(tmp_path), names, 2, "bf16"), 180.0)
    healthy = seen["healthy"]
    assert norms(seen["gradient-scaled-1.5"], 3)[2] == pytest.approx(1.5 * norms(healthy, 3)[2], rel=2e-2)
    assert norms(seen["gradient-scaled-1.5"], 3)[OTHERS].tolist() == norms(healthy, 3)[OTHERS].tolist()
    assert norms(seen["zero-gradient"], 3)[2] == 0.0
    assert math.isnan(losses(seen["nan-loss"], 3)[2])
