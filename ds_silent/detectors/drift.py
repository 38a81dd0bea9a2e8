"""The run against its own past: a jump of the noise scale or of a dispersion. Information, never an alarm.

z_t is the step's value against the median and the median absolute deviation of the ``WINDOW`` steps before it, so a
slow change, which every training has, is not seen. Evidence for a jump: L = exp(t z_t) / mean over the pool of earlier
z and z_t itself of exp(t z), expectation 1 when the z are exchangeable over time; accumulated as in ``sequential.py``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ds_silent.records import Event, StepRecord

WINDOW, POOL, CLIP = 64, 512, 4.0
_TILTS = np.array([1.0, 2.0, -1.0, -2.0])
_NAMES = ("noise scale", "loss dispersion", "gradient-norm dispersion")


class DriftTest:
    """Follows three numbers of one run.

    Args:
        log_threshold: log of the mean number of measured steps between false notes.
    """

    def __init__(self, log_threshold: float):
        self._threshold = log_threshold + math.log(len(_NAMES))
        self._series = {name: _empty() for name in _NAMES}

    def step(self, record: StepRecord) -> list[Event]:
        """At most one note per number; its past is forgotten then, so that each jump is told once."""
        values = (record.noise_scale, _log(record.loss.std), _log(record.grad_norm.cv))
        events = []
        for name, value in zip(_NAMES, values, strict=True):
            if value is None or not math.isfinite(value):
                continue
            series = self._series[name]
            note = self._weigh(series, value)
            if note is not None:
                before, after = (math.exp(v) if name != _NAMES[0] else v for v in note)
                message = f"The {name} jumped from about {before:.3g} to about {after:.3g}."
                remedy = "Look at what changed here: learning rate, data mixture, batch size, or a loss spike."
                score = self._score(series)
                events.append(Event(record.step, "drift", "info", (), name, score, self._threshold, message, remedy))
                self._series[name] = _empty()
        return events

    def _weigh(self, series: dict[str, list[float]], value: float) -> tuple[float, float] | None:
        past = np.array(series["past"])
        series["past"] = [*series["past"], value][-WINDOW:]
        if len(past) < WINDOW:
            return None
        centre = float(np.median(past))
        scale = max(1.4826 * float(np.median(np.abs(past - centre))), 1e-6 * abs(centre), 1e-12)
        z = float(np.clip((value - centre) / scale, -CLIP, CLIP))
        pool = np.array([*series["pool"], z])
        gain = _TILTS * z - np.log(np.exp(_TILTS[:, None] * pool).mean(axis=1))
        evidence = np.logaddexp(0.0, np.array(series["evidence"])) + gain
        series["evidence"], series["pool"] = evidence.tolist(), pool[-POOL:].tolist()
        return (centre, value) if self._score(series) >= self._threshold else None

    def _score(self, series: dict[str, list[float]]) -> float:
        return float(np.logaddexp.reduce(np.array(series["evidence"])) - math.log(len(_TILTS)))

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {name: {key: list(values) for key, values in series.items()} for name, series in self._series.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._series = {name: {key: list(values) for key, values in state[name].items()} for name in _NAMES}


def _empty() -> dict[str, list[float]]:
    # log 0 is written as a very small number, because JSON has no infinity
    return {"past": [], "pool": [], "evidence": [-700.0] * len(_TILTS)}


def _log(value: float | None) -> float | None:
    return math.log(value) if value is not None and 0.0 < value < math.inf else None
