"""The rule of a step: alone may break, once is made once, and what lies between is played again."""

from __future__ import annotations

import linecache
import logging
import sys
from typing import Any

import pytest
import torch.distributed as dist

from ds_silent.distributed import guard as module
from ds_silent.distributed.guard import BrokeOff, CollectiveGuard


@pytest.fixture(autouse=True)
def _single_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 3)


def test_an_act_that_breaks_is_played_again_without_repeating_what_all_ranks_made() -> None:
    guard, made, alone, plays = CollectiveGuard(), [], [], []

    def collective(name: str, result: Any) -> Any:
        made.append(name)
        return result

    def act() -> str:
        plays.append(1)
        first: int = guard.collective(lambda: collective("first", 7))
        guard.local(alone.append, first)
        second = guard.collective(lambda: collective("second", None))
        if len(plays) == 1:
            raise MemoryError("between two collectives")
        guard.collective(lambda: collective("third", None))
        return f"{first} {second}"

    assert guard.run(act) == "7 None"
    assert (made, alone, len(plays)) == (["first", "second", "third"], [7], 2)
    assert isinstance(guard.failure, MemoryError)
    made.clear()
    assert guard.run(act) == "7 None"  # another step: everything is made anew
    assert (made, alone) == (["first", "second", "third"], [7])  # alone is over for good


def test_the_first_error_alone_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    guard = CollectiveGuard()
    with caplog.at_level(logging.WARNING, "ds_silent"):
        line = sys._getframe().f_lineno + 1
        assert guard.local(lambda: 1 / 0) is None
        assert guard.local(lambda: 1) is None
        guard.cleanup(lambda: [][1])
    assert [r.message for r in caplog.records] == [
        "ds_silent: internal error on rank 3: ZeroDivisionError: division by zero "
        f"(test_guard.py, line {line}: assert guard.local(lambda: 1 / 0) is None)"
    ]


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_a_wish_to_end_goes_through(end: type[BaseException]) -> None:
    def act() -> None:
        raise end

    guard = CollectiveGuard()
    for run in (
        lambda: guard.run(act),
        lambda: guard.local(act),
        lambda: guard.cleanup(act),
        lambda: guard.run(lambda: guard.collective(act)),
        lambda: guard.run(lambda: guard.irrevocable("the response at step 4", act)),
    ):
        with pytest.raises(end):
            run()
    assert guard.failure is None


def test_what_breaks_twice_ends_the_training_with_a_sentence() -> None:
    def act() -> None:
        raise ValueError("always")

    with pytest.raises(BrokeOff, match=r"what all ranks do together broke off on rank 3 \(always\)"):
        CollectiveGuard().run(act)


def test_a_response_is_never_played_twice() -> None:
    guard, changed = CollectiveGuard(), []

    def response() -> None:
        guard.collective(lambda: changed.append(1))  # a collective within it
        raise ValueError("half way")

    with pytest.raises(BrokeOff, match=r"the response at step 4 broke off on rank 3 \(half way\)"):
        guard.run(lambda: guard.irrevocable("the response at step 4", response))
    assert changed == [1]

    def behind(plays: list[int]) -> int:
        plays.append(1)
        done = guard.irrevocable("the response at step 5", lambda: changed.append(2) or len(changed))
        if len(plays) == 1:
            raise ValueError("after the response")
        return done

    assert guard.run(behind, []) == 2
    assert changed == [1, 2]


def test_a_broken_process_group_ends_the_observation_and_not_the_training(caplog: pytest.LogCaptureFixture) -> None:
    guard, calls = CollectiveGuard(), []

    def collective() -> None:
        calls.append(1)
        raise RuntimeError("connection closed by peer")

    with caplog.at_level(logging.WARNING, "ds_silent"):
        assert guard.run(lambda: guard.collective(collective)) is None
        assert guard.run(lambda: guard.collective(collective)) is None
    assert len(calls) == 2  # once more, and then never again
    assert "observation ends on this rank, the training goes on: connection closed by peer" in caplog.text


def test_who_has_waited_for_the_whole_time_out_does_not_wait_again() -> None:
    for breaks_first in (False, True):
        guard, calls, told = CollectiveGuard(), [], RuntimeError("Timed out waiting 60000ms for recv operation")

        def collective(calls: list[int] = calls, told: RuntimeError = told) -> None:
            calls.append(1)
            raise told

        def act(guard: CollectiveGuard = guard, plays: Any = None, breaks: bool = breaks_first) -> None:
            plays.append(1)
            if breaks and len(plays) == 1:
                raise ValueError("on this rank only")
            guard.collective(collective)

        with pytest.raises(RuntimeError) as raised:
            guard.run(act, plays=[])
        assert raised.value is told
        assert guard.run(act) is None
        assert calls == [1]


LINES = sorted({line for *_, line in CollectiveGuard.run.__code__.co_lines() if line is not None})[1:]


@pytest.mark.parametrize("line", [n for n in LINES if linecache.getline(module.__file__, n).strip() != "try:"])
def test_whichever_line_of_a_play_breaks_its_calls_are_made_once(line: int) -> None:
    """The last one too: an act that has ended must not be played again with its calls forgotten."""
    one, made, struck = CollectiveGuard(), [], []
    code = CollectiveGuard.run.__code__

    def act() -> str:
        return str(one.collective(lambda: made.append(1)))

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code is not code:
            return None
        if event == "line" and frame.f_lineno == line and not struck:
            struck.append(line)
            raise MemoryError("injected")
        return trace

    sys.settrace(trace)
    try:
        assert one.run(act) == "None"
    finally:
        sys.settrace(None)
    assert made == [1]
    assert (one.failure is not None) == bool(struck)
