"""Whose fault a wrong case is, in the page of what works: ours, unless the plain training says the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import works
from ds_silent.practice.ranks import RankBroke

Found = list[tuple[Any, Any]]


def runs(weights: list[str], event: str = "", loss: float = 1.0) -> Found:
    """Two ranks: what was observed, and the plain training, whose weights are ``weights``' first."""
    events = [{"kind": "aggregation-error", "message": event}] if event else []
    observed = SimpleNamespace(weights="a", optimizer="o", losses=(1.0,), records=[{}], events=events, oracle=[])
    observed.oracle = [{"loss": {"mean": loss}}]
    plain = SimpleNamespace(weights=weights[0], optimizer="o", losses=(1.0,))
    return [(observed, plain), (observed, plain)]


def judged(monkeypatch: pytest.MonkeyPatch, noes: tuple[str, ...], *trainings: Found | Exception) -> works.Answers:
    """What is answered where the oracle's tests say these noes, and trainings, one after the other, end so."""
    left = list(trainings)

    def trained(*_: Any, **__: Any) -> Found:
        ended = left.pop(0)
        if isinstance(ended, Exception):
            raise ended
        return ended

    def answer(of: str) -> Any:
        def check(*_: Any) -> None:
            assert of not in noes

        return check

    for name, question in (("check_record", "numbers"), ("check_integrity", "sums"), ("check_events", "sums")):
        monkeypatch.setattr(works.oracle, name, answer(question))
    monkeypatch.setattr(works, "trained", trained)
    for training in trainings:
        if not isinstance(training, Exception):
            training[0][0].records[0]["step"] = 1
    found = works.answered(lambda: None, SimpleNamespace(per_layer=False))
    assert not left, "a training that was not asked for"
    return found


def test_all_right(monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(monkeypatch, (), runs(["a"]))
    assert works.all_right(found)
    assert (found["ours"], found["said"]) == (True, "")


def test_a_finding_that_the_oracle_shares_is_the_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(monkeypatch, ("numbers", "sums"), runs(["a"], "half is missing"))
    assert (found["bits"], found["ours"], found["said"]) == (True, False, "reported: half is missing")


@pytest.mark.parametrize(
    ("noes", "event"), [(("sums",), "half is missing"), (("numbers",), ""), (("numbers", "sums"), "")]
)
def test_a_false_alarm_and_an_untold_error_are_ours(
    monkeypatch: pytest.MonkeyPatch, noes: tuple[str, ...], event: str
) -> None:
    assert judged(monkeypatch, noes, runs(["a"], event))["ours"]


def test_an_oracle_that_was_given_garbage_judges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(monkeypatch, ("numbers",), runs(["a"], loss=float("nan")))
    assert (found["ours"], "not finite" in found["said"]) == (False, True)


@pytest.mark.parametrize(("again", "ours"), [(["b", "b", "b"], True), (["b", "c"], False)])
def test_other_bits_are_ours_unless_two_plain_trainings_differ(
    monkeypatch: pytest.MonkeyPatch, again: list[str], ours: bool
) -> None:
    trainings = [runs([weights]) for weights in again]
    found = judged(monkeypatch, (), runs(["b"]), *trainings)
    assert (found["bits"], found["ours"]) == (False, ours)


@pytest.mark.parametrize(("plain", "ours"), [(runs(["a"]), True), (RankBroke("KeyError: 0"), False)])
def test_what_breaks_is_ours_unless_it_breaks_without_us(
    monkeypatch: pytest.MonkeyPatch, plain: Found | Exception, ours: bool
) -> None:
    found = judged(monkeypatch, (), RankBroke("Traceback\nKeyError: 0"), plain)
    assert (found["ours"], found["said"]) == (ours, "broke: KeyError: 0")


def test_the_page_folds_what_is_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    right = works.Answers(bits=True, numbers=True, sums=True, ours=True, said="")
    wrong = works.Answers(bits=True, numbers=False, sums=True, ours=True, said="")
    cases = {works.described(case): right for case in works.oracle.COVERING}
    broken = next(iter(cases))
    text = works.page(
        {"DeepSpeed": {**cases, broken: wrong}},
        {
            "DeepSpeed": {"a": "step 0", "b": "step 6", "c": "step 7", "d": works.NO, "e": "silent"},
            "DDP": {"a": "step 0", "b": "below rounding", "c": "not applicable"},
        },
        {"DeepSpeed": {"one": works.YES, "other": works.NO}},
    )
    assert f"* DeepSpeed: {len(cases) - 1} of {len(cases)} cases right\n" in text
    assert f"* DeepSpeed, {broken}: yes **no** yes" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:8]
    assert [row.strip("| ").split(" | ") for row in rows] == [
        ["silent", "1", "0"],
        ["before step 1", "1", "1"],
        ["steps 1 to 6", "1", "0"],
        ["steps 7 to 21", "1", "0"],
        ["steps 22 to 70", "0", "0"],
        ["steps 71 to 400", "0", "0"],
        ["below rounding", "0", "1"],
    ]
    assert "* DeepSpeed, d: **no**" in text
    assert "| 1 of 2 |" in text
    assert "* DeepSpeed, other: **no**" in text
