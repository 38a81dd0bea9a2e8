"""What is said of a thousand ranks, or of sixteen thousand, is no longer than what a person reads."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator
from typing import get_args

import numpy as np
import pytest
from rich.console import Console

from ds_silent.capture.breaches import text_of, unlike_of
from ds_silent.capture.settings_check import same_draws, unlike
from ds_silent.capture.untrained import Missed, reported
from ds_silent.config import DetectorsConfig
from ds_silent.detectors import Judge, broken, duplicate_data, reduction_errors, replica_errors, same_rows
from ds_silent.detectors.batch_size import BatchSizeTest
from ds_silent.detectors.finding import Finding
from ds_silent.detectors.jump import JumpTest
from ds_silent.detectors.lifecycle import Episodes, setting_findings
from ds_silent.detectors.order import OrderTest, SameOrderTest
from ds_silent.detectors.repeats import RepeatTest
from ds_silent.distributed.agreement import Statement, differences
from ds_silent.distributed.parts import parts_of
from ds_silent.distributed.places import Places, in_whole
from ds_silent.exchange.observation import BROKE
from ds_silent.maths.causes import Cause, Kind, MicroBatches
from ds_silent.maths.rounding_bound import AggregateCheck
from ds_silent.measure.evidence import AppliedCheck, Coverage, Evidence, OrderAgain, ReductionEvidence
from ds_silent.observing.lockstep import elsewhere_event, out_of_sync_event, stop_event
from ds_silent.observing.recorder import ranks_changed
from ds_silent.preflight import messages as preflight
from ds_silent.preflight.comparison import PreflightOutcome
from ds_silent.preflight.items import check_item, item_of
from ds_silent.records import Event, EventKind, Place, Repair, to_json
from ds_silent.replicas.compare import Drift
from ds_silent.respond.repair_event import repair_event
from ds_silent.rules.rule import Breach
from ds_silent.sinks.console import event_line
from ds_silent.sinks.files import written_event
from ds_silent.sinks.tensorboard import event_markdown
from ds_silent.text import TORCH
from tests.support.made_records import make
from tests.support.preflight import outcome_of

LONGEST = 1000  # characters of a message, and of its line on the console without the remedy
SIZES = (1024, 16_384)
LAYERS = tuple(f"model.layers.{layer}" for layer in range(48))
VALUE = "0123456789abcdef " * 9  # as long as a value may be that travels as text
Findings = Callable[[int], list[Finding]]


def groups_of(ranks: int) -> Iterator[tuple[int, ...]]:
    """Many, and few that many ranks are in."""
    yield tuple(range(0, ranks, 2))
    yield tuple(range(ranks - 1))
    yield tuple(range(ranks))
    yield (ranks - 1,)


def record_of(ranks: int, **changes: float):  # type: ignore[no-untyped-def]
    losses, norms = np.full(ranks, 2.0), np.full(ranks, 1.0)
    losses[: ranks // 2] = changes.get("loss", 2.0)
    norms[: ranks // 2] = changes.get("norm", 1.0)
    return make(7, losses, norms, np.full(ranks, 0.1))


def from_numbers(ranks: int) -> list[Finding]:
    unlabelled = Evidence(dealt="random", label_tokens=(0,) * ranks, zero_gradient=frozenset(range(ranks)))
    nan = record_of(ranks, loss=np.nan, norm=np.nan)
    stale = Evidence(stale_parameters=(7,) * (ranks - 1) + (0,))
    return [
        *broken.non_finite(nan, Evidence(non_finite=dict.fromkeys(range(0, ranks, 2), LAYERS[0]))),
        *broken.non_finite(record_of(ranks, loss=np.nan, norm=0.0), unlabelled),
        *broken.zero_gradient(record_of(ranks, norm=0.0), unlabelled),
        *broken.stale_parameters(record_of(ranks), stale),
    ]


def from_rows(ranks: int) -> list[Finding]:
    record, found = record_of(ranks), []
    shared = Evidence(duplicates={(0, rank): 8 for rank in range(1, ranks)}, rows_per_rank=(8,) * ranks)
    found += same_rows.by_ids(record, shared, same_rows.shared_pairs(shared))
    found += duplicate_data.by_gradients(make(7, [2.0] * ranks, [1.0] * ranks, [1.0] * ranks))
    sizes, repeats, order = BatchSizeTest(), RepeatTest(16.0), OrderTest(16.0)
    same = SameOrderTest(16.0)
    taken, again = (8,) * (ranks // 2) + (4,) * (ranks - ranks // 2), (64,) * (ranks // 8) + (0,) * (ranks - ranks // 8)
    for step in range(8):
        share = (step + 1) / 8
        evidence = Evidence(
            rows_taken=taken,
            own_rows=(64,) * ranks,
            own_repeats=again,
            coverage=Coverage(share, share / 2, share / 2, 10_000),
            same_order=OrderAgain(True, 99.0, 64, True),
        )
        last = [
            *sizes.step(record, evidence),
            *repeats.step(record, evidence),
            *order.step(record, evidence),
            *same.step(record, evidence),
        ]
    return found + last


def from_the_reduction(ranks: int) -> list[Finding]:
    record, found = record_of(ranks), []
    check = AggregateCheck(0.5, 1.0, 1e-6, 9.0)
    weights = tuple(float(rank % 3) for rank in range(ranks))
    everywhere = tuple(range(len(LAYERS)))
    split = (parts_of(range(ranks)), parts_of(rank % 2 for rank in range(ranks)), parts_of([0] * (ranks - 9) + [1] * 9))
    for kind in get_args(Kind):
        for who in groups_of(ranks):
            other = Cause("partial", (2, 3, 4, 5), 0.5, who, weights)
            cause = Cause(kind, everywhere[:-9], 0.5, who, weights, (other, other, other), everywhere[-9:])
            for parts in split:
                seen = ReductionEvidence(check, cause, dict.fromkeys(range(5), parts), layers=LAYERS)
                found += reduction_errors.reduction(record, seen)
    off = MicroBatches(6, tuple((1.0 + rank % 5,) * 4 + (0.0, 1.0, 0.0, 1.0) for rank in range(ranks)), (1, 2, 3, 4))
    found += reduction_errors.reduction(record, ReductionEvidence(check, layers=LAYERS, micro_batches=off))
    for parts in split:
        drift = Drift(LAYERS, parts, 5, 3)
        found += replica_errors.replicas(record, parts, drift)
        found += reduction_errors.reduction(record, ReductionEvidence(received={0: parts, 5: parts}, layers=LAYERS))
    handed = tuple(1.0 + rank / 7 for rank in range(ranks))
    check = AggregateCheck(1e-9, 1.0, 1e-6)
    found += reduction_errors.reduction(record, ReductionEvidence(check, layers=LAYERS, handed=handed))
    for who in groups_of(ranks):
        applied = AppliedCheck(6, 1.0, handed, 1e-3, 0.5, 1e-4, who, who)
        found += reduction_errors.reduction(record, ReductionEvidence(applied=applied))
    return found


def from_conduct(ranks: int) -> list[Finding]:
    parts = [
        parts_of(range(ranks)),
        parts_of(rank % 5 for rank in range(ranks)),
        parts_of([0] * (ranks - 99) + [1] * 99),
    ]
    every = tuple(f"model.layers.{number}.attention.projection.weight" for number in range(1000))
    found = [
        one for part in parts for one in unlike({"hyper_parameters": part, "trainable": part, "objective": part}, 6)
    ]
    kinds: tuple[EventKind, ...] = ("weights-mismatch", "batch-suspect")
    rules = [Breach(f"{kind}{VALUE}", kind, "error", every[0] * 3, VALUE * 9, VALUE * 9, 6) for kind in kinds]
    half = tuple(range(0, ranks, 2)), tuple(range(1, ranks, 2))
    breaches = unlike_of([text_of(rules), text_of(rules[1:])], half, ranks)
    return setting_findings((*found, *reported(Missed(every, every), 6), *breaches))


def from_the_preflight(ranks: int) -> list[Event]:
    return preflight.events_of(preflight_of(ranks))


def preflight_of(ranks: int) -> PreflightOutcome:
    items, columns = [], []
    numbers = np.arange(ranks)
    for name, group in (
        ("parameters of the model", "weights"),
        ("torch CPU generator", "generators"),
        ("sampler's seed", "sampler"),
        ("sampler's share", "sampler"),
        ("sampler: a rank for each share", "sampler"),
        ("learning rate", "optimizer"),
    ):
        for values in (numbers % 2, numbers, np.minimum(numbers, 1), numbers // 99):
            for expectation in ("equal", "different"):
                items.append(item_of(name, group, VALUE, VALUE, expectation))  # type: ignore[arg-type]
                columns.append(np.stack([values, values], axis=1))
        items.append(check_item(name, group, False, VALUE))  # type: ignore[arg-type]
        columns.append(np.stack([numbers, numbers], axis=1))
    hashes = np.stack(columns, axis=1).astype(np.int32)
    texts = {index: [f"{rank}{VALUE}"[: preflight.TEXT_BYTES] for rank in range(ranks)] for index in range(len(items))}
    return outcome_of(items, hashes, texts)


def from_others(ranks: int) -> list[Event]:
    found = [
        ranks_changed(7, ranks, ranks // 2),
        stop_event(7, [float(BROKE)] * (ranks - 1) + [0.0], TORCH),
        elsewhere_event(7, [7.0] * (ranks - 99) + [float(rank) for rank in range(99)], [7.0] * ranks),
        elsewhere_event(7, [float(rank) for rank in range(ranks)], [0.0] * ranks),
        same_draws(1, ranks, TORCH, True),
        out_of_sync_event(7, [float(rank) for rank in range(ranks)]),
        *reduction_errors.notes(
            ReductionEvidence(applied=AppliedCheck(6, 1.0, (0.3,) * ranks, 1e-3, 0.5, 1e-4, (), (), note=True))
        ),
    ]
    for who in groups_of(ranks):
        found.append(repair_event(Repair(7, "majority", True, 1, 10**9, 1.5, LAYERS, who), ranks))
        found.append(repair_event(Repair(7, "majority", False, 3, 10**9, 1.5, LAYERS, who), ranks))
    return found


def from_the_judge(ranks: int) -> list[Event]:
    """A rank that is odd, and a jump of the noise scale."""
    judge, random, found = Judge(DetectorsConfig()), np.random.default_rng(0), []
    for step in range(1, 5):
        norms = np.exp(0.1 * random.standard_normal(ranks))
        losses = 2.0 + 0.1 * random.standard_normal(ranks)
        if step > 2:
            norms[ranks - 7], losses[ranks - 7] = 5000.0, 9000.0
        found += judge.step(
            make(step, losses, norms, np.full(ranks, 0.1)), Evidence(dealt="random", label_tokens=(4096,) * ranks)
        )
    jump, noise = JumpTest(math.log(3e6)), random.standard_normal(556)
    noise[256:] += 3.0
    for step, value in enumerate(noise, start=1):
        found += jump.follow(make(step, [math.nan], [math.nan], [0.1], float(value)))
    return found


def everything(ranks: int) -> list[Event]:
    findings = from_numbers(ranks) + from_rows(ranks) + from_the_reduction(ranks) + from_conduct(ranks)
    told = []
    for finding in findings:
        episodes = Episodes()
        told += episodes.update(7, [finding]) + episodes.update(8, [])
    return told + from_the_preflight(ranks) + from_others(ranks) + from_the_judge(ranks)


@pytest.fixture(scope="module", params=[SIZES[0], pytest.param(SIZES[1], marks=pytest.mark.long)])
def events(request: pytest.FixtureRequest) -> tuple[int, list[Event]]:
    return request.param, everything(request.param)


@pytest.mark.long
def test_no_message_and_no_line_grows_with_the_ranks(events: tuple[int, list[Event]]) -> None:
    ranks, told = events
    hosts = [f"{'node' * 14}{rank // 8:05d}" for rank in range(ranks)]
    places = Places(
        [Place(rank, 2 * rank, host, rank % 8, f"cuda:{rank % 8}", "0" * 36) for rank, host in enumerate(hosts)],
        dict.fromkeys(hosts[: ranks // 2], "A" * 64),
    )
    longest = 0
    for event in told:
        assert len(event.message) <= LONGEST, event.message
        placed = places.told(event)
        said = placed.message[len(event.message) :] if placed.message.startswith(event.message) else ""
        assert len(said) <= 800, said  # 8 hosts of 61 characters each
        whole = in_whole(placed, tuple(range(0, 2 * ranks, 2)))
        assert len(whole.message) - len(placed.message) <= 250
        assert len(event_line(event)) - len(event.message) - len(event.remedy) <= 250, event_line(event)
        assert len(event_markdown(event)) <= 6 * LONGEST  # each punctuation mark is an entity of 5 characters
        assert len(json.dumps(to_json(written_event(whole)))) <= 6000
        longest = max(longest, len(event_line(event)))
    assert longest <= LONGEST + 600  # with the remedy


def test_every_kind_of_event_was_among_them(events: tuple[int, list[Event]]) -> None:
    seen = {event.kind for event in events[1]}
    alone = {"initial-weights-mismatch", "seed-mismatch", "data-order-mismatch", "duplicate-data", "low-coverage"}
    assert alone <= seen
    assert set(get_args(EventKind)) - seen == set()


@pytest.mark.parametrize("ranks", SIZES)
def test_the_preflight_s_table_and_file_are_bounded(ranks: int) -> None:
    outcome = preflight_of(ranks)
    for width in (80, 400):
        drawn = io.StringIO()
        Console(file=drawn, width=width).print(preflight.table(outcome))
        assert len(drawn.getvalue()) < 200_000 * width // 80
    written = preflight.to_json(outcome)
    assert len(json.dumps(written)) < 60_000 * len(outcome.items)
    differs = written["items"][2]
    assert differs["cut"] == {"groups": ranks, "sizes": [1] * 8, "odd": 0}
    assert (len(differs["ranks"]), len(differs["values"])) == (8, 8)
    halves = written["items"][0]
    assert halves["cut"] == {"groups": 2, "sizes": [ranks // 2] * 2, "odd": 0}


def test_refusals_that_all_differ_are_bounded() -> None:
    said = [Statement(True, refusal=f"rank {rank} cannot", values={"interval": rank}) for rank in range(SIZES[1])]
    assert len(differences(said)) < LONGEST
    said = [Statement(True, version=str(rank), values={"interval": rank}) for rank in range(SIZES[1])]
    assert len(differences(said)) < LONGEST
