"""Observations of all ranks, made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch

from ds_silent.exchange.observation import GROUPS, Gathered


def gathered_of(step: int, ranks: int, **known: Sequence[float]) -> Gathered:
    """``known``: (N,) values by ``"group.field"``; all others are 0."""
    given, zeros = (
        {name: torch.tensor(one, dtype=torch.float64) for name, one in known.items()},
        torch.zeros(ranks).double(),
    )
    groups = {
        name: group(**{one.name: given.get(f"{name}.{one.name}", zeros) for one in fields(group)})
        for name, group in GROUPS.items()
    }
    empty = torch.zeros(ranks, 0)
    return Gathered(step, **groups, aggregate=torch.zeros(0), layer_squares=empty, ids=empty)
