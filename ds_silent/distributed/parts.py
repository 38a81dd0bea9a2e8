"""Group ranks by equal value, find the minority, and name ranks in a sentence. Pure.

parts = parts_of(values)          # ((0, 2, 3), (1,)): ranks of equal value, the largest part first
majority(parts), outvoted(parts)  # (0, 2, 3), (1,): both empty where no more than half of all agree
ranks_of((0, 2))                  # "ranks 0, 2"
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

SHOWN_RANKS = 8  # in a sentence

Parts = tuple[tuple[int, ...], ...]


def parts_of(values: Iterable[Hashable]) -> Parts:
    """Group ranks by equal value; the largest part first, then by first rank."""
    members: dict[Hashable, list[int]] = {}
    for rank, value in enumerate(values):
        members.setdefault(value, []).append(rank)
    return tuple(sorted((tuple(part) for part in members.values()), key=lambda part: (-len(part), part)))


def parts_of_numbers(values: npt.NDArray[np.int64]) -> Parts:
    """:func:`parts_of` an array (N,), by sorting: 16,384 ranks take a few milliseconds."""
    _, first, found, counts = np.unique(values, return_index=True, return_inverse=True, return_counts=True)
    if len(first) == len(values):
        return tuple((rank,) for rank in range(len(values)))
    ranks, ends = np.argsort(found, kind="stable").tolist(), np.cumsum(counts).tolist()
    begins = [0, *ends[:-1]]
    return tuple(tuple(ranks[begins[k] : ends[k]]) for k in np.lexsort((first, -counts)).tolist())


def majority(parts: Parts) -> tuple[int, ...]:
    """Return the ranks that have the same, where they are more than half of all; else none."""
    return parts[0] if 2 * len(parts[0]) > sum(map(len, parts)) else ()


def outvoted(parts: Parts) -> tuple[int, ...]:
    """Return the ranks that differ from more than half of all; none without such a majority."""
    return tuple(sorted(rank for part in parts[1:] for rank in part)) if majority(parts) else ()


def ranks_of(ranks: Sequence[int]) -> str:
    """Name ranks: ``rank 3``, ``ranks 0, 2``, ``ranks 0, 1, 2, 3, 4, 5, 6, 7 and 3 more``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks, SHOWN_RANKS)}"


def listed(items: Sequence[object], shown: int, what: str = "") -> str:
    """Join the first ``shown`` items: ``a, b, c and 2 more``; ``what`` says of what, in the plural."""
    more = len(items) - shown
    return ", ".join(map(str, items[:shown])) + (f" and {more} more {what}".rstrip() if more > 0 else "")
