"""Hooks on several streams: the tables and the scratch are shared, so their uses must be in order. Without a device,
streams are queues here that run later, in any order that the waits between them allow."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_silent.capture.local_gradient import LocalGradient
from ds_silent.config import DirectionConfig
from ds_silent.device import StreamOrder, stream_order
from ds_silent.kernels.accumulator import Accumulator
from ds_silent.maths.sketch import make_plan, offsets_of

NUMELS = [700, 64, 1300, 20]


class Device:
    """Streams, as a host sees them: ``current`` is the one that work is queued on."""

    def __init__(self) -> None:
        self.queues: list[list[tuple[Callable[[], None], list[tuple[int, int]]]]] = []
        self.current = self.new()
        self.waits: list[tuple[int, int]] = []

    def new(self) -> Stream:
        self.queues.append([])
        return Stream(self, len(self.queues) - 1)

    def run(self, seed: int) -> None:
        """All that was queued, in a random order among those that the streams allow."""
        done = [0] * len(self.queues)
        chance = random.Random(seed)
        while True:
            ready = [
                s
                for s, queue in enumerate(self.queues)
                if done[s] < len(queue) and all(done[other] >= count for other, count in queue[done[s]][1])
            ]
            if not ready:
                break
            stream = chance.choice(ready)
            self.queues[stream][done[stream]][0]()
            done[stream] += 1
        assert done == [len(queue) for queue in self.queues]


class Stream:
    """Equality by number, as torch's: each call of ``current_stream`` gives another object."""

    def __init__(self, device: Device, number: int):
        self.device, self.number, self._pending = device, number, []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]

    def wait_stream(self, other: Stream) -> None:
        self.device.waits.append((self.number, other.number))
        self.device.queues[self.number].append((lambda: None, [(other.number, len(self.device.queues[other.number]))]))

    def queue(self, work: Callable[[], None]) -> None:
        self.device.queues[self.number].append((work, []))


def test_uses_of_the_tables_are_in_the_order_of_the_host() -> None:
    device = Device()
    streams = [device.current, device.new(), device.new()]
    order = StreamOrder(lambda: Stream(device, device.current.number))
    plan = make_plan(sum(NUMELS) * 4, 256, torch.device("cpu"))
    accumulator = Accumulator(plan, offsets_of(NUMELS)[0], NUMELS, order=order)
    flat = torch.ones(NUMELS[0])

    def use(stream: int, act: Callable[[], Any]) -> list[tuple[int, int]]:
        device.current, before = streams[stream], len(device.waits)
        act()
        return device.waits[before:]

    assert use(0, lambda: accumulator.add(0, flat)) == []
    assert use(0, lambda: accumulator.add(1, flat[:64])) == []  # one stream: nothing is waited for
    assert use(1, lambda: accumulator.add(1, flat[:64])) == [(1, 0)]
    assert use(1, lambda: accumulator.add(3, flat[:20])) == []
    assert use(2, accumulator.peek) == [(2, 1)]
    assert use(0, accumulator.take) == [(0, 2)]  # behind every use, because each came behind the one before
    assert use(0, lambda: accumulator.add(0, flat)) == []
    assert use(1, accumulator.take) == [(1, 0)]


@pytest.mark.parametrize("ordered", [True, False])
def test_what_streams_do_first_does_not_matter(ordered: bool) -> None:
    """Twelve uses from three streams: in every schedule that the waits allow, they run as the host asked for them."""
    as_asked = []
    for seed in range(20):
        device, ran = Device(), []
        streams = [device.current, device.new(), device.new()]
        order = StreamOrder(lambda device=device: Stream(device, device.current.number))  # type: ignore[misc]
        for use in range(12):
            device.current = streams[use % 5 % 3]
            if ordered:
                order.enter()
            device.current.queue(lambda use=use, ran=ran: ran.append(use))  # type: ignore[misc]
        device.run(seed)
        as_asked.append(ran == list(range(12)))
    assert as_asked == [ordered] * 20


def test_a_stream_that_is_current_still_is_known_by_its_number() -> None:
    """Asking torch for the stream's object costs 20 us of the host, for each gradient that a hook brings."""
    device = Device()
    streams, asked = [device.current, device.new()], []

    def current() -> Stream:
        asked.append(device.current.number)
        return Stream(device, device.current.number)

    order = StreamOrder(current, lambda: device.current.number)
    for number in (0, 0, 0, 1, 1, 0):
        device.current = streams[number]
        order.enter()
    assert asked == [0, 1, 0]
    assert device.waits == [(1, 0), (0, 1)]


def test_the_gradient_of_a_step_is_entered_by_every_hook_and_by_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    device.new()
    order = StreamOrder(lambda: Stream(device, device.current.number))
    monkeypatch.setattr("ds_silent.capture.local_gradient.stream_order", lambda _: order)
    monkeypatch.setattr("ds_silent.capture.local_gradient.new_accumulator", Accumulator)  # the host's own needs none
    config = DirectionConfig(sketch_size=256)
    numels, layers = NUMELS[:2], [0, 0]
    local = LocalGradient(
        numels,
        layers,
        config,
        torch.device("cpu"),
        lambda _: None,
        additive=False,
        norms_add_up=True,
        copied=True,
        by_layer=False,
    )
    local.observe(0, torch.ones(NUMELS[0]), boundary=True, exact=True)
    device.current = Stream(device, 1)
    local.observe(1, torch.ones(NUMELS[1]), boundary=True, exact=True)
    assert device.waits == [(1, 0)]
    device.current = Stream(device, 0)
    local.accumulator.take()
    assert device.waits == [(1, 0), (0, 1)]


def test_on_the_cpu_there_is_nothing_to_order() -> None:
    assert stream_order(torch.device("cpu")) is None
