"""Above the gather limit: who and where, from sums and from what each rank finds of its own weight.

The oracle is the fault itself: each is put into the aggregate of layers that are at hand here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_silent.config import SilentConsistencyConfig
from ds_silent.exchange.layout import ExchangeShape, Layout, layout_of
from ds_silent.exchange.observation import Applied, Local, Loss, Observation, Reduced, Status
from ds_silent.maths.causes import Cause
from ds_silent.maths.rounding_bound import Arithmetic
from ds_silent.maths.statistics import cosines_of
from ds_silent.measure.evidence import ReductionEvidence
from ds_silent.measure.record import Context, measure
from ds_silent.measure.reduction_check import ReductionChecker, ReductionSettings
from ds_silent.records import Seconds
from tests.exchange.many_ranks import ManyRanks
from tests.support.made_observations import gathered_of

RANKS, LAYERS, SIZE = 40, 5, 4096
Damage = Callable[[Tensor, Tensor], Tensor]
"""From all ranks' layers (N, L, k) and the right aggregate (L, k) to the one that arrives."""


def layout(gather_limit: int = 64) -> Layout:
    config = SilentConsistencyConfig.model_validate({"direction": {"sketch_size": SIZE}})
    return layout_of(config, ExchangeShape(RANKS, LAYERS, 0, 1, False, gather_limit))


def gradients(step: int) -> Tensor:
    """(N, L, k): a part that all share, and each rank's own; pairs have a cosine of about 0.1."""
    generator = torch.Generator().manual_seed(step)
    shared = torch.randn(1, LAYERS, SIZE, generator=generator)
    return 0.33 * shared + torch.randn(RANKS, LAYERS, SIZE, generator=generator)


def observations(step: int, damage: Damage | None, total: float) -> list[Observation]:
    layers = gradients(step)
    aggregate = (layers.double().mean(0) * total).float()
    arrived = aggregate if damage is None else damage(layers * total, aggregate)
    found = []
    for rank, own in enumerate(layers):
        part = torch.zeros_like(arrived)
        part[rank % LAYERS] = arrived[rank % LAYERS] if rank < LAYERS else 0.0  # each layer has one owner
        squares = own.square().sum(1)
        found.append(
            Observation(
                Status(step=float(step)),
                loss=Loss(2.0 + 0.01 * rank, 1.0, 1.0, 100.0),
                local=Local(seen=1.0, norm_seen=1.0, squared=squares.sum()),
                reduced=Reduced(seen=1.0, squared=part.square().sum()),
                applied=Applied(),
                sketch=own.sum(0),
                aggregate=part.sum(0),
                layer_squares=squares,
                layer_sketches=own,
                layer_aggregates=part,
            )
        )
    return found


def told(damage: Damage | None, total: float = 1.0, steps: int = 3) -> list[ReductionEvidence]:
    """Of healthy steps, and of a damaged one at the end."""
    sent, arithmetic = layout(), Arithmetic(torch.float32, elements=LAYERS * SIZE, width=8 * SIZE, total=total)
    audit = ReductionChecker(ReductionSettings(sent, arithmetic, 16.0, tuple("abcde")))
    ranks = ManyRanks(sent, RANKS, total)
    seen = []
    for step in range(1, steps + 2):
        gathered = ranks.step(step, observations(step, damage if step == steps else None, total))
        if gathered is not None:
            seen.append(audit.step(gathered, None)[1])
    return seen


def last_cause(damage: Damage, total: float = 1.0) -> Cause:
    evidence = told(damage, total)
    assert [e.check is not None and e.check.wrong for e in evidence] == [False, False, True]
    assert evidence[-1].cause is not None
    return evidence[-1].cause


def without(*ranks: int, where: slice = slice(None), weight: float = 0.0) -> Damage:
    def damage(terms: Tensor, aggregate: Tensor) -> Tensor:
        wrong = aggregate.clone()
        for rank in ranks:
            wrong[where] += (weight - 1.0) * terms[rank, where] / RANKS
        return wrong

    return damage


def test_a_healthy_reduction_is_right() -> None:
    evidence = told(None)
    assert all(e.check is not None and not e.check.wrong and e.cause is None for e in evidence)


@pytest.mark.parametrize("total", [1.0, float(RANKS)], ids=["mean", "sum"])
@pytest.mark.parametrize(("ranks", "weight"), [((7,), 0.0), ((39,), 2.0), ((3, 21, 30), 0.0), ((5,), -1.0)])
def test_ranks_with_another_weight_are_named(ranks: tuple[int, ...], weight: float, total: float) -> None:
    cause = last_cause(without(*ranks, weight=weight), total)
    assert (cause.kind, cause.ranks, len(cause.layers)) == ("weights", ranks, LAYERS)
    assert [cause.weights[rank] for rank in ranks] == pytest.approx([weight] * len(ranks), abs=0.15)


