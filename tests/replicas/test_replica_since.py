"""Which update left the replicas apart, where not every step is measured: a range, and it is told as one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ds_silent.detectors.replica_errors import replicas as replicas_differ
from ds_silent.replicas.compare import Drift, Replicas
from tests.support.distributed import run_on_kept_ranks
from tests.support.made_records import Run, make


def drift_every_ten_steps() -> Drift | None:
    weight = torch.ones(8)
    replicas = Replicas([("weight", weight)], list, history=4)
    for step in (10, 20, 30):
        if step == 30 and dist.get_rank() == 1:
            weight[3] = 2.0  # after the update of some step from 20 to 29
        replicas.remember(step)
    replicas.check(30)
    return replicas.localise(dist.group.WORLD)


def test_the_update_lies_between_the_last_equal_and_the_first_different_checksum() -> None:
    found: list[Any] = run_on_kept_ranks(drift_every_ten_steps, 2)
    assert [(drift.names, drift.earliest, drift.since) for drift in found] == [(("weight",), 20, 29)] * 2


def drift_that_lasts() -> list[Any]:
    weight, found = torch.ones(8), []
    replicas = Replicas([("weight", weight)], list, history=4)
    for step in range(1, 41):
        if dist.get_rank() == 1 and step in (8, 38):
            weight[3] += 1.0  # by the updates of steps 7 and 37
        if step == 33:
            weight.fill_(1.0)
        replicas.remember(step)
        if step % 4 == 0:
            replicas.check(step)
            if 8 <= step < 33 or step >= 38:  # all ranks have read so
                found.append(replicas.localise(dist.group.WORLD))
            else:
                replicas.equal()
    return [(drift.earliest, drift.since) for drift in found]


def test_a_drift_that_lasts_names_the_same_step_at_every_comparison() -> None:
    assert run_on_kept_ranks(drift_that_lasts, 2) == [[(7, 7)] * 7 + [(37, 37)]] * 2


def drift_after_the_way_back() -> list[Any]:
    """It drifts in the update of step 8, goes back to step 4, and drifts there in the update of step 9."""
    weight, found = torch.ones(8), []
    replicas = Replicas([("weight", weight)], list, history=12)
    for step in (*range(1, 11), *range(5, 11)):
        if step == 5:
            weight.fill_(1.0)
        drifts = 9 if not found else 10
        weight[3] += float(step == drifts and dist.get_rank() == 1)
        replicas.remember(step)
        if step == 10:
            replicas.check(step)
            found.append(replicas.localise(dist.group.WORLD))
            replicas.equal()
    return [(drift.earliest, drift.since) for drift in found]


def test_what_was_seen_before_the_way_back_is_not_when_a_drift_began() -> None:
    assert run_on_kept_ranks(drift_after_the_way_back, 2) == [[(8, 8), (9, 9)]] * 2


def drift_before_the_first_look() -> Drift | None:
    weight = torch.full((8,), float(dist.get_rank()))  # since an update that nobody has looked at
    replicas = Replicas([("weight", weight)], list, history=4)
    replicas.remember(6)
    replicas.check(6)
    return replicas.localise(dist.group.WORLD)


def test_where_nobody_has_seen_them_equal_no_step_is_claimed() -> None:
    """A fault of step 3 that was looked at by step 6 was told as "the first update ... was that of step 5"."""
    groups = ((0,), (1,))
    for drift in run_on_kept_ranks(drift_before_the_first_look, 2):
        assert (drift.earliest, drift.since) == (0, 5)
        (finding,) = replicas_differ(Run().record(), groups, drift)
        assert "was that of step 5 or an earlier one." in finding.message


def test_a_range_is_told_as_a_range() -> None:
    def message(drift: Drift) -> str:
        (finding,) = replicas_differ(Run().record(), drift.groups, drift)
        return finding.message

    groups = ((0, 1, 3), (2,))
    assert "was that of step 4." in message(Drift(("weight",), groups, 4, 4))
    assert "was one of those of steps 20 to 29." in message(Drift(("weight",), groups, 29, 20))
    assert "first update" not in message(Drift(("buffer",), groups, None))


def test_what_is_found_at_the_end_says_when_the_replicas_were_equal_last() -> None:
    """A training that ended at the very comparison was said to differ since that step."""
    (finding,) = replicas_differ(make(20, [1.0] * 2, [1.0] * 2, [1.0] * 2), ((0,), (1,)), None, 10)
    assert finding.message.endswith("The first update that left them apart was one of those of steps 10 to 19.")
    assert finding.since == 10
