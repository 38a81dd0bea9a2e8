"""Ids of rows: given by a script or made of their content, and on their way through the observing collective.

    sampling = sampling_of(ranks, capacity)            # every rank the same: which rows are sent, in how much room
    sent = pack_rows(ids, sampling)                    # on every rank, into the fp32 all-gather
    step = unpack_ids(gathered, sampling)              # on the host: every rank's ids
    tensors, mask = batch_tensors(args, kwargs)        # of the model's forward, when the script gives no ids
    ids = row_hashes(tensors, mask)

An id is any 64-bit integer that means the same row on every rank. With ids from content, rows that the data set really
holds twice count as one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_silent.maths.mixing import GOLDEN, MIX

Ids = npt.NDArray[np.int64]
LIMB_BITS = 22  # fp32 holds integers below 2**24 exactly; three limbs hold 64 bits
_LIMB = (1 << LIMB_BITS) - 1
_HASH_BLOCK = 1 << 20  # elements hashed at once: bounds the int64 temporaries to a few times 8 MB


# -- ids that a script gives -----------------------------------------------------------------------------------------


def as_ids(given: Any) -> Tensor:
    """Ids of a micro-batch's rows from what people have.

    Args:
        given: one integer per row: a tensor (any integer dtype and device), a numpy array, a list, a tuple, a range,
            or anything that numpy reads as such; a single integer is a micro-batch of one row.

    Returns:
        int64 (rows,), where the ids were. Nothing waits for a device.

    Raises:
        TypeError: they are no integers (strings, floats, booleans, a mapping).
        ValueError: there are more dimensions than one, or an id does not fit into 64 bits with a sign.
    """
    if isinstance(given, (list, tuple)) and any(isinstance(one, Tensor) for one in given):
        given = _stacked(given)
    if isinstance(given, Tensor):
        kind, shape = str(given.dtype).removeprefix("torch."), tuple(given.shape)
        whole = not (given.dtype.is_floating_point or given.dtype.is_complex or given.dtype == torch.bool)
        ids = given.detach()
        too_large = ids.dtype == torch.uint64 and ids.device.type == "cpu" and bool((ids.view(torch.int64) < 0).any())
    else:
        array = _array(given)
        kind, shape = _kind(given, array), array.shape
        whole = array.dtype.kind in "iu" or (array.size == 0 and isinstance(given, (list, tuple)))
        numbers = given if isinstance(given, (list, tuple)) else [given]
        if not whole and numbers and all(type(one) is int for one in numbers):  # numpy makes objects or floats of them
            raise ValueError(f"{_TAKES}, got an integer that does not fit into 64 bits; pass a hash of it")
        too_large = whole and bool(array.size) and int(array.max()) >= 1 << 63
        ids = torch.from_numpy(array.astype(np.int64, copy=True)) if whole else torch.empty(0)
    if not whole:
        raise TypeError(f"{_TAKES}, got {kind}; {_INSTANCE}")
    if len(shape) > 1:
        raise ValueError(f"{_TAKES}, got {len(shape)} dimensions {tuple(shape)}; pass one id per row")
    if too_large:
        raise ValueError(f"{_TAKES}, got an integer above 2^63 - 1; view them as int64, or pass a hash")
    return ids.to(torch.int64).reshape(-1)


_TAKES = "observe_batch takes one integer id per row of this rank's micro-batch (a list, a numpy array or a 1-D tensor)"
_INSTANCE = "pass the rows' places in the data set, for instance"


def _stacked(given: Sequence[Any]) -> Tensor:
    """A list of 0-dim tensors, as a data set without a collate function gives them."""
    try:
        return torch.stack([one if isinstance(one, Tensor) else torch.tensor(one) for one in given])
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{_TAKES}, got a list of tensors that are not one number each; pass integers") from None


def _array(given: Any) -> npt.NDArray[Any]:
    kind = _article(type(given).__name__)
    if isinstance(given, (Mapping, set, frozenset, str, bytes)) or given is None:
        raise TypeError(f"{_TAKES}, got {kind}; {_INSTANCE}")
    try:
        return np.asarray(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(f"{_TAKES}, got {kind} of unequal parts; pass one id per row") from None


def _kind(given: Any, array: npt.NDArray[Any]) -> str:
    """What people would call it."""
    if isinstance(given, (list, tuple)):
        odd = next((one for one in given if type(one) is bool or not isinstance(one, (int, np.integer))), 0)
        return f"a {type(given).__name__} of {type(odd).__name__}"
    return f"an array of {array.dtype}" if array.dtype != object else _article(type(given).__name__)


def _article(name: str) -> str:
    return "None" if name == "NoneType" else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


# -- ids on their way ------------------------------------------------------------------------------------------------


MAX_BYTES = 1 << 16  # of ids: N ranks with as many rows as 64 kB hold send all of them, more send a sample
FEWEST = 0.5  # rows of a rank that are sent in the mean: fewer, and its own room would cost more than what is in it
UNSENT = 1e-3  # of the rows in the sample that there is no room for, in the mean
_PLACE_BITS = 12
MAX_ROWS = 1 << _PLACE_BITS  # of a rank and observation that are looked at
_NUMBER = (1 << 24) - 1  # what fp32 carries
_HEADER = 3


@dataclass(frozen=True)
class Sampling:
    """Which rows a rank sends with an observation; the same on every rank.

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
    """What N ranks send of up to ``capacity`` rows each; see :data:`MAX_BYTES`.

    In a sample, the rows of all ranks take about ``MAX_BYTES`` or ``FEWEST`` rows of each rank, whichever is more, at 8
    bytes each. The room of a rank has to be of a fixed size and must hold what chance brings, B(capacity, rate): it is
    the smallest of which less than ``UNSENT`` of the sample is left out.
    """
    bits = math.log2(max(1.0, ranks * capacity * 8 / MAX_BYTES))
    level = min(math.ceil(bits), math.floor(math.log2(max(capacity, 1) / FEWEST)))
    return Sampling(capacity, _room(capacity, 2.0**-level), level) if level > 0 else Sampling(capacity, capacity)


