"""Observations as numbers, and back.

pack(layout, observation, out)                        # fp32, in the order of the fields
gathered = unpack(layout, step, rows)                 # and with_sums(gathered, ...)
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import accumulate
from operator import attrgetter

import torch
from torch import Tensor

from ds_silent.distributed.together import SparseGradientError, UnevenInputsError, Unobservable
from ds_silent.exchange.layout import WORDS, Layout
from ds_silent.exchange.observation import (
    BROKE,
    FIELDS,
    GROUPS,
    UNEVEN,
    UNSEEN,
    EachRank,
    Gathered,
    Observation,
    Sums,
    on_all,
)
from ds_silent.maths.sketch import fold

_values = attrgetter(*FIELDS)
_ENDS = list(accumulate(len(fields(group)) for group in GROUPS.values()))
_BEGINS = [0, *_ENDS[:-1]]
_SPANS = [(name, GROUPS[name], begin, end) for name, begin, end in zip(GROUPS, _BEGINS, _ENDS, strict=True)]


_CODES: dict[type[Exception], float] = {Exception: BROKE, SparseGradientError: UNSEEN, UnevenInputsError: UNEVEN}


class FailedRows:
    """What a rank sends that has nothing to send, made beforehand: it broke, or the training cannot be observed."""

    def __init__(self, width: int, device: torch.device):
        rows = torch.zeros(len(_CODES), width, device=device)
        rows[:, FIELDS.index("status.failed")] = torch.tensor(list(_CODES.values()), device=device)
        self._rows: dict[type[Exception], Tensor] = dict(zip(_CODES, rows.unbind(), strict=True))

    def of(self, failure: Exception | None) -> Tensor:
        """(width,) fp32."""
        return self._rows[_kind(failure)]

    @staticmethod
    def code(failure: Exception | None) -> float:
        """``status.failed`` of that row."""
        return _CODES[_kind(failure)]


def _kind(failure: Exception | None) -> type[Exception]:
    return type(failure) if isinstance(failure, Unobservable) else Exception


def pack(layout: Layout, observation: Observation, out: Tensor) -> Tensor:
    """Fill the row of one rank, (scalars + vectors,) fp32, and give it back."""
    scalars, *vectors = torch.split(out, layout.parts)
    pack_scalars(layout, observation, scalars)
    layers, aggregates = (
        None if sketches is None else fold(sketches, layout.layer_size)
        for sketches in (observation.layer_sketches, observation.layer_aggregates)
    )
    values = (observation.sketch, observation.aggregate, layers, aggregates, observation.gram)
    for part, value in zip(vectors, values, strict=True):
        part.zero_() if value is None else part.copy_(value.reshape(-1))
    return out


def pack_scalars(layout: Layout, observation: Observation, out: Tensor) -> None:
    """Fill ``out``, (layout.scalars,) fp32: one copy for what is known on the host, one for each value on a device."""
    values = _values(observation)
    out.zero_()
    scalars, squares, ids, hashes, _, _ = torch.split(out, layout.scalar_parts)
    known = torch.tensor([value if type(value) is float else 0.0 for value in values], dtype=torch.float32)
    scalars.copy_(known, non_blocking=True)
    for place, value in enumerate(values):
        if type(value) is not float:  # isinstance of a Tensor is Python, once for each
            scalars[place].copy_(value)
    if observation.layer_squares is not None:
        squares.copy_(observation.layer_squares)
    if observation.ids is not None:
        ids.copy_(observation.ids)
    if observation.hashes is not None:
        words = torch.stack([(observation.hashes >> 16 * word) & 0xFFFF for word in range(WORDS)], 1)
        hashes.view(-1, WORDS).copy_(words)


def unpack(layout: Layout, step: int, rows: Tensor) -> Gathered:
    """What all ranks' scalars say: (N, layout.scalars) float64."""
    scalars, squares, ids, words, _, _ = torch.split(rows, layout.scalar_parts, dim=1)
    hashes = torch.zeros(len(rows), layout.hashes, dtype=torch.int64)
    for word in range(WORDS):
        hashes |= words[:, word::WORDS].nan_to_num(0.0).to(torch.int64) << 16 * word
    columns = scalars.t().contiguous().unbind()
    groups = {name: group(*columns[begin:end]) for name, group, begin, end in _SPANS}
    return Gathered(step, **groups, layer_squares=squares, ids=ids, hashes=hashes)


def with_sums(known: Gathered, aggregate: Tensor, gram: Tensor, directions: EachRank | Sums) -> Gathered:
    """With what is not of single ranks.

    Args:
        aggregate: (k,) sum over the ranks.
        gram: (layout.gram,) sum over the ranks; used where all have exchanged their inner products.
    """
    exact = on_all(known.local.gram_seen)
    matrix = gram.view(known.ranks, known.ranks).clone() if exact else None
    return replace(known, aggregate=aggregate, gram=matrix, directions=directions)
