"""Read the ids of rows that a script gives, in whatever form it has them.

ids = as_ids([7, 8, 9])          # int64 (3,)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


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