def test_ranks_that_are_like_the_missing_one_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 to 4 see data of one kind, and rank 3 has short gradients: only rank 1 is missing."""
    plain = gradients

    def clustered(step: int) -> Tensor:
        layers = plain(step)
        layers[:5] += 1.5 * torch.randn(1, LAYERS, SIZE, generator=torch.Generator().manual_seed(100 + step))
        layers[3] *= 0.3
        return layers

    monkeypatch.setattr("tests.measure.test_reduction_of_many.gradients", clustered)
    cause = last_cause(without(1))
    assert (cause.kind, cause.ranks) == ("weights", (1,))


def test_equal_gradients_have_a_cosine_of_one() -> None:
    sent, ranks = layout(), ManyRanks(layout(), RANKS)
    same = [observations(1, None, 1.0)[0]] * RANKS
    ranks.step(1, same)
    gathered = ranks.step(2, same)
    assert gathered is not None
    direction = measure(gathered, sent, Context(0, 1.0, None, Seconds())).direction
    assert direction.mean_cosine == pytest.approx(1.0, abs=1e-6)


def test_a_rank_that_is_missing_in_one_layer_is_named_with_it() -> None:
    cause = last_cause(without(12, where=slice(3, 4)))
    assert (cause.kind, cause.ranks, cause.layers) == ("weights", (12,), (3,))
    assert cause.weights[12] == pytest.approx(0.0, abs=0.2)


@pytest.mark.parametrize("factor", [0.5, 1.5, RANKS])
def test_a_factor_is_told(factor: float) -> None:
    cause = last_cause(lambda terms, aggregate: factor * aggregate)
    assert (cause.kind, cause.ranks, len(cause.layers)) == ("scale", (), LAYERS)
    assert cause.factor == pytest.approx(factor, rel=1e-4)


def test_a_layer_that_is_gone_or_of_the_step_before_is_told() -> None:
    def zeroed(terms: Tensor, aggregate: Tensor) -> Tensor:
        return torch.cat((aggregate[:2], torch.zeros(1, SIZE), aggregate[3:]))

    def stale(terms: Tensor, aggregate: Tensor) -> Tensor:
        return gradients(2).double().mean(0).float()

    cause = last_cause(zeroed)
    assert (cause.kind, cause.layers) == ("zeroed", (2,))
    assert last_cause(stale).kind == "stale"


def test_the_last_step_does_not_guess_where_nobody_has_told_yet() -> None:
    """At the end of a run the ranks' own account of the last step does not come: the error is the one before's."""
    sent = layout()
    ranks = ManyRanks(sent, RANKS)
    arithmetic = Arithmetic(torch.float32, elements=LAYERS * SIZE, width=8 * SIZE)
    audit = ReductionChecker(ReductionSettings(sent, arithmetic, 16.0, tuple("abcde")))
    for step in (1, 2, 3):
        gathered = ranks.step(step, observations(step, without(7), 1.0))
        if gathered is not None:
            before = audit.step(gathered, None)[1].cause
    with ranks.alone():
        last = ranks.first.under_way()[-1]
    found = audit.step(last.all, None)[1].cause
    assert before is not None
    assert found == before
    assert found.ranks == (7,)


def test_noise_names_nobody() -> None:
    cause = last_cause(lambda terms, aggregate: aggregate + 0.01 * torch.randn(LAYERS, SIZE))
    assert (cause.kind, cause.ranks) == ("noise", ())


def test_the_directions_are_those_of_the_whole_sketches() -> None:
    """Float64, from the definition: mean over pairs; each rank's cosine with the mean of the others."""
    sent, ranks = layout(), ManyRanks(layout(), RANKS)
    assert 0 < sent.pairs < SIZE
    ranks.step(1, observations(1, None, 1.0))
    gathered = ranks.step(2, observations(2, None, 1.0))
    assert gathered is not None
    record = measure(gathered, sent, Context(0, 1.0, None, Seconds()))
    whole = gradients(1).sum(1).double()
    cosines = cosines_of(whole)
    first, second = torch.triu_indices(RANKS, RANKS, offset=1)
    pairs, stats = cosines[first, second], record.direction
    assert stats.mean_cosine is not None
    assert stats.standard_error is not None
    assert stats.min_cosine is not None
    assert stats.mean_cosine == pytest.approx(float(pairs.mean()), abs=4 * stats.standard_error)
    assert stats.min_cosine == pytest.approx(float(pairs.min()), abs=5 * sent.pairs**-0.5)
    rest = whole.sum(0) - whole
    expected = (whole * rest).sum(1) / (whole.norm(dim=1) * rest.norm(dim=1))
    assert stats.per_rank == pytest.approx(expected.tolist(), abs=1e-5)
    assert measure(gathered, sent, Context(0, 1.0, None, Seconds())).cosine_matrix is not None


@pytest.mark.parametrize(
    ("received", "kinds", "handed", "checked"),
    [({}, ((0,), (1,)), 1.0, False)]  # the script has reduced what was left to each rank
    + [(None, ((0,), (1,)), 1.0, True), ({0: ((0,), (1,))}, ((0,), (1,)), 1.0, True)]  # shards; ranks with other bits
    + [({}, ((0,), (0,)), 1.0, True), ({}, ((0,), (1,)), -1.0, True)],  # one rank's everywhere; not seen to be changed
)
def test_what_a_script_reduces_itself_is_known_by_bits_that_all_ranks_hold(
    received: Any, kinds: tuple[tuple[int, ...], ...], handed: float, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = (Cause("unreduced", (layer,), 1.0, ranks) for layer, ranks in enumerate(kinds))
    cause, check = replace(first, elsewhere=tuple(others)), object()
    monkeypatch.setattr("ds_silent.measure.reduction_check._received", lambda *_: received)
    monkeypatch.setattr(ReductionChecker, "_aggregation", lambda *_: (check, cause))
    seen = gathered_of(3, 2, **{"reduced.handed_seen": [handed] * 2, "reduced.seen": [1.0] * 2})
    examined = ReductionChecker(ReductionSettings(Layout(64), Arithmetic(torch.float32), 16.0)).examine(seen)
    assert (examined.check is check, examined.cause is cause) == (checked, checked)
