"""Every injection does what it says, to the rank it says, from the step it says, alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_silent.drill.faults import inputs
from ds_silent.drill.faults.catalogue import FAULTS
from ds_silent.drill.faults.injection import NOTHING, Batch, Shard, Target
from ds_silent.drill.faults.promises import FORMULA_FAULTS, PROMISE_FAULTS
from ds_silent.practice.model import IGNORED, PracticeModel, make_rows, warm_up
from tests.support.pages import DOCS, ROOT

KINDS = {
    *("duplicate-data", "data-order-mismatch", "low-coverage", "outlier-rank", "non-finite", "zero-gradient"),
    *("unreduced-gradient", "aggregation-error", "update-mismatch", "replica-drift"),
    *("seed-mismatch", "config-mismatch", "objective-mismatch", "initial-weights-mismatch"),
    *("batch-suspect", "weights-mismatch", "same-order"),
}
TARGET = Target(rank=2, ranks=4, step=3)
EVERYWHERE = {
    *("same-batch-everywhere", "same-batch-everywhere-without-ids", "parameter-trained-late"),
    *("pass-begun-anew", "order-of-every-epoch", "epoch-ends-too-early"),
    *("task-out-of-phase", "sampler-seed-every-rank", "sampler-world-size-one", "sampler-world-size-twice"),
    *("micro-batch-missing-everywhere", "bucket-dropped", "parameter-unreduced", "wrong-group", "division-forgotten"),
    *("bucket-stale", "bucket-tail-zeroed", "aggregate-noise", "aggregate-burst", "gradients-not-cleared"),
    *(
        "partition-not-cleared",
        "applied-factor-4",
        "aggregate-flip-lowest-bit",
        *(f"aggregate-flip-byte-{byte}" for byte in range(4)),
    ),
    *(fault.name for fault in (*FORMULA_FAULTS, *PROMISE_FAULTS)),
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
    assert len(FAULTS) >= 170
    for page in (ROOT / "README.md", DOCS / "README.md", DOCS / "drill.md"):
        assert f"{len(FAULTS)} faults" in page.read_text(encoding="utf-8"), page
    assert {fault.strikes for fault in FAULTS.values()} == {
        *("data", "seed", "weights", "hyper-parameter", "environment", "gradient", "loss"),
        *("reduction", "update", "replica"),
    }
    for name, fault in FAULTS.items():
        assert name == fault.name
        assert fault.kinds
        assert set(fault.kinds) <= KINDS


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_touches_the_ranks_that_it_names_and_no_other(name: str) -> None:
    fault = FAULTS[name]
    touched = {rank for rank in range(4) if fault.inject(TARGET, rank) != NOTHING}
    assert touched == (set(range(4)) if name in EVERYWHERE else {2, 3} if name in TWO_RANKS else {2})


def test_who_must_be_named() -> None:
    everyone = (0, 1, 2, 3)
    assert FAULTS["nan-loss"].expected_ranks(TARGET) == ((2,),)
    assert FAULTS["same-batch-pair"].expected_ranks(Target(3, 4, 1)) == ((0, 3),)
    assert FAULTS["same-batch-everywhere"].expected_ranks(TARGET)[0] == everyone
    assert FAULTS["repeated-batch"].expected_ranks(TARGET) == ((2,),)
    assert FAULTS["sampler-seed-one-rank"].expected_ranks(TARGET) == ((2,), everyone)
    two = Target(1, 2, 1)
    assert FAULTS["gradient-negated"].expected_ranks(two) == ((0, 1), ())  # nobody is outvoted
    assert FAULTS["nan-loss"].expected_ranks(two) == ((1,),)  # no comparison needed
    receiver = FAULTS["aggregate-noise-one-rank"]
    assert receiver.expected_ranks(TARGET) == ((2,),)
    assert receiver.expected_ranks(Target(2, 4, 3, stage=1)) == ((),)  # nobody else holds the piece
    owner = FAULTS["bucket-dropped"]
    assert owner.expected_ranks(TARGET) == ((),)
    assert owner.expected_ranks(Target(2, 4, 3, stage=2)) == ((), (0,), (1,), (2,), (3,))
    assert FAULTS["division-forgotten"].expected_ranks(TARGET) == ((),)


# -- data -------------------------------------------------------------------------------------------------------------


def rows(name: str, me: int, step: int) -> list[int]:
    function = FAULTS[name].inject(TARGET, me).rows
    return rows_of(*((me, step) if function is None else function(me, step))).tolist()


@pytest.mark.parametrize("me", range(4))
def test_rows_are_the_samplers_before_the_strike_and_wrong_from_it_on(me: int) -> None:
    for name in ("same-batch-everywhere", "same-batch-pair", "repeated-batch", "pass-begun-anew"):
        assert rows(name, me, 2) == rows_of(me, 2).tolist()
    for step in (3, 4, 9):
        assert rows("same-batch-everywhere", me, step) == rows_of(0, step).tolist()
        assert rows("same-batch-pair", me, step) == rows_of(3 if me == 2 else me, step).tolist()
        assert rows("repeated-batch", me, step) == rows_of(me, 2 if me == 2 else step).tolist()
        assert rows("pass-begun-anew", me, step) == rows_of(me, step - 2).tolist()


def test_content_under_other_ids() -> None:
    injection = FAULTS["same-content-other-ids"].inject(TARGET, 2)
    assert injection.rows is None
    assert injection.content is not None
    assert injection.content(2, 2) == (2, 2)
    assert injection.content(2, 3) == (3, 3)


def test_what_a_sampler_believes() -> None:
    shards = {
        name: [FAULTS[name].inject(TARGET, me).shard for me in range(4)]
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
        change = FAULTS[name].inject(TARGET, 2).batch
        assert change is not None
        batch = a_batch()
        assert change(batch, 2) is batch


def test_labels_that_are_gone_or_random() -> None:
    batch = a_batch()
    learnt = batch.labels != IGNORED
    no_labels, noise = (FAULTS[name].inject(TARGET, 2).batch for name in ("no-labels", "label-noise"))
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
    untouched = inputs.label_noise(Target(2, 4, 1, size=0.0), 2).batch
    some = inputs.label_noise(Target(2, 4, 1, size=0.2), 2).batch
    assert untouched is not None
    assert some is not None
    assert torch.equal(untouched(batch, 1).labels, batch.labels)
    assert 0.05 < float((some(batch, 1).labels != batch.labels)[learnt].float().mean()) < 0.35


# -- before the training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_of_one_weight(dtype: torch.dtype) -> None:
    model = PracticeModel().to(dtype)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    change = FAULTS["initial-weights-bit"].inject(TARGET, 2).model
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
        change = fault.inject(Target(2, 4, 1, fault.size), 2).optimizer
        assert change is not None
        change(optimizer)
    assert optimizer.param_groups[0]["lr"] == 2e-3
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.06)
    fault = FAULTS["config-value"]
    edit = fault.inject(Target(2, 4, 1, fault.size), 2).config
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


def corrupt(name: str, gradient: Tensor, step: int, **target: float) -> Tensor:
    fault = FAULTS[name]
    change = fault.inject(Target(2, 4, 3, target.get("size", fault.size)), 2).gradient
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
