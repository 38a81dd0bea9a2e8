"""Pack the ids of rows for the observing collective, and unpack them.

    sampling = sampling_of(ranks, capacity)            # every rank the same: which rows are sent, in how much room
    sent = pack_rows(ids, sampling)                    # on every rank, into the fp32 all-gather
    step = unpack_ids(gathered, sampling)              # on the host: every rank's ids

An id is any 64-bit integer that means the same row on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_silent.maths.mixing import GOLDEN, WORDS, mixed, shifts_of, signed, words_of

Ids = npt.NDArray[np.int64]
LIMB_BITS = 22  # fp32 holds integers below 2**24 exactly; three limbs hold 64 bits
_LIMB = (1 << LIMB_BITS) - 1
MAX_BYTES = 1 << 16  # of ids: N ranks with as many rows as 64 kB hold send all of them, more send a sample
FEWEST = 0.5  # rows of a rank that are sent in the mean: fewer, and its own room would cost more than what is in it
UNSENT = 1e-3  # of the rows in the sample that there is no room for, in the mean
_PLACE_BITS = 12
MAX_ROWS = 1 << _PLACE_BITS  # of a rank and observation that are looked at
_NUMBER = (1 << 24) - 1  # what fp32 carries
_HEADER = 3
ROW_NUMBERS = 2 + WORDS
"""That a rank sends of all its rows of one step, where a trace is written."""


@dataclass(frozen=True)
class Sampling:
    """Say which rows a rank sends with an observation; the same on every rank.

    A row is sent when its 64-bit hash begins with ``level`` zero bits: one row in 2^level, chosen by the *row*, so that
    two ranks that hold the same rows send the same ones. At level 0 every row is sent, and its id as it is.
    """

    capacity: int  # newest rows of a rank that are looked at
    slots: int  # rows of a rank that there is room for
    level: int = 0

    @property
    def rate(self) -> float:
        """Share of the rows that are sent."""
        return float(2.0**-self.level)

    @property
    def numbers(self) -> int:
        """That a rank sends."""
        return _HEADER + 2 * self.slots if self.level else 3 * self.capacity + 1


def sampling_of(ranks: int, capacity: int) -> Sampling:
    """Choose what N ranks send of up to ``capacity`` rows each; see :data:`MAX_BYTES`.

    In a sample, the rows of all ranks take about ``MAX_BYTES`` or ``FEWEST`` rows of each rank, whichever is more, at 8
    bytes each. The room of a rank has to be of a fixed size and must hold what chance brings, B(capacity, rate): it is
    the smallest of which less than ``UNSENT`` of the sample is left out.
    """
    bits = math.log2(max(1.0, ranks * capacity * 8 / MAX_BYTES))
    level = min(math.ceil(bits), math.floor(math.log2(max(capacity, 1) / FEWEST)))
    return Sampling(capacity, _room(capacity, 2.0**-level), level) if level > 0 else Sampling(capacity, capacity)


def _room(rows: int, rate: float) -> int:
    """Find the fewest slots c of which E[max(0, X - c)] <= UNSENT * E[X], X ~ B(rows, rate)."""
    chances = [math.exp(_log_binomial(rows, count, rate)) for count in range(rows + 1)]
    for slots in range(1, rows):
        over = sum((count - slots) * chance for count, chance in enumerate(chances) if count > slots)
        if over <= UNSENT * rows * rate:
            return slots
    return max(rows, 1)


def _log_binomial(rows: int, count: int, rate: float) -> float:
    ways = math.lgamma(rows + 1) - math.lgamma(count + 1) - math.lgamma(rows - count + 1)
    return ways + count * math.log(rate) + (rows - count) * math.log1p(-rate)


@dataclass(frozen=True)
class StepIds:
    """Hold the ids of one step, as they were received. Rows are sorted by rank, and by their place there.

    Of a sample, an id is 36 bits of the row's hash: two of 10,000 different rows have the same with 0.0007.
    """

    values: Ids  # (M,)
    owners: Ids  # (M,) ranks
    places: Ids  # (M,) among the rows of the rank that were looked at, from 0
    taken: Ids  # (N,) rows that each rank really had; -1 when what it sent is not a row count
    looked: Ids  # (N,) newest of them that were looked at
    sampled: Ids  # (N,) those in the sample, whether or not there was room for them
    rate: float = 1.0  # share of the rows in the sample

    @property
    def counts(self) -> Ids:
        """(N,) ids that each rank has sent."""
        return np.bincount(self.owners, minlength=len(self.taken)).astype(np.int64)

    @property
    def complete(self) -> bool:
        """Whether all rows of every rank were looked at."""
        return bool((self.taken == self.looked).all())

    @property
    def unsent(self) -> int:
        """Rows of the sample that there was no room for."""
        return int(self.sampled.sum()) - len(self.values)


def pack_rows(ids: Tensor, sampling: Sampling) -> Tensor:
    """Pack a rank's rows, int64 (rows,) in the order in which it visited them: fp32 (sampling.numbers,), there."""
    newest = ids[-sampling.capacity :] if len(ids) > sampling.capacity else ids
    if not sampling.level:
        return pack_ids(newest, sampling.capacity, len(ids))
    packed = torch.zeros(sampling.numbers, dtype=torch.float32, device=ids.device)
    hashes = mixed(newest.to(torch.int64) + signed(GOLDEN))
    keys = ((hashes >> 33) & 0x7FFFFFFF).to(torch.int32)  # the first bits, as a number
    below = 1 << (31 - sampling.level)
    packed[0].fill_(_counted(len(ids)))
    packed[1].fill_(float(len(newest)))
    packed[2].copy_((keys < below).sum())
    # where there is no room for all, those of the smallest hashes: equal rows leave out the same
    smallest, places = torch.topk(keys, min(sampling.slots, len(keys)), largest=False)
    chosen = hashes[places]
    numbers = torch.stack((chosen & _NUMBER, ((chosen >> 24) & ((1 << 12) - 1)) << _PLACE_BITS | places), 1)
    packed[_HEADER : _HEADER + 2 * len(places)].copy_((numbers * (smallest < below)[:, None]).view(-1))
    return packed


