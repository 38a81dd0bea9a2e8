"""What a data set holds, read without asking it for a row: whether ranks that each take all of it take the same rows.

    held_by(iterator)      # hash of the data set, where each pass of a torch loader takes every row of it; else 0
    rows_held_by(data)     # hash of its rows alone, as far as some are read, however they are dealt; 0: not known

Rows may come augmented, or packed into graphs, so that no two ranks ever see the same tensors. What the data set's
attributes hold is the same all the same: numbers, strings, tensors and arrays, of which a few are read, and what its
methods and functions use: closures, defaults, globals. No code of the script's runs for it. Equal hashes say that two
ranks hold the same rows as far as this tells: it is a reason to look, and no proof. A data set is unknown

* where nothing in it that is as long as the data set has different contents: indices, offsets, an empty buffer;
* where something in it cannot be read: a file, a data base, an object of a compiled library;
* where its code may not go by the index alone: it draws numbers, or reads its rank.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import Parameter
from torch.utils.data import BatchSampler, ConcatDataset, RandomSampler, SequentialSampler, Subset

from ds_silent.maths.fingerprint import short_hash

_ROWS, _FEW = 64, 8  # of a container that are read, all over it; of one inside another
_DEEP, _MANY = 6, 1 << 14  # objects inside each other; values in all, above which nothing is known
_DIFFERENT = 8  # contents among the rows that are read: fewer may be labels, or a buffer
_LIBRARY = sysconfig.get_paths()["stdlib"]
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range)
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
        reading.read(getattr(iterator, "_collate_fn", None))
    except Exception:  # somebody else's objects
        return 0.0
    return short_hash(reading.values) if reading.tells and not reading.unknown else 0.0


def rows_held_by(data: Any) -> float:
    """Hash some rows of a data set, fp32-exact; 0.0 where they are not known. Of a path only the last part counts."""
    try:
        reading = _Reading(_longest(data), rows_alone=True)
        reading.read(data)
    except Exception:  # somebody else's objects
        return 0.0
    return short_hash(reading.rows) if reading.rows else 0.0


def _longest(data: Any) -> int:
    """Return how many rows a container of ``data`` must have to hold them."""
    if isinstance(data, Subset):
        return _longest(data.dataset)
    return max(map(_longest, data.datasets), default=0) if isinstance(data, ConcatDataset) else len(data)


class _Reading:
    """Read values that an object holds, of a data set of so many ``rows``.

    Attributes:
        tells: a container of so many rows, or more, has different ones.
        rows: some of the rows of such containers.
        unknown: something cannot be read, or there is too much.

    Args:
        rows_alone: read the rows, and not the code that uses them.
    """

    def __init__(self, rows: int, rows_alone: bool = False):
        self.values: list[Any] = []
        self.rows: list[list[Any]] = []
        self.tells = self.unknown = False
        self._rows, self._rows_alone = rows, rows_alone

    def read(self, value: Any, depth: int = 0, most: int = _ROWS) -> list[Any]:
        """Add what ``value`` holds, and return it; ``most``: rows of a container."""
        begin, kind = len(self.values), type(value)
        self.unknown |= begin > _MANY
        if depth > _DEEP or self.unknown:
            return []
        if kind in _PLAIN or isinstance(value, (PurePath, np.generic)):
            shown = value if kind in _PLAIN else str(value)
            self.values.append(os.path.basename(shown) if self._rows_alone and isinstance(shown, str) else shown)
        elif kind in (Tensor, Parameter, np.ndarray, np.memmap):  # a subclass may run code of its own
            self.unknown |= kind is np.ndarray and value.dtype == object
            self.values += (str(value.dtype), tuple(value.shape))
            if value.ndim and len(value):
                rows = [_some_of(value[row].reshape(-1), most) for row in _some(len(value), most)]
                self.values += rows
                self._look(rows, len(value))
        elif kind in (list, tuple):
            self.values.append(len(value))
            self._look([self.read(value[row], depth + 1, _FEW) for row in _some(len(value), most)], len(value))
        elif kind is dict:
            for key in [*value][:most]:
                self.values.append(str(key) if type(key) in _PLAIN else type(key).__name__)
                self.read(value[key], depth + 1, most)
        else:
            self._object(value, depth + 1, most)
        return self.values[begin:]

    def _look(self, found: Sequence[list[Any]], rows: int) -> None:
        """Look whether some of a container's ``rows`` are different, and no indices or offsets."""
        different = len({repr(one) for one in found})
        numbers = [one[0] for one in found if len(one) == 1 and isinstance(one[0], int)]
        places = len(numbers) == len(found) and (different == len(found) or numbers == sorted(numbers))
        filled = 2 * different > len(found) or not self._rows_alone  # a cache is filled row by row
        if rows >= self._rows and different >= min(_DIFFERENT, len(found)) > 1 and filled and not places:
            self.tells = True
            self.rows += found

    def _object(self, value: Any, depth: int, most: int) -> None:
        kind = type(value)
        self.values.append(f"{kind.__module__}.{kind.__qualname__}")
        if kind.__module__.startswith("datasets.") and type(known := getattr(value, "_fingerprint", None)) is str:
            self.values.append(known)  # Hugging Face's: it follows from the rows
            self.tells = True
        elif isinstance(value, (ModuleType, type)):
            self.values.append(value.__name__)
        elif self._rows_alone:
            for held in vars(value).values() if hasattr(value, "__dict__") else ():
                self.read(held, depth, most)
        elif kind is FunctionType:
            self._function(value, depth, most)
        elif kind is MethodType:
            self.read([value.__self__, value.__func__], depth, most)
        elif kind is partial:
            self.read([value.func, value.args, value.keywords], depth, most)
        elif not hasattr(value, "__dict__"):
            self.unknown = True
        else:
            for base in filter(_is_of_script, kind.__mro__):
                for name, made in vars(base).items():
                    if type(made) in (*_PLAIN, FunctionType, list, tuple, dict) and name != "__firstlineno__":
                        self.read(made, depth, most)
            for name, held in sorted(vars(value).items()):
                self.values.append(name)
                self.read(held, depth, most)

    def _function(self, function: FunctionType, depth: int, most: int) -> None:
        """Read what a function uses beside its arguments; nothing is known where it may not go by them alone."""
        self.values.append(function.__qualname__)
        if not _is_of_script(function):
            return
        names = set(_names_in(function.__code__))
        self.unknown |= any(_OTHERWISE.search(name.lower()) for name in names)
        used = [function.__globals__[name] for name in sorted(names & function.__globals__.keys())]
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        for one in (*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *used):
            if one is not function:
                self.read(one, depth, most)


def _is_of_script(made: Any) -> bool:
    """Tell whether a class or function is the script's, and of no library: those go by their arguments."""
    file = getattr(sys.modules.get(made.__module__), "__file__", None) or ""
    return made.__module__ != "builtins" and not file.startswith(_LIBRARY) and "-packages" not in file


def _names_in(code: CodeType) -> Iterator[str]:
    """Names and strings in a function's code, and in that of functions inside it."""
    yield from code.co_names
    for one in code.co_consts[1:]:  # the first may be its docstring
        if isinstance(one, str):
            yield one
        elif isinstance(one, CodeType):
            yield from _names_in(one)


def _some(rows: int, most: int) -> list[int]:
    """Choose one of each of ``most`` equal parts, not always at the same place of it: what alternates is seen."""
    if rows <= most:
        return list(range(rows))
    return sorted({(place * rows + int(place * 0.618034 % 1.0 * rows)) // most for place in range(most)})


def _some_of(row: Any, most: int) -> list[Any]:
    return row[_some(len(row), min(most, 2 * _FEW))].tolist() if len(row) else []
