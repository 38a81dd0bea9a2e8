"""What a framework answers alike whose training script writes the loop: nobody but the adapter counts its steps.

class Framework(CountsItself):
    def __init__(self):
        self._counts, self._data_ranks = StepCounts(), 4
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class StepCounts:
    """On this rank."""

    step: int = 1  # the optimizer step under way
    rows: int = 0  # consumed until the last step
    batch: int = 0  # rows of the step that was taken last
    skipped: bool = False  # the optimizer left that step out, for infinities
    left_out: bool = False  # the script did, by clearing its gradient

    def take(self, rows: int, skipped: bool, left_out: bool = False) -> None:
        """A step of that many rows has been taken, or left out."""
        self.step, self.rows, self.batch = self.step + 1, self.rows + rows, rows
        self.skipped, self.left_out = skipped, left_out


class CountsItself:
    """Members of :class:`ds_silent.framework.Framework` and :class:`~ds_silent.framework.Counts`."""

    _counts: StepCounts
    _data_ranks: int  # that consume rows of their own

    @property
    def step(self) -> int:
        return self._counts.step

    @property
    def samples(self) -> int:
        return self._counts.rows * self._data_ranks

    @property
    def batch(self) -> float:
        return float(self._counts.batch)

    @property
    def update_skipped(self) -> bool:
        return self._counts.skipped or self._counts.left_out

    @property
    def left_out(self) -> bool:
        return self._counts.left_out

    def skipped(self, applied: bool | None) -> bool:
        return self._counts.skipped

    def counted(self) -> dict[str, int]:
        return {"step": self._counts.step, "rows": self._counts.rows}

    def count_on(self, counted: dict[str, int]) -> None:
        self._counts.step, self._counts.rows = int(counted["step"]), int(counted["rows"])

    def scale(self, seen: Tensor | None) -> float | Tensor:
        return 1.0 if seen is None else seen

    def gram(self) -> Tensor | None:
        return None
