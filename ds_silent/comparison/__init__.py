"""Where two trainings part: the first step, layer and link of the chain, from their traces.

    found = compare("runs/a", "runs/b")
    found.sentence                               # the answer
    found.parted, found.step, found.layer, found.link, found.factor, found.cause, found.left_out

The chain of a step: rows, weights in use, loss, local gradient, reduced gradient, what the optimizer applies of it,
its update, and the rates. Numbers that are equal are equal; the others are judged by what rounding explains
(:mod:`ds_silent.comparison.judgement`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

import numpy as np

from ds_silent.comparison.defaults import setting_differences, version_differences
from ds_silent.comparison.differences import Differences, differences
from ds_silent.comparison.explanation import LOOKED_BEHIND, Case, explain
from ds_silent.comparison.judgement import ChainJudge
from ds_silent.comparison.levels import Parting, Repetition, bounds_of
from ds_silent.comparison.matching import ComparisonError, Pairs, pair_tensors
from ds_silent.comparison.result import LINKS, LinkResult, State, TrainingComparison
from ds_silent.trace import Head, Step, Trace, TraceError, read_trace

__all__ = ["ComparisonError", "TraceError", "TrainingComparison", "compare"]

AFTERWARDS = 5
"""Steps that are looked at behind the one that parts, for what follows."""
Run = str | os.PathLike[str]


def compare(
    a: Run,
    b: Run,
    repetition: Run | None = None,
    *,
    tolerance: float | None = None,
    names: Mapping[str, str] | Run | None = None,
) -> TrainingComparison:
    """Compare two trainings, step by step, until they part.

    Args:
        a: a run's directory (its ``output_dir``) or its ``trace.jsonl``.
        b: the other run's.
        repetition: another run of A's training: how far it is from A takes the place of the growth of rounding.
        tolerance: relative difference that is allowed at the first step, where it is more than rounding's bound.
        names: tensors of A and their names in B, or a JSON file of them; a name stands for all below it too.

    Returns:
        the comparison; nothing is raised where they part.

    Raises:
        TraceError, ComparisonError: what was given cannot be compared; the message is one sentence.
    """
    if tolerance is not None and not 0.0 <= tolerance < 1.0:
        raise ComparisonError(f"tolerance must be a relative difference from 0 to below 1, got {tolerance}")
    traces = read_trace(Path(a)), read_trace(Path(b))
    third = None if repetition is None else read_trace(Path(repetition))
    known = names if isinstance(names, Mapping) else {} if names is None else read_names(names)
    return _Comparer(traces, third, tolerance, known).result()


def read_names(path: Run) -> dict[str, str]:
    """Read a map of names; ComparisonError where it is not {"name in A": "name in B"}."""
    shown = ascii(os.fspath(path))
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ComparisonError(f"the map {shown} cannot be read ({error.strerror}); check its path") from None
    except (ValueError, RecursionError):
        raise ComparisonError(f'the map {shown} is not JSON; write {{"name in A": "name in B"}}') from None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ComparisonError(f'the map {shown} is no object of names; write {{"name in A": "name in B"}}')
    return found


class _Comparer:
    """One comparison under way."""

    def __init__(
        self, traces: tuple[Trace, Trace], third: Trace | None, tolerance: float | None, names: Mapping[str, str]
    ):
        self.traces, self.third = traces, third
        self.steps, self.heads, self.pairs = _paired(traces, names)
        self.bounds = bounds_of(*self.heads, tolerance)
        self.settings = setting_differences(*self.heads)
        self.equal_until: int | None = None
        self._ended = ""
        self.compared = 0

    def result(self) -> TrainingComparison:
        """Judge all steps, up to a few behind the one that parts."""
        repetition = None if self.third is None else _Followed(self, self.third)
        judge = ChainJudge(self.bounds, self.pairs, None if repetition is None else repetition.allowed)
        if not self.pairs.tensors:  # a map of names is all that could help
            step, left_out = self.steps.steps[0][0], (*self.pairs.left_out, *self.steps.left_out)
            cause = "the models have no tensor in common; name counterparts with --map"
            return TrainingComparison(True, step, None, "settings", None, cause, left_out, settings=self.settings)
        case: Case | None = None
        before: Differences | None = None
        different, behind, last = False, 0, self.steps.steps[0][0]
        for number, (apart, after) in enumerate(pairwise(chain(self._differences(), (None,)))):
            assert apart is not None  # the end comes last
            if repetition is not None:
                repetition.until(apart.a.step)
            loaded = _loaded(before, apart)
            findings = judge.step(apart, number == 0, bool(loaded), after)
            self.compared, last, before = self.compared + 1, apart.a.step, apart
            different = different or not _equal(apart)
            if not different:
                self.equal_until = apart.a.step
            if findings and case is None:
                case = self._case(findings[0], apart, loaded if findings[0].link == "weights" else "", number)
            behind += case is not None
            if behind > AFTERWARDS:
                break
        if case is None and (leaning := judge.past.bias()) is not None:
            apart = next(one for one in self._differences() if one.a.step == leaning.step)
            case = self._case(leaning, apart, "", 0)
        return self._comparison(judge, case, last)

    def _case(self, finding: Parting, apart: Differences, loaded: str, number: int) -> Case:
        held = self.pairs, self.bounds, self.heads, self.traces, self.settings
        later = self.steps.steps[number + 1 : number + 1 + LOOKED_BEHIND]
        return Case(finding, apart, *held, loaded, number == 0, number <= 1, later)

    def _differences(self) -> Iterator[Differences]:
        begin = one, other = _read(self.traces, self.steps.steps[0])
        for after in (*self.steps.steps[1:], None):
            next_a, next_b = (None, None) if after is None else _read(self.traces, after)
            if next_a is not None and next_b is not None and not (_like(next_a, begin[0]) and _like(next_b, begin[1])):
                self._ended = f"step {next_a.step} and later ones: one of the two went on with other parameters"
                next_a = next_b = None
            loads = next_a is None or next_b is None or next_a.head is not one.head or next_b.head is not other.head
            moved = (None, None) if loads else (next_a, next_b)  # a checkpoint is no update
            yield differences(self.pairs, begin, one, other, *moved, self.bounds.factor)
            if next_a is None or next_b is None:
                return
            one, other = next_a, next_b

    def _comparison(self, judge: ChainJudge, case: Case | None, last: int) -> TrainingComparison:
        cause, factor, layers = (None, None, ()) if case is None else explain(case)
        link = None if case is None else case.parting.link
        step = None if case is None else case.apart.a.step
        return TrainingComparison(
            case is not None,
            step,
            layers[0] if layers else None,
            link,  # type: ignore[arg-type]  # one of them
            factor,
            cause,
            (*self.pairs.left_out, *self.steps.left_out, *self._unknown(judge)),
            layers,
            None if case is None else case.apart.b.step,
            self.steps.by,
            self.steps.steps[0][0],
            last,
            self.compared,
            self.equal_until,
            judge.blind,
            tuple(_link(name, judge, link, step) for name in LINKS[1:]),
            self.settings,
            version_differences(*self.heads),
            os.fspath(self.traces[0].path),
            os.fspath(self.traces[1].path),
            self.steps.left_out,
        )

    def _unknown(self, judge: ChainJudge) -> Iterator[str]:
        missing = [name for name in LINKS[1:] if name not in judge.summaries]
        if missing:
            yield f"{', '.join(missing)}: not in both traces"
        if self._ended:
            yield self._ended
        if judge.tipped:
            steps = ", ".join(map(str, judge.tipped[:5]))
            yield f"step {steps}: a small difference that was gone at the next, as a choice tipped by rounding makes"
        if judge.past.unstable:
            names = [self.pairs.tensors[place].name for place in sorted(judge.past.unstable)]
            yield f"updates of {', '.join(names[:3])}{' and more' * (len(names) > 3)}: nothing but rounding moves them"


class _Followed(Repetition):
    """A repetition that is read up to the step that is judged."""

    def __init__(self, comparer: _Comparer, third: Trace):
        super().__init__(comparer.bounds)
        self._traces = comparer.traces[0], third
        steps, _, self._pairs = _paired(self._traces, {})
        self._todo = list(steps.steps)
        layers = {one.a: place for place, one in enumerate(self._pairs.layers)}
        tensors = {one.name: place for place, one in enumerate(self._pairs.tensors)}
        self._layers = [layers.get(one.a, -1) for one in comparer.pairs.layers]
        self._tensors = [tensors.get(one.name, -1) for one in comparer.pairs.tensors]

    def until(self, step: int) -> None:
        """Take in the repetition's steps up to this one."""
        while self._todo and self._todo[0][0] <= step:
            begin = one, other = _read(self._traces, self._todo.pop(0))
            next_a, next_b = _read(self._traces, self._todo[0]) if self._todo else (None, None)
            apart = differences(self._pairs, begin, one, other, next_a, next_b, self.bounds.factor)
            if apart.loss is not None:
                self.learn("loss", np.array([apart.loss]))
            for link, gradient in (("local", apart.local), ("reduced", apart.reduced)):
                if gradient is not None:
                    values = np.append(gradient.relative, np.median(gradient.relative))
                    self.learn(link, values[self._layers])
            if apart.update is not None:
                moved = np.nan_to_num(apart.update.relative)
                self.learn("update", np.append(moved, np.median(moved))[self._tensors])


