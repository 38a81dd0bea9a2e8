"""Tests of trainings: two must be the same training, whatever their ranks.

    from ds_silent.testing import assert_same_training

    def test_the_upgrade_trains_as_before():
        assert_same_training("runs/golden", "runs/new")

With ``pytest_plugins = ["ds_silent.testing"]`` in a ``conftest.py`` it is a fixture too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from ds_silent.comparison import TrainingComparison, compare

__all__ = ["assert_same_training"]
Run = str | os.PathLike[str]


def assert_same_training(a: Run, b: Run, tolerance: float | None = None) -> TrainingComparison:
    """Compare two runs by their traces.

    Args:
        a, b: a run's directory (its ``output_dir``) or its ``trace.jsonl``.
        tolerance: relative difference that is allowed at the first step, where it is more than rounding's bound.

    Returns:
        the comparison, of trainings that do not part.

    Raises:
        AssertionError: they part; the message says where and why.
        ds_silent.comparison.TraceError, ds_silent.comparison.ComparisonError: there is nothing to compare.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    found = compare(a, b, tolerance=tolerance)
    if found.parted:
        raise AssertionError(found.sentence)
    return found


with contextlib.suppress(ImportError):  # who asserts without pytest needs none
    import pytest

    @pytest.fixture(name="assert_same_training")
    def same_training() -> Callable[..., TrainingComparison]:
        """Give a test :func:`assert_same_training`."""
        return assert_same_training
