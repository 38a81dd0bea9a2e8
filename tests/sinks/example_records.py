"""Records that the tests of the sinks write."""

from __future__ import annotations

from ds_silent.records import (
    CoverageStats,
    DirectionStats,
    Event,
    GradNormStats,
    IntegrityStats,
    LayerStats,
    LossStats,
    ObjectiveStats,
    Seconds,
    StepRecord,
)


def full_record(step: int = 12, ranks: int = 4, **changes: object) -> StepRecord:
    """A record with everything measured; every number in it differs from every other."""
    record = {
        "step": step,
        "samples": 64 * step,
        "epoch": 0.01 * step,
        "world_size": ranks,
        "loss": LossStats(2.31, 0.18, 0.52, tuple(2.0 + 0.1 * rank for rank in range(ranks))),
        "grad_norm": GradNormStats(
            "exact", 1.02, 0.16, 0.157, 0.41, 0.61, tuple(0.9 + 0.01 * rank for rank in range(ranks))
        ),
        "direction": DirectionStats(
            "sketch", 0.041, 0.004, -0.011, 0.091, (0, 1), (1, 2), tuple(0.05 + 0.001 * rank for rank in range(ranks))
        ),
        "noise_scale": 310.25,
        "coverage": CoverageStats(3, 0.25, 0.0625),
        "integrity": IntegrityStats(1e-7, 2e-6, ((0, 1), (2, 3))),
        "objective": ObjectiveStats(1.0625, 0.0019, 0.0021, 517, True, 2.125, 0.25),
        "seconds": Seconds(0.3, 0.002),
        "cosine_matrix": tuple(tuple(1.0 if i == j else 0.04 for j in range(ranks)) for i in range(ranks)),
        "layers": (LayerStats("model.layers.0", 0.7, 0.07, 0.33, 0.02), LayerStats("lm_head", 0.8, 0.08, 0.44, 0.03)),
        "exact_check": 0.0015,
    }
    return StepRecord(**{**record, **changes})  # type: ignore[arg-type]


def empty_record(step: int = 1, ranks: int = 2) -> StepRecord:
    """A record in which nothing was measured."""
    return StepRecord(step=step, samples=step, epoch=None, world_size=ranks)


def event(step: int = 12, kind: str = "duplicate-data", ranks: tuple[int, ...] = (0, 3), message: str = "") -> Event:
    return Event(
        step=step,
        kind=kind,
        severity="error",
        ranks=ranks,
        where="train_loader",
        score=8.5,
        threshold=6.0,
        message=message or "These ranks read the same rows.",
        remedy="Give each rank its own sampler.",
    )
