"""Compare the log probabilities that another engine gives one batch's tokens with the trainer's.

    gap = log_probability_gap(fp32, trainer, engine)     # each (rows, tokens): of the same tokens
    gap.verdict, gap.ratio, gap.low, gap.high, gap.sentence

A rollout engine has kernels of its own, so its numbers are never the trainer's to the bit. The yardstick is what the
training's own precision costs: with g = trainer - fp32 and h = engine - fp32, the ratio is rms(h) / rms(g) over all
tokens. An engine with the trainer's weights and precision has a ratio of about 1. Tokens of a row depend on each
other, so the interval is from a bootstrap over rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

FEWEST_ROWS = 8
"""Below them a bootstrap over rows would say more than the rows know."""
_DRAWS = 4000
_LEVEL = 0.95


@dataclass(frozen=True)
class LogProbabilityGap:
    """What another engine's log probabilities differ by, in units of what the training's precision costs.

    Attributes:
        ratio: rms(engine - fp32) / rms(trainer - fp32).
        low, high: of its 95 % interval.
        bias: mean of engine - trainer, in nats per token; a wrong temperature or template shows here.
        limit: the ratio up to which a gap is what the precision explains.
        rows, tokens: that were compared.
    """

    ratio: float
    low: float
    high: float
    bias: float
    limit: float
    rows: int
    tokens: int

    @property
    def verdict(self) -> Literal["within the precision", "beyond the precision", "more rows are needed"]:
        """Return what the interval says against the limit."""
        if self.low > self.limit:
            return "beyond the precision"
        return "within the precision" if self.high <= self.limit else "more rows are needed"

    @property
    def sentence(self) -> str:
        """Return the verdict with its numbers and, beyond the precision, what to do."""
        what = (
            f"The engine's log probabilities differ from fp32 by {self.ratio:.3g} times what the training's precision "
            f"costs (95 % interval {self.low:.3g} to {self.high:.3g}, {self.rows} rows, {self.tokens} tokens)"
        )
        ends = {
            "within the precision": f": this is within its limit of {self.limit:g}.",
            "more rows are needed": f": more rows are needed to tell it from the limit of {self.limit:g}.",
            "beyond the precision": f", above the limit of {self.limit:g}: other weights, another precision "
            "or other code. Compare the weights with ds_silent.fingerprint first.",
        }
        return what + ends[self.verdict]


def log_probability_gap(
    fp32: Any, trainer: Any, engine: Any, mask: Any = None, *, limit: float = 1.5, seed: int = 0
) -> LogProbabilityGap:
    """Tell whether another engine's log probabilities are the trainer's, up to the training's precision.

    Args:
        fp32: log probabilities of one batch's tokens, (rows, tokens), in nats: a tensor, an array or lists; of the
            trainer's weights in fp32.
        trainer: the same of the trainer as it trains, in bf16 or fp16; the yardstick.
        engine: the same of the other engine.
        mask: (rows, tokens), true where a token counts; None: all.
        limit: ratio up to which a gap is what the precision explains; above 1.
        seed: of the bootstrap.

    Raises:
        ValueError: shapes differ, there are too few rows, a number is not finite, or the trainer is fp32 itself; one
            sentence.
    """
    given = {"fp32": _array(fp32), "trainer": _array(trainer), "engine": _array(engine)}
    shape = given["fp32"].shape
    keep = np.ones(shape, bool) if mask is None else _array(mask) != 0
    for name, values in (*given.items(), ("mask", keep)):
        if values.ndim != 2 or values.shape != shape:
            raise ValueError(f"{name} must be (rows, tokens) as fp32 is, {shape}, got {values.shape}")
        if not np.isfinite(values[keep] if name != "mask" else values).all():
            raise ValueError(f"{name} must be finite where the mask is true; leave such tokens out by the mask")
    if not limit > 1.0:
        raise ValueError(f"limit must be above 1, got {limit}")
    rows = int(keep.any(1).sum())
    if rows < FEWEST_ROWS:
        raise ValueError(f"the batch must have at least {FEWEST_ROWS} rows with tokens that count, got {rows}")
    base, own, other = (np.where(keep, values, 0.0) for values in given.values())
    own, other = own - base, other - base
    squares = np.stack(((other**2).sum(1), (own**2).sum(1)), 1)[keep.any(1)]
    if squares[:, 1].sum() == 0.0:
        raise ValueError("trainer must differ from fp32, got equal numbers; give those of the dtype that it trains in")
    drawn = np.random.default_rng(seed).integers(rows, size=(_DRAWS, rows))
    totals = squares[drawn].sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.sqrt(totals[:, 0] / totals[:, 1])
    low, high = np.quantile(ratios[~np.isnan(ratios)], ((1 - _LEVEL) / 2, (1 + _LEVEL) / 2)).tolist()
    ratio = float(np.sqrt(squares[:, 0].sum() / squares[:, 1].sum()))
    bias = float((other - own).sum() / keep.sum())
    return LogProbabilityGap(ratio, low, high, bias, limit, rows, int(keep.sum()))


def _array(values: Any) -> npt.NDArray[np.float64]:
    """Copy to the host in float64; of a tensor without importing torch."""
    if hasattr(values, "detach"):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, dtype=np.float64)
