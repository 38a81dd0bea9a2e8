"""Many ranks of the exchange in one process: the real class for each, sums and gathers instead of collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from ds_silent.distributed.guard import CollectiveGuard, unguarded
from ds_silent.exchange import rows
from ds_silent.exchange.gather import ConstantSizeExchange
from ds_silent.exchange.layout import Layout
from ds_silent.exchange.observation import Gathered, Observation


class ManyRanks:
    """``ranks`` exchanges, each with buffers of its own."""

    def __init__(self, layout: Layout, ranks: int, total: float = 1.0):
        with _no_group(ranks):
            self._all: list[Any] = [
                ConstantSizeExchange(layout, None, torch.device("cpu"), total)  # type: ignore[arg-type]
                for _ in range(ranks)
            ]
        self._ranks = ranks

    def step(self, step: int, observations: Sequence[Observation]) -> Gathered | None:
        """Everybody posts; what rank 0 collects then, which is the step before."""
        with _no_group(self._ranks):
            for exchange, observation in zip(self._all, observations, strict=True):
                exchange.post(step, observation, CollectiveGuard())
            sums = torch.stack([exchange._sums for exchange in self._all]).sum(0)
            everybody = torch.cat([exchange._mine for exchange in self._all])
            for exchange in self._all:
                exchange._sums.copy_(sums)
                exchange._rows.received.copy_(everybody)
            collected = [exchange.collect(unguarded) for exchange in self._all]
            first = collected[0]
            return None if first is None else first.all

    @property
    def first(self) -> ConstantSizeExchange:
        """Rank 0's."""
        exchange: ConstantSizeExchange = self._all[0]
        return exchange

    def alone(self) -> AbstractContextManager[None]:
        """Where one of them is asked by itself."""
        return _no_group(self._ranks)


@contextmanager
def _no_group(ranks: int) -> Iterator[None]:
    with (
        patch.object(dist, "get_world_size", lambda group: ranks),
        patch.object(dist, "all_reduce", lambda *args, **named: None),
        patch.object(dist, "get_rank", lambda group: 0),
        patch.object(rows, "all_gather", lambda *args, **named: None),
    ):
        yield
