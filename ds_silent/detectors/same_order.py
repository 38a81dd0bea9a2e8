"""The same order in every epoch although the data are shuffled: nobody calls ``sampler.set_epoch``.

Told where the sampler says that it shuffles, or else, as a note, where the ids that the script tells are not in their
own order: shards may be read as they were written. Data that are walked in a fixed order by design are healthy. Null
hypothesis: each epoch has a shuffle of its own.
"""

from __future__ import annotations

from typing import Any

from ds_silent.detectors.finding import Finding
from ds_silent.measure.evidence import Evidence
from ds_silent.records import Score, StepRecord
from ds_silent.text import TORCH, Words


class SameOrderTest:
    """Follows what :mod:`ds_silent.measure.row_history` sees.

    Args:
        log_threshold: log of the mean number of measured steps between false alarms.
        words: for the remedy.

    Attributes:
        saw: the odds at the newest step, where a pass has ended there.
    """

    def __init__(self, log_threshold: float, words: Words = TORCH):
        self.saw: tuple[Score, ...] = ()
        self._threshold, self._words = log_threshold, words
        self._since: int | None = None
        self._score, self._rows = 0.0, 0
        self._promised = True

    def step(self, record: StepRecord, extras: Evidence, explained: bool) -> list[Finding]:
        """The finding of one step, if any.

        Args:
            explained: rows come again for another reason.
        """
        seen = extras.same_order
        self.saw = () if seen is None else (Score("same-order", seen.log_odds, self._threshold),)
        if seen is not None and not seen.again:
            self._since = None
        elif seen is not None and seen.log_odds >= self._threshold and not explained:
            self._since = self._since or record.step
            self._score, self._rows, self._promised = seen.log_odds, seen.rows, seen.promised
        if self._since is None:
            return []
        message = (
            f"The rows come in the same order in every epoch, as they came {self._rows} rows before"
            f"{', although the sampler shuffles' * self._promised}: each epoch shows the model the same batches again."
        )
        remedy = (
            f"Call sampler.set_epoch(epoch) on every rank at the start of each epoch{self._words.own_sampler}, and do "
            "not seed the loader's generator anew."
        )
        everyone = tuple(range(record.world_size))
        return [
            Finding(
                key="same-order",
                kind="same-order",
                severity="warning" if self._promised else "info",
                ranks=everyone,
                where="sampler",
                score=self._score,
                threshold=self._threshold,
                message=message,
                remedy=remedy,
                since=self._since,
            )
        ]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"since": self._since, "score": self._score, "rows": self._rows, "promised": self._promised}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._since, self._score, self._rows = state["since"], float(state["score"]), int(state["rows"])
        self._promised = bool(state.get("promised", True))
