"""Make ids of rows, from what a script gives, else from their content.

tensors, mask = batch_tensors(args, kwargs)        # of the model's forward
ids = row_hashes(tensors, mask)

Rows that the data set really holds twice count as one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_silent.maths.mixing import GOLDEN, mixed, signed

_BESIDE = ("mask", "position", "edge_index")  # in the names of tensors that may have no rows, or others
_KEPT = 1 << 16  # elements of a row whose keys are kept on the device: at most 8 MiB in all
_HASH_BLOCK = 1 << 20  # elements hashed at once: bounds the int64 temporaries to a few times 8 MB


def batch_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], Tensor | None]:
    """The tensors among a model's inputs, in a fixed order, and the one named ``attention_mask``.

    Looks into lists, tuples and dicts. Dicts are read in the order of their keys' names, masks and positions last.
    """
    tensors: list[Tensor] = []
    masks: list[Tensor] = []

    def walk(value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            (masks if name == "attention_mask" and not masks and value.ndim == 2 else tensors).append(value)
        elif isinstance(value, Mapping):
            for key in sorted(value, key=lambda key: (any(part in str(key) for part in _BESIDE), str(key))):
                walk(value[key], str(key))
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item, name)

    walk(args, "")
    walk(kwargs, "")
    return tensors, masks[0] if masks else None


def rows_of(tensors: Sequence[Tensor]) -> int:
    """Return the rows of a micro-batch: the first dimension of its first matrix, else of its first vector; 0 without.

    Vectors may be something else, such as the offsets of the sequences that a row packs (``cu_seq_lens``).
    """
    ordered = [*(one for one in tensors if one.ndim > 1), *(one for one in tensors if one.ndim == 1)]
    return int(ordered[0].shape[0]) if ordered else 0


class RowDimension:
    """Find how many rows a micro-batch has, where its loader says how many a whole batch has."""

    def __init__(self) -> None:
        self._place: int | None = None  # of the tensor that had as many
        self._list: int | str | None = None  # of the argument that is a list of them
        self.known = True  # not where an agent sees one vector, beside the batches

    def listed(self, args: Sequence[Any], kwargs: Mapping[str, Any], batch: int | None) -> list[Tensor] | None:
        """Return the rows of a batch that is a list of one tensor each, such as images of unlike sizes; else None.

        A list of several inputs, each of all rows, may have that length too: its tensors begin with as many.
        """
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for name, value in named:
            if not isinstance(value, (list, tuple)) or not all(isinstance(one, Tensor) and one.ndim for one in value):
                continue
            is_batch = self._place is None and len(value) == batch and any(len(one) != batch for one in value)
            if value and (is_batch or name == self._list):
                self._list, self.known = name, True
                return list(value)
        return None

    def rows(self, tensors: Sequence[Tensor], batch: int | None) -> int:
        """Return the first dimension of the first tensor that has it of a whole batch, or had; else :func:`rows_of`.

        A constant beside the batch, such as a causal mask or the tokens of classes, has other dimensions.
        """
        ordered = sorted(range(len(tensors)), key=lambda place: tensors[place].ndim < 2)
        found = [place for place in ordered if tensors[place].ndim and tensors[place].shape[0] == batch]
        self._place = found[0] if found else self._place
        if batch is None or self._place is None or self._place >= len(tensors) or not tensors[self._place].ndim:
            self.known = any(one.ndim > 1 for one in tensors)
            return rows_of(tensors)
        one = tensors[self._place]
        self.known = one.ndim > 1 or one.shape[0] <= batch
        return int(one.shape[0])


def row_hashes(tensors: Sequence[Tensor], mask: Tensor | None = None, rows: int | None = None) -> Tensor:
    """An id of each row of a micro-batch from its content: the same bits at the same places give the same id.

    Integer arithmetic on the tensors' device; no host synchronisation, no collective. Each element is mixed with its
    place and the sum taken, h = sum_j mix(bits_j + mix(place_j)) mod 2^64, so that two rows with other content have
    the same id with probability 2^-64.

    Args:
        tensors: of any dtype (floats by their bits). Rows are the first dimension; what has another number of rows
            than :func:`rows_of` (shared position ids, offsets of packed sequences, scalars) is left out.
        mask: (rows, length), non-zero where a token is. Masked places of tensors of that length do not count, so that a
            row has one id however far it was padded, left or right. Without a mask, padding is content.
        rows: where it is known; None: that of :func:`rows_of`.

    Returns:
        int64 (rows,).

    Raises:
        ValueError: no tensor with rows.
    """
    given = [tensor.detach() for tensor in tensors if tensor.ndim > 0]
    if not given:
        raise ValueError("row_hashes needs a tensor with a dimension of rows, got none; pass the micro-batch's inputs")
    rows = rows_of(given) if rows is None else rows
    present = mask.detach() != 0 if mask is not None and mask.ndim == 2 and mask.shape[0] == rows else None
    total = torch.zeros(rows, dtype=torch.int64, device=given[0].device)
    place: Tensor | None
    counts: Tensor | None
    for index, tensor in enumerate(tensor for tensor in given if tensor.shape[0] == rows):
        if present is not None and tensor.ndim >= 2 and tensor.shape[1] == present.shape[1]:
            inner = math.prod(tensor.shape[2:])
            offset = torch.arange(inner, device=tensor.device)
            numbers = present.to(torch.int64).cumsum(1) - 1
            place = (numbers[:, :, None] * inner + offset).reshape(rows, -1)
            counts = present[:, :, None].expand(-1, -1, inner).reshape(rows, -1)
        else:
            place, counts = None, None
        bits = _bits(tensor)
        elements = math.prod(tensor.shape[1:])
        repeats = bits.shape[1] // max(elements, 1)  # complex numbers have two words
        columns = max(1, _HASH_BLOCK // max(rows, 1))
        for begin in range(0, elements, columns):
            part = slice(begin, begin + columns)
            for word in range(repeats):
                if place is None:
                    made = _keys_of_places if elements <= _KEPT else _keys_of_places.__wrapped__
                    key = made(begin, min(begin + columns, elements), repeats, word, index, tensor.device)
                else:
                    key = _keys(place[:, part], repeats, word, index)
                value = mixed(bits[:, word::repeats][:, part].to(torch.int64) + key)
                total += (value if counts is None else value * counts[:, part]).sum(1)
    return total


def _keys(places: Tensor, repeats: int, word: int, index: int) -> Tensor:
    return mixed(places * repeats + word + signed((index + 1) * GOLDEN))


@lru_cache(maxsize=16)
def _keys_of_places(begin: int, end: int, repeats: int, word: int, index: int, device: torch.device) -> Tensor:
    """int64 (1, end - begin): the same in each step, so that they are made once."""
    return _keys(torch.arange(begin, end, device=device)[None], repeats, word, index)


def _bits(tensor: Tensor) -> Tensor:
    """(rows, elements) integers of the same bits; complex numbers give two each."""
    flat = tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(flat.shape[0], -1)
    if not flat.is_floating_point():
        return flat
    return flat.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


# -- ids as scripts give them, in whatever form ------------------------------------------------------------------------


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
