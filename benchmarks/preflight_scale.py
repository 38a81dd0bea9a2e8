"""What the preflight's comparison costs one rank of many: the real code, over simulated answers of all ranks.

    python benchmarks/preflight_scale.py                     # a table: N = 8, 1,024 and 16,384
    cost = measure(16_384, "one rank's weights")             # Cost(seconds, published, received, json_bytes)

All ranks run the same code up to the outcome, ``seconds``; the writing rank also makes the table, the file and the
events of it, ``published``. Making the answers is not counted.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console

from ds_silent.maths.fingerprint import hash_text
from ds_silent.preflight.comparison import FEWEST_ASKED, MIB_OF_HASHES, TEXT_BYTES, EveryRank, compared, questions
from ds_silent.preflight.items import PASSED, Hashes, Item
from ds_silent.preflight.messages import events_of, table, to_json

TENSORS = 723  # of a 70 B model
_KEYS = np.random.default_rng(0).integers(-(2**62), 2**62, TENSORS + 64) | 1


@dataclass(frozen=True)
class Cost:
    """Of one rank, in seconds of its CPU and in bytes; ``events``: what the comparison said."""

    seconds: float
    published: float
    received: int
    json_bytes: int
    events: tuple[str, ...]


class SimulatedRanks(EveryRank):
    """All ranks' answers from all ranks' hashes: int32 (N, I, 2). A rank's text is its item's name and its rank."""

    def __init__(self, items: Sequence[Item], hashes: Hashes):
        self.seconds, self.received = 0.0, 0
        self._items, self._hashes = items, hashes
        self._numbers = np.ascontiguousarray(hashes).view(np.int64)[..., 0]

    @property
    def size(self) -> int:
        return len(self._hashes)

    def same(self, own: Hashes) -> npt.NDArray[np.bool_]:
        started = time.process_time()
        self._alike = (self._numbers == self._numbers[0]).all(0)
        self.received += 16 * len(own)
        self.seconds += time.process_time() - started
        return self._alike if len(own) == len(self._items) else np.ones(len(own), dtype=bool)

    def hashes(self, own: Hashes) -> Hashes:
        started = time.process_time()
        apart = np.flatnonzero(~self._alike).tolist()
        single, joint = questions(self._items, apart, max(FEWEST_ASKED, MIB_OF_HASHES * (1 << 20) // (8 * self.size)))
        columns = [self._numbers[:, single]]
        columns += [(self._numbers[:, members] * _KEYS[: len(members)]).sum(1, keepdims=True) for members in joint]
        answers = np.ascontiguousarray(np.concatenate(columns, 1)).view(np.int32).reshape(self.size, -1, 2)
        assert answers.shape[1] == len(own)
        self.received += answers.nbytes
        self.seconds += time.process_time() - started
        return answers

    def texts(self, own: Sequence[str], speakers: Sequence[int]) -> list[str]:
        self.received += TEXT_BYTES * len(own)
        return [f"{text[:40]} of rank {rank}" for text, rank in zip(own, speakers, strict=True)]


def items_of_a_rank() -> list[Item]:
    """As many of each kind as a 70 B model's preflight has."""
    items = [
        Item(f"initial weights [{index}]", "weights", "equal", f"w{index}", (index, 7)) for index in range(TENSORS)
    ]
    items += [Item(f"generator {index}", "generators", "alike", "state", (index, 8), "warning") for index in range(6)]
    items += [Item(f"check {index}", "sampler", "passed", "found", PASSED) for index in range(3)]
    items += [Item("sampler's share", "sampler", "different", "share", (0, 9))]
    items += [Item(f"setting {index}", "config", "equal", "value", hash_text(str(index))) for index in range(30)]
    return items


Fault = Callable[[list[Item], Hashes], None]
_FIRST, _GENERATORS, _SHARE = slice(0, TENSORS), slice(TENSORS, TENSORS + 6), TENSORS + 9


def _one_ranks_weights(items: list[Item], hashes: Hashes) -> None:
    hashes[len(hashes) // 2, _FIRST, 0] += 10_000


def _everybodys_weights(items: list[Item], hashes: Hashes) -> None:
    hashes[:, _FIRST, 1] += np.arange(len(hashes), dtype=np.int32)[:, None]


def _own_seeds(items: list[Item], hashes: Hashes) -> None:
    hashes[:, _GENERATORS, 1] += np.arange(len(hashes), dtype=np.int32)[:, None]


def _shares_by_local_rank(items: list[Item], hashes: Hashes) -> None:
    hashes[:, _SHARE, 1] = np.arange(len(hashes), dtype=np.int32) % 8


FAULTS: dict[str, Fault] = {
    "healthy, one seed": lambda items, hashes: None,
    "healthy, own seeds": _own_seeds,
    "one rank's weights": _one_ranks_weights,
    "everybody's weights": _everybodys_weights,
    "shares by local rank": _shares_by_local_rank,
}


def measure(ranks: int, fault: str) -> Cost:
    """One comparison on rank 0 of N ``ranks``."""
    items = items_of_a_rank()
    hashes = np.repeat(np.array([item.hash for item in items], dtype=np.int32)[None], ranks, 0)
    hashes[:, _SHARE, 1] += np.arange(ranks, dtype=np.int32)
    FAULTS[fault](items, hashes)
    others = SimulatedRanks(items, hashes)
    started = time.process_time()
    outcome = compared(items, others)
    judged = time.process_time()
    Console(file=io.StringIO(), width=120).print(table(outcome))
    text = json.dumps(to_json(outcome), indent=1)
    events = events_of(outcome)
    ended = time.process_time()
    said = tuple(event.message for event in events)
    return Cost(judged - started - others.seconds, ended - judged, others.received, len(text), said)


def main() -> None:
    """Print the table."""
    print(f"{'N':>6} {'case':22} {'all ranks':>10} {'writer':>10} {'received':>10} {'file':>9} longest sentence")
    for ranks in map(int, sys.argv[1:] or ("8", "1024", "16384")):
        for fault in FAULTS:
            cost = min((measure(ranks, fault) for _ in range(2)), key=lambda cost: cost.seconds + cost.published)
            longest = max(map(len, cost.events), default=0)
            print(
                f"{ranks:>6} {fault:22} {1e3 * cost.seconds:>7.1f} ms {1e3 * cost.published:>7.1f} ms "
                f"{cost.received / 1e3:>7.0f} kB {cost.json_bytes / 1e3:>6.0f} kB {longest:>6}"
            )


if __name__ == "__main__":
    main()
