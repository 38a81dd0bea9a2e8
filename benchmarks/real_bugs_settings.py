"""What real_bugs.py trains in every version of DeepSpeed, and what it writes down of each training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Setting:
    """One training."""

    stage: int = 2
    dtype: str = "fp32"
    accumulation: int = 4
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        options = [
            key.replace("offload_optimizer", "offload")
            + ("" if value is True else f" {value}").replace(" False", " false")
            for key, value in self.zero.items()
            if not isinstance(value, dict)
        ]
        options += [key for key, value in self.zero.items() if isinstance(value, dict)]
        options += [f"{key} {value}" for inner in self.top.values() for key, value in inner.items()]
        return ", ".join((f"ZeRO-{self.stage} {self.dtype} x{self.accumulation}", *options))


@dataclass(frozen=True)
class Outcome:
    """What one training showed, on rank 0."""

    setting: str
    relative_error: float | None = None  # record.integrity of the first step
    rounding_bound: float | None = None
    event: str | None = None  # the first about a result
    step: int | None = None
    told: tuple[str, ...] = ()  # messages of all such events, as "step: message"
    applied: tuple[float, ...] = ()  # per step: |applied - true mean| / |true mean| by plain torch
    length: float | None = None  # first step: |applied| / |true mean|
    cosine: float | None = None
    unobserved: tuple[float, ...] = ()  # as ``applied``, of the same training without ds_silent, where it was wrong
    failure: str = ""  # DeepSpeed itself refused or broke


KNOWN = (Setting(), Setting(dtype="bf16"))
_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
_OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
SURVEY = (
    *(
        Setting(stage, dtype, accumulation)
        for stage in range(4)
        for dtype in ("fp32", "bf16")
        for accumulation in (1, 4)
    ),
    *(Setting(stage, "bf16", 2, top=_FP32) for stage in (1, 2)),
    *(
        Setting(stage, "fp32", accumulation, zero)
        for stage in (1, 2)
        for accumulation in (1, 4)
        for zero in (
            {"overlap_comm": True},
            {"contiguous_gradients": False},
            {"contiguous_gradients": False, "overlap_comm": True},
            {"reduce_scatter": False},
            {"round_robin_gradients": True},
            _OFFLOAD,
        )
    ),
    Setting(3, "fp32", 4, {"overlap_comm": True}),
    Setting(3, "fp32", 4, {"contiguous_gradients": False}),
    Setting(3, "fp32", 4, _OFFLOAD),
)