def _room(rows: int, rate: float) -> int:
    """The fewest slots c of which E[max(0, X - c)] <= UNSENT * E[X], X ~ B(rows, rate)."""
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
    """The ids of one step, as they were received. Rows are sorted by rank, and by their place there.

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
    def per_rank(self) -> tuple[Ids, ...]:
        """Each rank's ids, in the order in which it visited them."""
        return tuple(np.split(self.values, np.cumsum(self.counts)[:-1]))

    @property
    def counts(self) -> Ids:
        """(N,) ids that each rank has sent."""
        return np.bincount(self.owners, minlength=len(self.taken)).astype(np.int64)

    @property
    def rows(self) -> tuple[int, ...]:
        """:attr:`taken`."""
        return tuple(self.taken.tolist())

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
    hashes = _mixed(newest.to(torch.int64) + _signed(GOLDEN))
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
    """64-bit ids as numbers that an fp32 collective without arithmetic brings over bit by bit.

    Args:
        ids: int64 (rows,), any values, on any device; more than ``capacity`` are cut, and the receiver sees that.
        capacity: rows that one rank may send; the same on every rank.
        count: rows that it really had; None: as many as there are ids.

    Returns:
        fp32 (3 * capacity + 1,) on the same device: low, middle and high limbs, then the true number of rows.
    """
    packed = torch.zeros(3 * capacity + 1, dtype=torch.float32, device=ids.device)
    kept = ids[:capacity].to(torch.int64)
    for limb in range(3):
        part = (kept >> (LIMB_BITS * limb)) & (_LIMB if limb < 2 else (1 << (64 - 2 * LIMB_BITS)) - 1)
        packed[limb * capacity : limb * capacity + len(kept)].copy_(part)
    packed[-1].fill_(_counted(len(ids) if count is None else count))
    return packed


