"""What a comparison found: one sentence, the fields that programs read, and the table behind it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from ds_silent.comparison.defaults import SettingDifference, explaining
from ds_silent.text import one_line

Link = Literal["settings", "rows", "weights", "loss", "local", "reduced", "applied", "update", "rates"]
LINKS: tuple[Link, ...] = get_args(Link)
"""The chain of one step, in the order in which a training computes it."""
PHRASES: dict[str, str] = {
    link: f"{link} gradient" if link in ("local", "reduced", "applied") else link for link in LINKS
}
"""Each link, as sentences name it."""


State = Literal["equal", "rounding", "parts", "follows", "unknown"]


@dataclass(frozen=True)
class LinkResult:
    """One link over all steps that were compared.

    Attributes:
        state: equal, rounding (within it), parts (here first), follows (later, or behind it) or unknown.
        compared: steps; ``equal``: those of them without any difference.
        step: of A, at which it parts first; None where it does not.
        largest: relative difference, up to the parting.
        share: the largest of what was allowed, up to the parting.
        curve: step of A, relative difference and what was allowed, of each step that was compared.
    """

    link: str
    state: State
    compared: int
    equal: int
    step: int | None
    largest: float
    share: float
    curve: tuple[tuple[int, float, float], ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class TrainingComparison:
    """Two trainings, compared.

    Attributes:
        parted: whether they are two trainings, and not one that rounds otherwise.
        step: of A, at which they part first.
        layer: the first that parts, in the order of computation; None where no layer is meant, as for rows.
        link: the first link of the chain that parts at that step.
        factor: of B over A, where the one is a multiple of the other.
        cause: what the numbers, the settings and the rows say of it.
        left_out: sentences, each on what was not compared.
        layers: all that part at that step, in the order of computation.
        first, last, compared: steps of A, and how many.
        equal_until: the last step up to which every number is the same; None where the first differs.
        settings, versions: in which the two differ.
        beyond: those sentences of ``left_out`` that are on whole steps.
        sentence: the answer.
    """

    parted: bool
    step: int | None
    layer: str | None
    link: Link | None
    factor: float | None
    cause: str | None
    left_out: tuple[str, ...]
    layers: tuple[str, ...] = ()
    step_of_b: int | None = None
    paired_by: str = "number"
    first: int = 0
    last: int = 0
    compared: int = 0
    equal_until: int | None = None
    blind_from: int | None = None
    links: tuple[LinkResult, ...] = ()
    settings: tuple[SettingDifference, ...] = ()
    versions: tuple[str, ...] = ()
    a: str = ""
    b: str = ""
    beyond: tuple[str, ...] = ()
    sentence: str = field(default="", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sentence", one_line(self._parted() if self.parted else self._together()))

    def _parted(self) -> str:
        more = f" and {len(self.layers) - 1} more" if len(self.layers) > 1 else ""
        where = f", in layer {self.layer}{more}," if self.layers else ""
        step = f"step {self.step}"
        if self.step_of_b is not None and self.step_of_b != self.step:
            step += f" ({self.step_of_b} of B)"
        if self.link == "settings":
            return f"The trainings part before {step}, in the settings: {self.cause}."
        return f"The trainings part at {step}{where} at the {PHRASES[self.link or 'rows']}: {self.cause}."

    def _together(self) -> str:
        left_out = f"; left out: {', '.join(self.beyond)}" if self.beyond else ""
        steps = f"{self.compared} step{'s' * (self.compared != 1)} ({self.first} to {self.last})"
        if self.equal_until == self.last:
            return f"The trainings do not part: {steps} with every number the same{left_out}."
        same = f", the same in every number up to step {self.equal_until}" if self.equal_until is not None else ""
        grown = ""
        if self.blind_from is not None and self.blind_from <= self.last:
            grown = f"; from step {self.blind_from} on rounding has grown too large to judge gradients by"
        return f"The trainings do not part: {steps} agree within rounding{same}{grown}{self._though()}{left_out}."

    def _though(self) -> str:
        """Name the setting that differs and could have parted them, the earliest link's first."""
        others = [one for one in self.settings if not one.shares and not one.foreign]
        if not others:
            return ""
        first = next(filter(None, (explaining(link, others) for link in LINKS)), others[0])
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        return f"; a setting differs{more}: {first.sentence}"
