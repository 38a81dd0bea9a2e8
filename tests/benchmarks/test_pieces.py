"""Where benchmarks/overhead.py --part pieces says that a step's time goes."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

import torch
from pieces import PIECES, Cost, Counted, Pieces, Spent, Split, functions_of, handed_over, installed

from ds_silent.kernels.accumulator import Accumulator
from ds_silent.maths.sketch import make_plan
from ds_silent.patches import Patches


class Clock:
    """Seconds that pass only where a function says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def takes(self, seconds: float, *inside: Callable[[], object]) -> Callable[[], None]:
        def work() -> None:
            self.now += seconds
            for act in inside:
                act()

        return work


def seconds_of(pieces: Pieces) -> dict[str, float]:
    return {name: spent.seconds for name, spent in pieces.spent.items()}


def test_a_pieces_time_is_its_own_and_the_trainings_is_nobodys() -> None:
    clock = Clock()
    pieces = Pieces(clock)
    part = pieces.wrapped(clock.takes(4.0), ": part")
    training = pieces.wrapped(clock.takes(100.0, pieces.wrapped(clock.takes(0.5), "hook")), None)
    outer = pieces.wrapped(clock.takes(1.0, part, training, part, clock.takes(2.0)), "outer")
    clock.takes(50.0, outer)()
    assert seconds_of(pieces) == {"outer": 3.0, "outer: part": 8.0, "hook": 0.5}
    assert [(spent.calls, spent.inner) for spent in pieces.spent.values()] == [(1, 3), (2, 0), (1, 0)]


def test_a_piece_that_raises_has_ended() -> None:
    clock = Clock()
    pieces = Pieces(clock)

    def breaks() -> None:
        clock.now += 1.0
        raise ValueError

    def outer() -> None:
        try:
            pieces.wrapped(breaks, "inner")()
        except ValueError:
            clock.now += 3.0

    pieces.wrapped(outer, "outer")()
    assert seconds_of(pieces) == {"outer": 3.0, "inner": 1.0}


def test_what_wrappers_add_is_subtracted_from_their_piece_and_the_one_around() -> None:
    pieces = Pieces(Clock())
    pieces.spent = {"outer": Spent(calls=1, inner=10, seconds=5.0), "inner": Spent(calls=10, seconds=7.0)}
    pieces.without(Cost(own=0.1, around=0.2))
    assert {name: round(seconds, 9) for name, seconds in seconds_of(pieces).items()} == {"outer": 2.9, "inner": 6.0}


def test_another_thread_counts_only_where_it_is_asked_for() -> None:
    clock = Clock()
    pieces = Pieces(clock)
    wrapped, beside = pieces.wrapped(clock.takes(1.0), "hook"), pieces.beside(clock.takes(2.0), "judge")
    for act in (wrapped, beside):
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
    assert seconds_of(pieces) == {"judge": 2.0}


def test_every_function_that_is_to_be_wrapped_is_there_and_comes_back() -> None:
    places = [place for piece in PIECES.values() for place in functions_of(piece)]
    before = [vars(owner)[name] for owner, name in places]
    methods = dict(vars(Patches))
    with installed(Pieces(Clock(), Counted)):
        assert all(vars(owner)[name] is not old for (owner, name), old in zip(places, before, strict=True))
    assert [vars(owner)[name] for owner, name in places] == before
    assert dict(vars(Patches)) == methods


class Foreign:
    """What a script has, and ds_silent wraps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def step(self) -> str:
        self._clock.now += 100.0
        return "stepped"


def test_what_ds_silent_puts_around_a_foreign_function_is_timed_without_it() -> None:
    clock = Clock()
    pieces, patches, one, other, third = Pieces(clock), Patches(), Foreign(clock), Foreign(clock), Foreign(clock)

    def wrapper(original: Callable[..., str], *instance: Foreign) -> str:
        clock.now += 1.0
        return original(*instance) + " once"

    with installed(pieces):
        patches.wrap(one, "step", wrapper)
        patches.around(other, "step", before=clock.takes(2.0), after=clock.takes(4.0))
    assert (one.step(), other.step()) == ("stepped once", "stepped")
    with installed(pieces):
        patches.wrap_method(Foreign, "step", wrapper)
    assert third.step() == "stepped once"
    patches.undo()
    assert one.step() == "stepped"
    assert seconds_of(pieces) == {"wrappers, between": 8.0}


def test_bytes_are_counted_once_whoever_hands_them_on() -> None:
    pieces = Pieces(Clock(), Counted)
    accumulator = Accumulator(make_plan(96, 32, torch.device("cpu")), [0, 64], [64, 32])
    gradients = torch.ones(64), torch.ones(32, dtype=torch.bfloat16)
    with installed(pieces):
        pieces.enter("moment")
        accumulator.add_all((index, 0, values) for index, values in enumerate(gradients))
        accumulator.add(0, gradients[0], previous=gradients[0])
        pieces.leave()
    spent = pieces.spent["moment: sketch, norm"]
    assert spent.gradient == 64 * 4 + 32 * 2 + 2 * 64 * 4
    assert spent.operations > 0
    assert pieces.spent["moment"].gradient == 0
    assert accumulator.take()[1].tolist() == [4 * 64.0 + 32.0]  # the last addition of each


def test_what_is_no_tensor_hands_nothing_over() -> None:
    class Kernel:
        def __call__(self, tensors: object, index: int = 0) -> int:
            return index

    pieces = Pieces(Clock(), Counted)
    pieces.enter("one")
    assert handed_over(pieces, Kernel.__call__)(Kernel(), [None, torch.ones(3)], index=7) == 7
    pieces.leave()
    assert pieces.spent["one"].gradient == 12


def test_functions_of_torch_and_of_ctypes_are_compiled_code_and_nothing_else_is() -> None:
    library, values = ctypes.CDLL(None), torch.ones(1 << 16)
    own: dict[str, Callable[[], object]] = {
        "torch": lambda: values.sum(),
        "ctypes": lambda: library.getpid(),
        "Python": lambda: sum(values.shape),
    }
    counted, split = Pieces(Clock(), Counted), Pieces(Clock(), Split)
    for pieces in (counted, split):
        with installed(pieces):
            for name, act in own.items():
                pieces.wrapped(act, name)()
            own["torch"](), own["ctypes"]()  # of nobody's piece
    assert {name: spent.operations for name, spent in counted.spent.items()} == {"torch": 1, "ctypes": 1, "Python": 0}
    assert {name: spent.moved for name, spent in counted.spent.items()} == {
        "torch": 4 * (1 << 16) + 4,
        "ctypes": 0,
        "Python": 0,
    }
    assert {name: spent.compiled > 0 for name, spent in split.spent.items()} == {
        "torch": True,
        "ctypes": True,
        "Python": False,
    }
    assert library.getpid() == os.getpid()
    assert "__call__" not in vars(library._FuncPtr)