def unpack_ids(rows: Tensor, sampling: Sampling | None = None) -> StepIds:
    """What :func:`pack_rows` made of each rank's ids.

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


# -- ids of rows that have none --------------------------------------------------------------------------------------


def batch_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], Tensor | None]:
    """The tensors among a model's inputs, in a fixed order, and the one named ``attention_mask``.

    Looks into lists, tuples and dicts. Dicts are read in the order of their keys' names.
    """
    tensors: list[Tensor] = []
    masks: list[Tensor] = []

    def walk(value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            (masks if name == "attention_mask" and not masks and value.ndim == 2 else tensors).append(value)
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                walk(value[key], str(key))
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item, name)

    walk(args, "")
    walk(kwargs, "")
    return tensors, masks[0] if masks else None


def row_hashes(tensors: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
    """An id of each row of a micro-batch from its content: the same bits at the same places give the same id.

    Integer arithmetic on the tensors' device; no host synchronisation, no collective. Each element is mixed with its
    place and the sum taken, h = sum_j mix(bits_j + mix(place_j)) mod 2^64, so that two rows with other content have
    the same id with probability 2^-64.

    Args:
        tensors: of any dtype (floats by their bits). Rows are the first dimension; what has another number of rows
            than the first tensor (shared position ids, scalars) is left out.
        mask: (rows, length), non-zero where a token is. Masked places of tensors of that length do not count, so that a
            row has one id however far it was padded, left or right. Without a mask, padding is content.

    Returns:
        int64 (rows,).

    Raises:
        ValueError: no tensor with rows.
    """
    given = [tensor.detach() for tensor in tensors if tensor.ndim > 0]
    if not given:
        raise ValueError("row_hashes needs a tensor with a dimension of rows, got none; pass the micro-batch's inputs")
    rows = given[0].shape[0]
    present = mask.detach() != 0 if mask is not None and mask.ndim == 2 and mask.shape[0] == rows else None
    total = torch.zeros(rows, dtype=torch.int64, device=given[0].device)
    for index, tensor in enumerate(tensor for tensor in given if tensor.shape[0] == rows):
        if present is not None and tensor.ndim >= 2 and tensor.shape[1] == present.shape[1]:
            inner = math.prod(tensor.shape[2:])
            offset = torch.arange(inner, device=tensor.device)
            numbers = present.to(torch.int64).cumsum(1) - 1
            place = (numbers[:, :, None] * inner + offset).reshape(rows, -1)
            counts = present[:, :, None].expand(-1, -1, inner).reshape(rows, -1)
        else:
            place = torch.arange(math.prod(tensor.shape[1:]), device=tensor.device)[None]
            counts = None
        bits = _bits(tensor)
        repeats = bits.shape[1] // max(place.shape[1], 1)  # complex numbers have two words
        salt = _signed((index + 1) * GOLDEN)
        columns = max(1, _HASH_BLOCK // max(rows, 1))
        for begin in range(0, place.shape[1], columns):
            part = slice(begin, begin + columns)
            for word in range(repeats):
                key = _mixed(place[:, part] * repeats + word + salt)
                mixed = _mixed(bits[:, word::repeats][:, part].to(torch.int64) + key)
                total += (mixed if counts is None else mixed * counts[:, part]).sum(1)
    return total


def _bits(tensor: Tensor) -> Tensor:
    """(rows, elements) integers of the same bits; complex numbers give two each."""
    flat = tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(flat.shape[0], -1)
    if not flat.is_floating_point():
        return flat
    return flat.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def _mixed(x: Tensor) -> Tensor:
    """splitmix64's finalizer in int64 wrap-around arithmetic; ``>>`` of int64 is arithmetic, hence the masks."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(MIX[0])
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(MIX[1])
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