def _paired(traces: tuple[Trace, Trace], names: Mapping[str, str]) -> tuple[StepPairs, tuple[Head, Head], Pairs]:
    """Pair the steps, and the tensors as the first of them has them."""
    steps = pair_steps(*traces)
    one, other = _read(traces, steps.steps[0])
    heads = _head(one), _head(other)
    return steps, heads, pair_tensors(*heads, one.weights, other.weights, names)


def _read(traces: tuple[Trace, Trace], steps: tuple[int, int]) -> tuple[Step, Step]:
    return traces[0].at(steps[0]), traces[1].at(steps[1])


def _loaded(before: Differences | None, apart: Differences) -> str:
    """Which of the two went on from a checkpoint between the last pair of steps and this."""
    if before is None:
        return ""
    pairs = (("A", before.a, apart.a), ("B", before.b, apart.b))
    return " and ".join(name for name, then, now in pairs if then.head is not now.head)


def _like(step: Step, first: Step) -> bool:
    """Whether a step behind a restart has the parameters of the first, in their order."""
    return step.head is first.head or _head(step).tensors == _head(first).tensors


def _head(step: Step) -> Head:
    assert step.head is not None
    return step.head


def _equal(apart: Differences) -> bool:
    """Whether no number differs at all."""
    gradients = [one.relative for one in (apart.local, apart.reduced) if one is not None]
    return (
        apart.rows is not False
        and apart.rates is not False
        and not apart.loss
        and not any(one.any() for one in gradients)
        and (apart.weights is None or not np.nan_to_num(apart.weights).any())
        and (apart.a.applied is None or apart.b.applied is None or apart.a.applied.factor == apart.b.applied.factor)
    )


