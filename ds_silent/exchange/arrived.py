"""What came of one step: at once what all ranks act by, and the rest when somebody wants it.

arrived = exchange.collect(once)
arrived.known.status.failed      # the same on every rank
arrived.all                      # on the writing rank: everything; made when it is asked for first
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ds_silent.exchange.observation import Gathered


@dataclass(frozen=True)
class Arrived:
    """A step's observations.

    Attributes:
        known: what every rank has alike, of each rank; of very many the smallest and the largest of their values
            instead, as if there were two ranks (:mod:`ds_silent.exchange.rows`).
        make: everything, with the sketches or their sums. None where this rank knows no more than ``known``.
    """

    known: Gathered
    make: Callable[[], Gathered] | None

    @property
    def step(self) -> int:
        """Of the observations."""
        return self.known.step

    @cached_property
    def all(self) -> Gathered:
        """Everything; on the writing rank at any time, on others before the next observation is sent.

        Raises:
            LookupError: this rank does not have it.
        """
        if self.make is None:
            raise LookupError("the rows of all ranks are on the writing rank only")
        return self.make()
