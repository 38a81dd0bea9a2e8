"""From the numbers of a step to what is wrong: who, since when, why, and what to do.

    judge = Judge(config.detectors, interval=config.interval)      # on the writing rank
    events = judge.step(record, Evidence(...))                     # once per measured step, in order

Every detector is a file: what is no number or is missing (``broken``), equal rows (``duplicates``), the order of the
data (``order``), the same order in every epoch (``same_order``), a rank that takes the same rows again (``repeats``)
or another number of rows (``batch_size``), a rank that differs (``outlier``), a jump against the run's past
(``drift``), a result that is wrong (``integrity``).
They say what they see at this step; ``episodes`` makes one event of it when it starts and one when it ends.

``false_alarms_per_million_steps`` is shared equally by the four that judge by chance: order with repeats, outlier,
drift and the rounding bounds of ``integrity``. The derivations are in ``sequential`` and ``ds_silent.integrity``. The
others state facts. Scores and thresholds of the first three are natural logarithms of evidence: a threshold of 16 says
that chance reaches it once in e^16 steps. Their events carry the rate at which they would just still be told.
"""

from __future__ import annotations

import math
from typing import Any

from ds_silent.config import DetectorsConfig
from ds_silent.detectors import broken, duplicates
from ds_silent.detectors.batch_size import BatchSizeTest
from ds_silent.detectors.drift import DriftTest
from ds_silent.detectors.episodes import Episodes
from ds_silent.detectors.evidence import Coverage, Evidence, Finding, with_odds
from ds_silent.detectors.integrity import integrity, notes, replicas
from ds_silent.detectors.order import OrderTest
from ds_silent.detectors.outlier import OutlierTest
from ds_silent.detectors.repeats import RepeatTest
from ds_silent.detectors.same_order import SameOrderTest
from ds_silent.records import Event, StepRecord

__all__ = ["Coverage", "Evidence", "Finding", "Judge"]

_BY_CHANCE = 4  # detectors that share the false-alarm rate
_VERSION = 2  # of the state


def log_steps(config: DetectorsConfig, interval: int) -> float:
    """Natural logarithm of the mean number of measured steps between two false alarms of one detector."""
    rate = math.log(config.false_alarms_per_million_steps) + math.log(interval)  # a product may leave the floats
    return max(0.0, math.log(1e6 * _BY_CHANCE) - rate)


class Judge:
    """Detectors, baselines and thresholds of one run. Touches nothing but its own state.

    Args:
        config: ``enabled`` is the caller's business.
        interval: optimizer steps between measurements; the rate is per million *optimizer* steps.
    """

    def __init__(self, config: DetectorsConfig, interval: int = 1):
        self._log_steps = log_steps(config, interval)
        self._rate = config.false_alarms_per_million_steps
        self._episodes = Episodes(self._rate)
        self._order = OrderTest(self._log_steps + math.log(2.0))  # the two share one quarter of the rate
        self._repeats = RepeatTest(self._log_steps + math.log(2.0))
        # judged once an epoch: for a thousandth of the rate a pass needs one or two rows more
        self._same_order = SameOrderTest(self._log_steps + math.log(1000.0))
        self._drift = DriftTest(self._log_steps)
        self._batch_size = BatchSizeTest()
        self._outlier: OutlierTest | None = None  # made when the world size is known
        self._pairs_before: set[tuple[int, int]] = set()
        self._apart: list[Finding] = []
        self._stale_key: str | None = None
        self._conditional = False  # the model trains other parameters on other ranks, in health

    def told(self, event: Event) -> None:
        """What the preflight has found: it goes on, and what follows from it is no second alarm."""
        self._episodes.told(event)

    def step(self, record: StepRecord, extras: Evidence) -> list[Event]:
        """The events of one measured step, in order of severity of what they are about: broken numbers first."""
        findings = broken.non_finite(record, extras) + broken.zero_gradient(record, extras)
        impaired = bool(findings)
        findings += integrity(record, extras.integrity) + self._replicas(record, extras)
        findings += self._stale(record, extras)
        findings += self._batch_size.step(record, extras)
        same = self._duplicates(record, extras)
        findings += same
        told = notes(extras.integrity)
        again = self._repeats.step(record, extras)
        again += self._order.step(record, extras, bool(same), self._repeats.attributed)
        findings += again
        findings += self._same_order.step(record, extras, bool(again) or self._repeats.attributed > 0)
        if record.world_size > 1:
            if self._outlier is None or self._outlier.ranks != record.world_size:
                self._outlier = OutlierTest(record.world_size, self._log_steps)
            # ranks that hold the same rows are not exchangeable with the others
            findings += self._outlier.standing() if same else self._outlier.step(record, extras)
            if not impaired and not findings:  # never learn from a flagged step
                for note in self._drift.step(record):
                    assert note.score is not None
                    assert note.threshold is not None
                    told.append(with_odds(note, self._rate, note.score - note.threshold))
        return self._episodes.update(record.step, findings) + told

    def _duplicates(self, record: StepRecord, extras: Evidence) -> list[Finding]:
        found = duplicates.by_ids(record, extras, self._pairs_before)
        self._pairs_before = duplicates.shared_pairs(extras)
        return found or duplicates.by_gradients(record)  # also with ids: they may be counted per rank

    def _replicas(self, record: StepRecord, extras: Evidence) -> list[Finding]:
        """Replicas are compared now and then: those that differ do so until a comparison says otherwise."""
        seen = extras.integrity
        if seen is not None and seen.replicas is not None:
            self._apart = replicas(record, seen.replicas, seen.drift)
        return self._apart

    def _stale(self, record: StepRecord, extras: Evidence) -> list[Finding]:
        found = [] if self._conditional else broken.stale_parameters(record, extras)
        if found and self._stale_key not in (None, found[0].key):
            self._conditional = True
            return []
        if found:
            self._stale_key = found[0].key
        return found

    # -- a resume ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: baselines and what is going on, so that a resume neither forgets nor repeats."""
        return {
            "version": _VERSION,
            "episodes": self._episodes.state_dict(),
            "order": self._order.state_dict(),
            "repeats": self._repeats.state_dict(),
            "same_order": self._same_order.state_dict(),
            "drift": self._drift.state_dict(),
            "batch_size": self._batch_size.state_dict(),
            "outlier": None if self._outlier is None else self._outlier.state_dict(),
            "pairs_before": [list(pair) for pair in sorted(self._pairs_before)],
            "stale_key": self._stale_key,
            "conditional": self._conditional,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            ValueError: the state was written by another version.
        """
        if state.get("version") != _VERSION:
            raise ValueError(
                f"the detectors' state has version {state.get('version')!r}, this one reads {_VERSION}: start the "
                "detectors without it"
            )
        self._episodes.load_state_dict(state["episodes"])
        self._order.load_state_dict(state["order"])
        self._repeats.load_state_dict(state["repeats"])
        self._drift.load_state_dict(state["drift"])
        if "batch_size" in state:  # older states lack it
            self._batch_size.load_state_dict(state["batch_size"])
        if "same_order" in state:
            self._same_order.load_state_dict(state["same_order"])
        self._outlier = None
        if state["outlier"] is not None:
            self._outlier = OutlierTest(state["outlier"]["ranks"], self._log_steps)
            self._outlier.load_state_dict(state["outlier"])
        self._pairs_before = {(int(i), int(j)) for i, j in state["pairs_before"]}
        self._stale_key, self._conditional = state["stale_key"], state["conditional"]
