"""Ranks that take other numbers of rows, step after step. A fact, once it is no short last batch.

A mean over a rank's own rows makes a row count less where there are more of them: with 8 rows on one rank and 4 on the
others, that rank's rows have half the say. Batches that are filled by tokens differ on every rank at every step, and
the last batch of an epoch differs once; here, ``STEPS`` measured steps in a row, all ranks but a minority take one
number and the minority another one, the same at each step.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ds_silent.detectors.finding import Evidence, Finding, named
from ds_silent.records import StepRecord
from ds_silent.words import TORCH, Words

STEPS = 4


class BatchSizeTest:
    """Counts the steps in which the ranks took the same different numbers of rows."""

    def __init__(self, words: Words = TORCH) -> None:
        self._words = words
        self._rows: tuple[int, ...] = ()
        self._steps = 0
        self._since = 0

    def step(self, record: StepRecord, extras: Evidence) -> list[Finding]:
        """At most one finding: the ranks outside the majority, or all where there is none."""
        rows = extras.rows_taken or ()
        if len(set(rows)) != 2 or min(rows) <= 0:
            self._rows, self._steps = (), 0
            return []
        if rows != self._rows:
            self._rows, self._steps, self._since = rows, 0, record.step
        self._steps += 1
        if self._steps < STEPS:
            return []
        (usual, count), (other, _) = Counter(rows).most_common()
        odd = tuple(rank for rank, taken in enumerate(rows) if taken == other)
        majority = 2 * count > len(rows)
        ranks = odd if majority else tuple(range(len(rows)))
        rest = "the others" if majority else named(tuple(rank for rank, taken in enumerate(rows) if taken != other))
        message = (
            f"{named(odd).capitalize()} {'takes' if len(odd) == 1 else 'take'} {other} rows per measured step, {rest} "
            f"{usual}, since step {self._since}: their rows do not count alike in the mean."
        )
        remedy = (
            "Give every rank's loader the same batch size, or weigh each rank's loss by its rows; look at "
            f"{self._words.batch_size} and at the loader of the rank named."
        )
        key = f"batch-size:{','.join(map(str, rows))}"
        score = float(max(rows)) / min(rows)
        return [
            Finding(
                key=key,
                kind="batch-size-mismatch",
                severity="warning",
                ranks=ranks,
                where="rows",
                score=score,
                threshold=1.0,
                message=message,
                remedy=remedy,
                since=self._since,
            )
        ]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"rows": list(self._rows), "steps": self._steps, "since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._rows = tuple(state["rows"])
        self._steps, self._since = int(state["steps"]), int(state["since"])