def _counted(rows: int) -> float:
    return float(min(rows, 1 << 24))


def pack_ids(ids: Tensor, capacity: int, count: int | None = None) -> Tensor:
    """Pack 64-bit ids as numbers that an fp32 collective without arithmetic brings over bit by bit.

    Args:
        ids: int64 (rows,), any values, on any device; more than ``capacity`` are cut, and the receiver sees that.
        capacity: rows that one rank may send; the same on every rank.
        count: rows that it really had; None: as many as there are ids.

    Returns:
        fp32 (3 * capacity + 1,) on the same device: low, middle and high limbs, then the true number of rows.
    """
    packed = torch.zeros(3 * capacity + 1, dtype=torch.float32, device=ids.device)
    kept = ids[:capacity].to(torch.int64)
    limbs = (kept >> shifts_of(3, LIMB_BITS, ids.device)[:, None]) & _limb_masks(ids.device)[:, None]
    packed[:-1].view(3, capacity)[:, : len(kept)].copy_(limbs)
    packed[-1].fill_(_counted(len(ids) if count is None else count))
    return packed


@lru_cache(maxsize=8)
def _limb_masks(device: torch.device) -> Tensor:
    return torch.tensor([_LIMB, _LIMB, (1 << (64 - 2 * LIMB_BITS)) - 1], device=device)


def unpack_ids(rows: Tensor, sampling: Sampling | None = None) -> StepIds:
    """Undo :func:`pack_rows` of each rank's ids.

    Args:
        rows: (N, sampling.numbers) floating point on the host. All zeros is a rank without rows; a rank whose numbers
            cannot have been sent (a corrupted exchange) has no ids and -1 rows.
        sampling: None where all rows are sent.
    """
    values = rows.double().numpy()
    if sampling is not None and sampling.level:
        return _unpack_sample(values, sampling)
    capacity = (values.shape[1] - 1) // 3
    sane = np.isfinite(values).all(1) & (values >= 0).all(1) & (values[:, :-1] <= _LIMB).all(1)
    taken = np.where(sane, values[:, -1], -1).astype(np.int64)
    limbs = np.where(sane[:, None], values[:, :-1], 0).astype(np.uint64).reshape(-1, 3, capacity)
    ids = limbs[:, 0] | limbs[:, 1] << np.uint64(LIMB_BITS) | limbs[:, 2] << np.uint64(2 * LIMB_BITS)
    looked = np.clip(taken, 0, capacity)
    owners, places = (np.arange(capacity) < looked[:, None]).nonzero()
    # a rank that sent no row count was not looked at wholly
    return StepIds(ids[owners, places].view(np.int64), owners, places, taken, looked, looked)


def _unpack_sample(values: npt.NDArray[np.float64], sampling: Sampling) -> StepIds:
    header = values[:, :_HEADER]
    sane = np.isfinite(values).all(1) & (values >= 0).all(1) & (values[:, _HEADER:] <= _NUMBER).all(1)
    sane &= (header[:, 1] <= min(sampling.capacity, MAX_ROWS)) & (header[:, 1] <= header[:, 0])
    sane &= header[:, 2] <= header[:, 1]
    taken, looked, sampled = np.where(sane[:, None], header, 0).astype(np.int64).T
    taken = np.where(sane, taken, -1)
    numbers = np.where(sane[:, None], values[:, _HEADER:], 0).astype(np.int64).reshape(len(values), -1, 2)
    owners, slots = (np.arange(sampling.slots) < sampled[:, None]).nonzero()
    low, rest = numbers[owners, slots].T
    ids, places = low | (rest >> _PLACE_BITS) << 24, rest & (MAX_ROWS - 1)
    order = np.lexsort((places, owners))
    return StepIds(ids[order], owners[order], places[order], taken, looked, sampled, sampling.rate)


# ----------------------------------------------------------------------------------------------------------------------
# All rows of a step in one number, which says nothing of their order and of the ranks that hold them.


def hash_rows(ids: Sequence[Tensor], told: bool, device: torch.device) -> Tensor:
    """Return a rank's part, fp32 (ROW_NUMBERS,): how many rows, whether the script told their ids, their hash."""
    hashed = torch.zeros(ROW_NUMBERS, dtype=torch.float32, device=device)
    if ids:
        total = torch.stack([mixed(part.to(torch.int64) + signed(GOLDEN)).sum() for part in ids]).sum()
        hashed[2:].copy_(words_of(total))
        hashed[0].fill_(_counted(sum(map(len, ids))))
        hashed[1].fill_(float(told))
    return hashed


def all_rows(hashed: Tensor) -> tuple[int, str, bool] | None:
    """Return how many rows all ranks hold, their hash, and whether scripts told their ids; None where not known."""
    values = hashed.double().numpy()
    if values.shape[1] != ROW_NUMBERS or not np.isfinite(values).all() or (values < 0).any():
        return None
    holds = values[:, 0] > 0
    if not holds.any() or (values[holds, 0] >= 1 << 24).any() or len(set(values[holds, 1])) > 1:
        return None
    words = values[:, 2:].astype(np.int64).tolist()
    total = sum(word << 16 * place for row in words for place, word in enumerate(row)) % (1 << 64)
    return int(values[:, 0].sum()), f"{total:016x}", bool(values[holds, 1].all())