def _link(name: str, judge: ChainJudge, first: str | None, step: int | None) -> LinkResult:
    summary = judge.summaries.get(name)
    if summary is None:
        return LinkResult(name, "unknown", 0, 0, None, 0.0, 0.0)
    state: State = "equal" if summary.equal == summary.compared else "rounding"
    parted = summary.parted
    if name == first:
        state, parted = "parts", step
    elif parted is not None:
        state = "follows"
    curve = tuple(summary.curve)
    return LinkResult(name, state, summary.compared, summary.equal, parted, summary.largest, summary.share, curve)


# -- steps -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepPairs:
    """Steps of A and of B, in their order."""

    steps: tuple[tuple[int, int], ...]
    by: str  # number, samples
    left_out: tuple[str, ...]


def pair_steps(a: Trace, b: Trace) -> StepPairs:
    """Pair steps by their number; where the first have consumed other numbers of rows, by the rows consumed.

    Raises ComparisonError where there is no step that both have.
    """
    steps, by = [(n, n) for n in sorted(set(a.steps) & set(b.steps))], "number"
    first = {trace.at(steps[0][0]).samples for trace in (a, b)} - {None} if steps else set()
    if not steps or len(first) == 2:  # a later step with another number is another step of rows
        consumed = [{one.samples: one.step for one in trace if one.samples is not None} for trace in (a, b)]
        both = sorted(set(consumed[0]) & set(consumed[1]))
        if len(both) >= max(1, len(steps) // 2):
            steps, by = [(consumed[0][samples], consumed[1][samples]) for samples in both], "samples"
    if not steps:
        extents = f"{_extent(a)} in A, {_extent(b)} in B"
        raise ComparisonError(f"A and B have no step in common: {extents}; trace the same steps")
    return StepPairs(tuple(steps), by, _beyond(a, b, len(steps)))


def _beyond(a: Trace, b: Trace, used: int) -> tuple[str, ...]:
    found = []
    for trace, name, other in ((a, "A", "B"), (b, "B", "A")):
        if more := len(trace) - used:
            found.append(f"{more} step{'s' * (more != 1)} of {name} that {other} has not")
        if trace.skipped:
            found.append(f"{trace.skipped} torn or foreign line{'s' * (trace.skipped != 1)} of {name}'s trace")
    return tuple(found)


def _extent(trace: Trace) -> str:
    return f"steps {trace.steps[0]} to {trace.steps[-1]}" if trace.steps else "none"
