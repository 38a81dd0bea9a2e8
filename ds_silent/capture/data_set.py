"""What a data set holds, read without asking it for a row: whether ranks that each take all of it take the same rows.

    held_by(iterator)      # hash of the data set, where each pass of a torch loader takes every row of it; else 0

Rows may come augmented, or packed into graphs, so that no two ranks ever see the same tensors. What the data set's
attributes hold is the same all the same: numbers, strings, tensors and arrays, of which a few are read. Equal hashes
stand for the same rows only where these tell rows apart. So a data set is unknown

* where nothing in it that is as long as the data set has different contents: a file, a data base or an object of a
  compiled library cannot be read, and indices, offsets or an empty buffer say nothing of the rows;
* where what has different contents is longer, and something that cannot be read may choose among it;
* where its code may not go by the index alone: it draws numbers, or reads its rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from types import FunctionType
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import BatchSampler, ConcatDataset, Dataset, RandomSampler, SequentialSampler, Subset

from ds_silent.maths.fingerprint import short_hash

_ROWS, _FEW = 64, 8  # of a container that are read, evenly; of one inside another
_DEEP, _MANY = 6, 1 << 14  # objects inside each other; values in all, above which nothing is known
_DIFFERENT = 8  # contents among the rows that are read: fewer may be labels, or a buffer
_PICKED = (list, tuple, range, np.ndarray)  # what a subset's indices can be read of
_OTHERWISE = re.compile(r"rank|world|environ|randint|randrange|randperm|choice|shuffle|sample$")
"""In names that a data set's code uses: it may not go by the index alone."""


def held_by(iterator: Any) -> float:
    """Hash the data set of an iterator of torch's loader, fp32-exact; 0.0 where a pass of this rank does not take each
    of its rows once, or where it is not known what it holds."""
    try:
        batches: Any = getattr(iterator, "_index_sampler", None)
        sampler: Any = batches.sampler if type(batches) is BatchSampler else batches
        if type(sampler) not in (RandomSampler, SequentialSampler) or getattr(sampler, "replacement", False):
            return 0.0
        data, rows = iterator._dataset, len(sampler.data_source)
        if not rows == len(sampler) == len(data) > 0:
            return 0.0
        reading = _Reading(_longest(data))
        reading.read(data)
    except Exception:  # somebody else's objects
        return 0.0
    return short_hash(reading.values) if reading.tells else 0.0


def _longest(data: Any) -> int:
    """Return how many rows a container of ``data`` must have to hold them."""
    if isinstance(data, Subset):
        return _longest(data.dataset)
    return max(map(_longest, data.datasets), default=0) if isinstance(data, ConcatDataset) else len(data)


class _Reading:
    """Read values that an object holds, of a data set of so many ``rows``."""

    def __init__(self, rows: int):
        self.values: list[Any] = []
        self._rows = rows
        self._one_each = self._several_each = False  # a container has different values, as many as rows or more
        self._hidden = self._unknown = False  # something cannot be read; nothing is known

    @property
    def tells(self) -> bool:
        """Tell whether the values stand for the rows."""
        return not self._unknown and (self._one_each or (self._several_each and not self._hidden))

    def read(self, value: Any, depth: int = 0, most: int = _ROWS) -> list[Any]:
        """Add what ``value`` holds, and return it; ``most``: rows of a container."""
        begin = len(self.values)
        self._unknown |= begin > _MANY
        if depth > _DEEP or self._unknown:
            return []
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, range, PurePath, np.generic)):
            self.values.append(str(value) if isinstance(value, (PurePath, np.generic)) else value)
        elif isinstance(value, (Tensor, np.ndarray)):
            self.values += (str(value.dtype), tuple(value.shape))
            if value.ndim and len(value):
                rows = [_some_of(value[row].reshape(-1), most) for row in _evenly(len(value), most)]
                self.values += rows
                self._look(rows, len(value))
        elif isinstance(value, (list, tuple)):
            self.values.append(len(value))
            self._look([self.read(value[row], depth + 1, _FEW) for row in _evenly(len(value), most)], len(value))
        elif isinstance(value, Mapping):
            for key in [*value][:most]:
                self.values.append(str(key))
                self.read(value[key], depth + 1, most)
        else:
            self._object(value, depth, most)
        return self.values[begin:]

    def _look(self, found: Sequence[list[Any]], rows: int) -> None:
        """Look whether some of a container's ``rows`` are different, and no indices or offsets."""
        different = len({repr(one) for one in found})
        numbers = [one[0] for one in found if len(one) == 1 and isinstance(one[0], int)]
        places = len(numbers) == len(found) and (different == len(found) or numbers == sorted(numbers))
        if different >= min(_DIFFERENT, len(found)) > 1 and not places:
            self._one_each |= rows == self._rows
            self._several_each |= rows > self._rows

    def _object(self, value: Any, depth: int, most: int) -> None:
        kind = type(value)
        named = value if isinstance(value, (type, FunctionType)) else kind
        self.values.append(f"{named.__module__}.{named.__qualname__}")
        if kind.__module__.startswith("datasets.") and isinstance(known := getattr(value, "_fingerprint", None), str):
            self.values.append(known)  # Hugging Face's: it follows from the rows
            self._one_each = True
        elif isinstance(value, FunctionType):
            self.read([cell.cell_contents for cell in value.__closure__ or ()], depth + 1, most)
        elif not isinstance(value, type):
            self._unknown |= (depth == 0 or isinstance(value, Dataset)) and _goes_by_more(kind)
            self._unknown |= isinstance(value, Subset) and not isinstance(value.indices, _PICKED)
            self._hidden |= not hasattr(value, "__dict__")
            for name, held in sorted(getattr(value, "__dict__", {}).items()):
                self.values.append(name)
                self.read(held, depth + 1, most)


def _goes_by_more(kind: type) -> bool:
    """Tell whether a data set's code may give other rows than those of its index."""
    return any(_OTHERWISE.search(name.lower()) for name in _names_in(kind))


def _names_in(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        for name, made in vars(base).items():
            code = getattr(made, "__code__", None)
            if code is not None and name != "__init__" and not base.__module__.startswith("torch.utils.data"):
                yield from code.co_names
                yield from (one for one in code.co_consts[1:] if isinstance(one, str))


def _evenly(rows: int, most: int) -> list[int]:
    return [place * rows // min(rows, most) for place in range(min(rows, most))]


def _some_of(row: Any, most: int) -> list[Any]:
    return row[_evenly(len(row), min(most, 2 * _FEW))].tolist() if len(row) else []
