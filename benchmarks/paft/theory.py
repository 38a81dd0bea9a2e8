"""How far replicas drift apart, for plain SGD under PAFT's error model.

theta_m <- theta_m - eta (g + eps_m): the averaged gradient g is the same number on every rank, so it cancels in
Delta_m = theta_m - mean theta, which is a random walk of eps_m - mean eps, of variance sigma^2 (M - 1) / M. So

    E |Delta_m|^2 = (sum of eta^2 since the last averaging) sigma^2 d (M - 1) / M

without any approximation. With momentum an error is applied again and again, and this is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence


def expected_divergence(
    rates: Sequence[float], variance: float, elements: int, ranks: int, period: int | None
) -> list[float]:
    """E |Delta_m|^2 after each step.

    Args:
        rates: learning rate of each step.
        variance: sigma^2, per element.
        elements: d, of the parameters together.
        ranks: M.
        period: H, steps between two averagings, each at the end of its step; None is never.
    """
    curve, squares = [], 0.0
    for step, rate in enumerate(rates, start=1):
        squares = 0.0 if period is not None and step % period == 0 else squares + rate**2
        curve.append(squares * variance * elements * (ranks - 1) / ranks)
    return curve
