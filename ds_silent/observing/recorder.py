"""Make a record of what was gathered, judge it, and hand record and events to the sinks; on the writing rank.

recorder = Recorder(sinks, config, checker, layout, members, words)
recorder.step(gathered, context, drift, log, wait=False)     # gathered(): once per measured step, in order
recorder.report(event)                                       # what others have found
recorder.ends                                                # the event that is to end the training, if any
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ds_silent.capture.untrained import Unlike
from ds_silent.config import SilentConsistencyConfig
from ds_silent.detectors import Judge
from ds_silent.detectors.lifecycle import ELSEWHERE, may_part
from ds_silent.distributed.places import Places, in_whole
from ds_silent.exchange.layout import Layout
from ds_silent.exchange.observation import Gathered
from ds_silent.measure.evidence import Evidence, ResponseLog
from ds_silent.measure.record import Context, measure, within_fp32
from ds_silent.measure.reduction_check import ReductionChecker, applied_partly
from ds_silent.measure.row_tracker import RowTracker, row_evidence
from ds_silent.records import Event, Repair, Severity, StepRecord, declared
from ds_silent.replicas.compare import Drift
from ds_silent.respond.repair_event import repair_event
from ds_silent.sinks import FanOut, Sink
from ds_silent.sinks.worker import OneTask
from ds_silent.text import TORCH, Words

logger = logging.getLogger("ds_silent")
_ENDS: dict[str, tuple[Severity, ...]] = {"never": (), "error": ("error",), "warning": ("error", "warning")}


class _Beside:
    """Run one act at a time, on a thread of its own where that is wanted, and call back on the training's thread.

    Attributes:
        task: the thread's; None where everything runs at once.
        listeners: what is called with each event.
    """

    def __init__(self, threaded: bool) -> None:
        self.task = OneTask("ds_silent judges") if threaded else None
        self.listeners: list[Callable[[Event], None]] = []
        self._found: deque[Event] = deque()  # beside the training; they wait for its thread
        self._calling = False

    def run(self, act: Callable[[], None]) -> None:
        """Begin an act, behind the one under way."""
        if self.task is None:
            act()
            return
        try:
            self.task.begin(act)
        finally:
            self.call()  # behind it: a callback that flushes begins the next step

    def wait(self) -> None:
        """Wait for what is under way: nothing else touches what is kept then."""
        try:
            if self.task is not None:
                self.task.wait()
        finally:
            self.call()

    def backward_begins(self) -> None:
        """Let what is under way begin: the training's thread leaves Python for a while."""
        if self.task is not None:
            self.task.opens()

    def deliver(self) -> None:
        """Call back, where nothing is under way."""
        if self.task is not None and self.task.is_done:
            self.wait()

    def end(self) -> None:
        """End the thread."""
        if self.task is not None:
            self.task.end()

    def found(self, event: Event) -> None:
        """Call back with an event, as soon as that may be."""
        if self.task is None:
            self._call_with(event)
        else:
            self._found.append(event)

    def call(self) -> None:
        """Call back with the events that wait."""
        if self._calling:  # a callback asks for something: what else was found comes after it
            return
        self._calling = True
        try:
            while self._found:
                self._call_with(self._found.popleft())
        finally:
            self._calling = False

    def _call_with(self, event: Event) -> None:
        for listener in self.listeners:
            try:
                listener(event)
            except Exception as error:  # somebody else's code, which must not end the observation
                logger.warning("ds_silent: an on_event callback failed: %s: %s", type(error).__name__, error)


