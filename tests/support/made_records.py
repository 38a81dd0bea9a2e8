"""Made records for the detectors' tests: N ranks with the spreads of a warm model, and a fault on request."""

from __future__ import annotations

import numpy as np

from ds_silent.config import DetectorsConfig
from ds_silent.detectors import Judge
from ds_silent.detectors.outlier import RankComparison
from ds_silent.measure.evidence import Evidence
from ds_silent.records import DirectionStats, Event, GradNormStats, LossStats, StepRecord

NOTHING = Evidence(dealt="random")


class Run:
    """Healthy records of N ranks, with a fault on request."""

    def __init__(self, ranks: int = 4, seed: int = 0, rate: float = 1.0, interval: int = 1):
        self.ranks, self.number = ranks, 0
        self.random = np.random.default_rng(seed)
        self.judge = Judge(DetectorsConfig(false_alarms_per_million_steps=rate), interval)

    def record(
        self, scale: float = 1.0, loss: float = 0.0, cosine: float = 0.0, bad: int = 2, spread: float = 1.0
    ) -> StepRecord:
        self.number += 1
        losses = 2.0 + 0.2 * spread * self.random.standard_normal(self.ranks)
        norms = np.exp(0.16 * spread * self.random.standard_normal(self.ranks))
        cosines = 0.1 + 0.03 * spread * self.random.standard_normal(self.ranks)
        bad %= self.ranks
        losses[bad] += loss
        norms[bad] *= scale
        cosines[bad] += cosine
        return make(self.number, losses, norms, cosines, noise=100 + 20 * self.random.standard_normal())

    def steps(self, count: int, extras: Evidence = NOTHING, **fault: float) -> list[Event]:
        events = []
        for _ in range(count):
            events += self.judge.step(self.record(**fault), extras)  # type: ignore[arg-type]
        return events

    def until_event(self, limit: int, **fault: float) -> tuple[int, Event]:
        for step in range(1, limit + 1):
            events = [e for e in self.steps(1, **fault) if not e.message.startswith("Still")]
            if events:
                return step, events[0]
        raise AssertionError(f"nothing found in {limit} steps")


def make(step: int, losses, norms, cosines, noise: float | None = 100.0, matrix=None) -> StepRecord:  # type: ignore[no-untyped-def]
    losses, norms, cosines = (np.asarray(v, dtype=float) for v in (losses, norms, cosines))
    with np.errstate(all="ignore"):
        return StepRecord(
            step=step,
            samples=step * 4 * len(losses),
            epoch=None,
            world_size=len(losses),
            loss=LossStats(float(losses.mean()), float(losses.std()), 0.0, tuple(losses.tolist())),
            grad_norm=GradNormStats(
                "exact", float(norms.mean()), 0.1, float(norms.std() / norms.mean()), 0.0, 0.6, tuple(norms.tolist())
            ),
            direction=DirectionStats("sketch", float(cosines.mean()), 0.004, per_rank=tuple(cosines.tolist())),
            noise_scale=noise,
            cosine_matrix=matrix,
        )


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


def ids(pairs: dict[tuple[int, int], int], rows: int = 4, ranks: int = 4) -> Evidence:
    return Evidence(duplicates=pairs, rows_per_rank=(rows,) * ranks)


def comparison_of(judge: Judge) -> RankComparison:
    """The judge's comparison of the ranks."""
    return next(detector for detector in judge._detectors if isinstance(detector, RankComparison))