class _Judgement:
    """Make a record of what was gathered, and judge it; keep what both need from step to step."""

    def __init__(
        self, config: SilentConsistencyConfig, checker: ReductionChecker, layout: Layout, words: Words, alike: bool
    ):
        self.checker, self._layout, self._alike = checker, layout, alike
        self._config, self._words = config, words
        self._told: list[Event] = []  # by others than the judge
        self._newest: int | None = None  # step of the record before
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what was learned, but not what others have told."""
        config, detectors = self._config, self._config.detectors
        judge = Judge(detectors, config.interval, self._words, self._alike, config.effects)
        self.judge = judge if detectors.enabled else None
        for event in self._told:
            judge.told(event)
        self._tracker = RowTracker()
        self._tracker.deal.declared = declared(detectors.dealt)
        self._newest = None

    def told(self, event: Event) -> None:
        """Take in a fault that the judge has not found; see :meth:`ds_silent.detectors.Judge.told`."""
        self._told.append(event)
        if self.judge is not None:
            self.judge.told(event)

    def measured(
        self, gathered: Gathered, context: Context, drift: Drift | None, log: ResponseLog, unlike: tuple[Unlike, ...]
    ) -> tuple[StepRecord, Evidence]:
        """Return the record, and what is to be judged; see :meth:`Recorder.step`."""
        if self._newest is not None and gathered.step <= self._newest:
            said = "ds_silent: after step %d comes step %d again, and no observer's state with it: judging starts anew"
            logger.warning(said, self._newest, gathered.step)
            self.begin_anew()
        self._newest = gathered.step
        gathered = within_fp32(gathered)
        record = measure(gathered, self._layout, context)
        coverage, evidence = row_evidence(gathered, self._tracker, context)
        stats, reduction = self.checker.step(gathered, drift, log)
        record = replace(record, coverage=coverage, integrity=stats, data=self._tracker.deal.newest)
        if stats.relative_error is None and applied_partly(gathered):
            record = replace(record, grad_norm=replace(record.grad_norm, aggregated=None))
        if not self._alike:  # it compares gradients of one rank's rows with those of all
            record = replace(record, noise_scale=None)
        if context.trace is not None:
            record = replace(record, traced=context.trace(gathered, record, context))
        return record, replace(evidence, reduction=reduction, unlike=unlike)

    def state_dict(self, rows_waiting: bool) -> dict[str, Any]:
        """JSON values, for a checkpoint."""
        judge = None if self.judge is None else self.judge.state_dict()
        return {"rows": self._tracker.state_dict(rows_waiting), "judge": judge}

    def load_state_dict(self, state: dict[str, Any], ranks: int) -> int | None:
        """Continue from :meth:`state_dict`; return how many ranks it was of, where that is another number."""
        self.begin_anew()  # in the middle of a training something was learned since
        try:
            if "rows" in state:
                self._tracker.load_state_dict(state["rows"])
            if self.judge is not None and state.get("judge") is not None:
                before = int(state["ranks"])
                if before != ranks:
                    return before
                self.judge.load_state_dict(state["judge"])
        except Exception as error:  # whatever is damaged
            why = error if isinstance(error, ValueError) else f"it is damaged ({error!r})"
            logger.warning("ds_silent: the observer's state in the checkpoint is not used: %s", why)
            self.begin_anew()
        return None


class Recorder:
    """Record and judge what an observer reports; on the ranks that do not write, without a sink, do nothing.

    With ``beside`` a step is judged on a thread of its own until the next measured step; whatever is asked earlier
    waits for it. So what is found does not depend on timing. Callbacks run on the training's thread, between two steps.

    Attributes:
        writes: whether this is the rank that writes.
        ends: the event that is to end the training; None while there is none.
        unlike: what ranks do not do alike, as all ranks have agreed when they came together last.
        places: where the ranks run, for the events; None where that cannot be said.
        deliver, backward_begins: see :class:`_Beside`.
    """

    def __init__(
        self,
        sink: Sink | None = None,
        config: SilentConsistencyConfig | None = None,
        checker: ReductionChecker | None = None,
        layout: Layout | None = None,
        members: Sequence[int] = (),  # of the group, as the whole training counts its ranks
        words: Words = TORCH,
        alike: bool = True,  # see ds_silent.framework.Framework.ranks_comparable
        beside: bool = False,
    ):
        self.writes = sink is not None
        self.ends: Event | None = None
        self.places: Places | None = None
        self.unlike: tuple[Unlike, ...] = ()
        self._sink = FanOut([]) if sink is None else sink
        self._judgement: _Judgement | None = None
        if sink is not None and config is not None and checker is not None and layout is not None:
            self._judgement = _Judgement(config, checker, layout, words, alike)
        self._members, self._ending = tuple(members), _ENDS["never" if config is None else config.detectors.stop_on]
        self._newest: StepRecord | None = None
        self._unjudged: list[tuple[StepRecord, Evidence]] = []  # wait for the tensors that differ, or behind such a one
        self._ranks_before: int | None = None  # of a checkpoint with another number, until that was said
        self._beside = _Beside(beside and self.writes)
        self.deliver, self.backward_begins = self._beside.deliver, self._beside.backward_begins
        self._parted, self._finished = False, (False, False)  # latched by finish(): wants_micro_batches, take_parted

    def step(
        self, gathered: Callable[[], Gathered], context: Context, drift: Drift | None, log: ResponseLog, wait: bool
    ) -> None:
        """Write one step's record and judge it; on the writing rank.

        Args:
            gathered: gives the observations of all ranks.
            context: what this rank has of the step by itself.
            drift: the tensors that differ between the replicas, where they were named.
            log: what the responses have found and done.
            wait: judge when :meth:`settle` brings the tensors.
        """
        self._beside.run(partial(self._write, gathered, context, drift, log, wait, self.unlike))

    def finish(self) -> None:
        """Wait for what is under way: a measured step is about to send what this rank wants."""
        if self._beside.task is not None:
            self._beside.wait()
            self._finished = self._wants_micro_batches, self._parted
            self._parted = False

    @property
    def _wants_micro_batches(self) -> bool:
        return self._judgement is not None and self._judgement.checker.wants_micro_batches

    @property
    def wants_micro_batches(self) -> bool:
        """Whether the sketches of single micro-batches would tell more."""
        return self._wants_micro_batches if self._beside.task is None else self._finished[0]

    def take_parted(self) -> bool:
        """Whether something was found, since this was asked last, that can part the replicas."""
        if self._beside.task is None:
            parted, self._parted = self._parted, False
        else:
            parted, self._finished = self._finished[1], (self._finished[0], False)
        return parted

    def _write(
        self,
        gathered: Callable[[], Gathered],
        context: Context,
        drift: Drift | None,
        log: ResponseLog,
        wait: bool,
        unlike: tuple[Unlike, ...],
    ) -> None:
        assert self._judgement is not None
        record, evidence = self._judgement.measured(gathered(), context, drift, log, unlike)
        self._newest = record
        self._sink.write(record)
        if self._ranks_before is not None:
            self._report(ranks_changed(record.step, self._ranks_before, len(self._members)))
            self._ranks_before = None
        if wait or self._unjudged:  # judged in order
            self._unjudged.append((record, evidence))
        else:
            self._judged(record, evidence)
        for repair in log.repairs:
            self._report(repair_event(repair, len(self._members)))

    def _judged(self, record: StepRecord, evidence: Evidence) -> None:
        judge = None if self._judgement is None else self._judgement.judge
        if judge is not None:
            events = judge.step(record, evidence)
            self._sink.write_scores(judge.scores)
            for event in events:
                self._report(event)

    def _report(self, event: Event) -> None:
        if not self.writes:
            return
        event = in_whole(event, self._members)
        event = event if self.places is None else self.places.told(event)
        if event.severity in self._ending:
            self.ends = event
        self._parted |= may_part(event)
        others = event.step == 0 or (event.severity == "error" and event.where in ELSEWHERE)
        if others and self._judgement is not None:  # of the preflight, of a resume
            self._judgement.told(event)
        self._sink.write_event(event)
        self._beside.found(event)

    @property
    def last_record(self) -> StepRecord | None:
        """The newest one."""
        self._beside.wait()
        return self._newest

    def settle(self, drift: Drift | None, step: int | None = None) -> None:
        """Judge the first record that waits, if it is of ``step``, with its ``drift``; or all, the tensors unnamed."""
        self._beside.wait()
        while self._unjudged and step in (None, self._unjudged[0][0].step):
            record, evidence = self._unjudged.pop(0)
            if drift is not None and evidence.reduction is not None:
                evidence = replace(evidence, reduction=replace(evidence.reduction, drift=drift))
            self._judged(record, evidence)
            if step is not None:
                break
        self._beside.call()

    def end_unlike(self, unlike: tuple[Unlike, ...], step: int) -> None:
        """Report what was found in the last observation of all, and not before."""
        self._beside.wait()
        judge = None if self._judgement is None else self._judgement.judge
        for event in [] if judge is None else judge.unlike(step, unlike):
            self._report(event)
        self._beside.call()

    def repairs(self, repairs: tuple[Repair, ...]) -> None:
        """Write what the responses have done."""
        self._beside.wait()
        for repair in repairs:
            self._report(repair_event(repair, len(self._members)))
        self._beside.call()

    def report(self, event: Event) -> None:
        """Write an event and call the callbacks, which find an error on disk."""
        try:
            self._beside.wait()
        finally:  # it may be about what broke there
            self._report(event)
            self._beside.call()

    def on_event(self, function: Callable[[Event], None]) -> None:
        """Call ``function(event)`` for every event from now on."""
        self._beside.wait()
        self._beside.listeners.append(function)

    def flush(self) -> None:
        """Return when everything written is on disk."""
        self._beside.wait()
        self._sink.flush()

    def close(self) -> None:
        """End the records."""
        try:
            self._beside.wait()
        finally:
            self._sink.close()
            self._beside.end()

    def state_dict(self, rows_waiting: bool) -> dict[str, Any]:
        """JSON values, for a checkpoint, whose records are on disk then; on the writing rank."""
        self.flush()
        assert self._judgement is not None
        return {**self._judgement.state_dict(rows_waiting), "ranks": len(self._members)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; an unreadable state is logged and ignored, and judging starts anew.

        What was learned of another number of ranks is left too: their spreads are not those of these, and rank 3 may be
        another device or none. The rows that were taken are the data's, whoever took them.
        """
        self._beside.wait()
        if self._judgement is not None:
            self._ranks_before = self._judgement.load_state_dict(state, len(self._members)) or self._ranks_before


def ranks_changed(step: int, before: int, now: int) -> Event:
    """Make the event of a resume with another number of ranks, for the first record after it."""
    message = (
        f"The training goes on with {now} ranks, its checkpoint is from {before}: what the detectors have learned of "
        f"{before} ranks is not used, they start anew."
    )
    remedy = (
        f"If that was meant, do nothing: the records go on, faults that were told before are told again. Else start "
        f"{before} ranks."
    )
    return Event(step, "ranks-changed", "info", (), "checkpoint", None, None, message, remedy)
