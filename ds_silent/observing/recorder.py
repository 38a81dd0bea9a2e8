"""On the writing rank: what was gathered becomes a record, the record events, and both are handed to the sinks.

recorder = make_recorder(sinks, config, audit, layout, members, words)
recorder.step(gathered, context, drift, told, wait=False)    # gathered(): once per measured step, in order
recorder.report(event)                                       # what others have found
recorder.ends                                                # the event that is to end the training, if any
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ds_silent.capture.untrained import Unlike
from ds_silent.config import SilentConsistencyConfig
from ds_silent.detectors import Judge
from ds_silent.detectors.lifecycle import ELSEWHERE
from ds_silent.distributed.places import Places, in_whole
from ds_silent.exchange.layout import Layout
from ds_silent.exchange.observation import Gathered
from ds_silent.measure.evidence import Evidence, ResponseLog
from ds_silent.measure.record import Context, measure
from ds_silent.measure.reduction_check import ReductionChecker
from ds_silent.measure.row_tracker import RowTracker, row_evidence
from ds_silent.records import STILL, Dealt, Event, EventKind, Repair, Severity, StepRecord, declared
from ds_silent.replicas.compare import Drift
from ds_silent.respond.told import repair_event
from ds_silent.sinks import Sink
from ds_silent.sinks.worker import OneTask
from ds_silent.text import TORCH, Words

logger = logging.getLogger("ds_silent")
PARTING: tuple[EventKind, ...] = ("aggregation-error", "unreduced-gradient", "update-mismatch", "config-mismatch")
"""After these the replicas are compared, whatever the interval says."""
_ENDS: dict[str, tuple[Severity, ...]] = {"never": (), "error": ("error",), "warning": ("error", "warning")}


def make_recorder(
    sinks: Sink | None,
    config: SilentConsistencyConfig | None = None,
    audit: ReductionChecker | None = None,
    layout: Layout | None = None,
    members: Sequence[int] = (),
    words: Words = TORCH,
    alike: bool = True,
    beside: bool = False,
) -> Recorder:
    """Return what writes into ``sinks``; without them, on all ranks but one, what does nothing.

    Args:
        members: of the group, as the whole training counts its ranks.
        alike: see :class:`ds_silent.framework.Ranks`.
        beside: judge beside the training, see :class:`WritingRecorder`.
    """
    if sinks is None or config is None or audit is None or layout is None:
        return Recorder()
    judge = Judge(config.detectors, config.interval, words, alike, config.effects) if config.detectors.enabled else None
    return WritingRecorder(
        sinks, judge, audit, layout, members, config.detectors.stop_on, alike, config.detectors.dealt, beside
    )


class Recorder:
    """What an observer reports of a step to. This one, of the ranks that do not write, does nothing.

    Attributes:
        writes: whether this is the rank that writes.
        last_record: the newest one.
        ends: the event that is to end the training; None while there is none.
        unlike: what ranks do not do alike, as all ranks have agreed when they came together last.
        places: where the ranks run, for the events; None where that is not known.
    """

    writes = False
    last_record: StepRecord | None = None
    ends: Event | None = None
    places: Places | None = None
    unlike: tuple[Unlike, ...] = ()
    wants_micro_batches = False
    """Whether the sketches of single micro-batches would tell more."""

    def step(
        self, gathered: Callable[[], Gathered], context: Context, drift: Drift | None, told: ResponseLog, wait: bool
    ) -> None:
        """Write one step's record and judge it.

        Args:
            gathered: gives the observations of all ranks.
            context: what this rank knows of the step by itself.
            drift: the tensors that differ between the replicas, if known.
            told: what the responses have found and done.
            wait: judge when :meth:`settle` brings the tensors.
        """

    def settle(self, drift: Drift | None, step: int | None = None) -> None:
        """Judge the records that waited, up to ``step``, to which ``drift`` belongs; None: the tensors stay unknown."""

    def end_unlike(self, unlike: tuple[Unlike, ...], step: int) -> None:
        """Report what was seen in the last observation of all, and not before."""

    def repairs(self, repairs: tuple[Repair, ...]) -> None:
        """Write what the responses have done."""

    def report(self, event: Event) -> None:
        """Write an event and call the callbacks, which find an error on disk."""

    def on_event(self, function: Callable[[Event], None]) -> None:
        """Call ``function(event)`` for every event from now on."""

    def finish(self) -> None:
        """Wait for what is under way: a measured step is about to send what this rank wants."""

    def deliver(self) -> None:
        """Call the callbacks that wait, and wait for nothing."""

    def flush(self) -> None:
        """Return when everything written is on disk."""

    def close(self) -> None:
        """End the records."""

    def take_parted(self) -> bool:
        """Whether something was found, since this was asked last, that can part the replicas."""
        return False

    def state_dict(self, rows_waiting: bool) -> dict[str, Any]:
        """JSON values, for a checkpoint, whose records are on disk then."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; an unreadable state is logged and ignored, and judging starts anew.

        What was learned of another number of ranks is left too: their spreads are not those of these, and rank 3 may be
        another device or none. The rows that were seen are the data's, whoever took them.
        """


class _Callbacks:
    """What is called with each event.

    Attributes:
        listeners: what is called.
        found: events beside the training that wait for its thread.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[Event], None]] = []
        self.found: deque[Event] = deque()
        self._calling = False

    def call(self) -> None:
        """Call with the events that wait."""
        if self._calling:  # a callback asks for something: what else was found comes after it
            return
        self._calling = True
        try:
            while self.found:
                self.call_with(self.found.popleft())
        finally:
            self._calling = False

    def call_with(self, event: Event) -> None:
        """Call somebody else's code, which must not end the observation."""
        for listener in self.listeners:
            try:
                listener(event)
            except Exception as error:
                logger.warning("ds_silent: an on_event callback failed: %s: %s", type(error).__name__, error)


class WritingRecorder(Recorder):
    """Keeps what judging needs from step to step: baselines, rows seen, and a record that waits for more.

    With ``beside`` a step is judged on a thread of its own, and has the time until the next measured step. Who comes
    earlier waits for it, so that there is never more than one under way, and what is found does not depend on who was
    faster. Whatever else is asked waits too. Callbacks run on the training's thread, between two steps, either way.
    """

    writes = True

    def __init__(
        self,
        sink: Sink,
        judge: Judge | None,
        audit: ReductionChecker,
        layout: Layout,
        members: Sequence[int],
        stop_on: str,
        alike: bool = True,
        dealt: Dealt | None = None,
        beside: bool = False,
    ):
        self._sink, self._judge, self._audit = sink, judge, audit
        self._layout, self._members, self._stop_on = layout, tuple(members), stop_on
        self._alike, self._tracker = alike, RowTracker()
        self._tracker.deal.declared = declared(dealt)
        self._newest: StepRecord | None = None
        self._unjudged: list[tuple[StepRecord, Evidence]] = []  # wait for the tensors that differ, or behind such a one
        self._ranks_before: int | None = None  # of a checkpoint with another number, until that was said
        self._parted = False
        self._callbacks = _Callbacks()
        self._beside = OneTask("ds_silent judges") if beside else None
        self._finished = (False, False)  # wants_micro_batches and take_parted, as finish() has found them

    # -- beside the training -------------------------------------------------------------------------------------------

    def step(
        self, gathered: Callable[[], Gathered], context: Context, drift: Drift | None, told: ResponseLog, wait: bool
    ) -> None:
        act = partial(self._write, gathered, context, drift, told, wait, self.unlike)
        if self._beside is None:
            act()
            return
        try:
            self._beside.begin(act)
        finally:
            self._callbacks.call()  # behind it: a callback that flushes begins the next step

    def _end(self) -> None:
        """Wait for what is under way: nothing else touches what is kept here then."""
        try:
            if self._beside is not None:
                self._beside.wait()
        finally:
            self._callbacks.call()

    def finish(self) -> None:
        if self._beside is not None:
            self._end()
            self._finished = self._audit.wants_micro_batches, self._parted
            self._parted = False

    def deliver(self) -> None:
        if self._beside is not None and self._beside.is_done:
            self._end()

    @property
    def wants_micro_batches(self) -> bool:  # type: ignore[override]
        return self._audit.wants_micro_batches if self._beside is None else self._finished[0]

    def take_parted(self) -> bool:
        if self._beside is None:
            parted, self._parted = self._parted, False
        else:
            parted, self._finished = self._finished[1], (self._finished[0], False)
        return parted

    # -- a step --------------------------------------------------------------------------------------------------------

    def _write(
        self,
        gathered: Callable[[], Gathered],
        context: Context,
        drift: Drift | None,
        told: ResponseLog,
        wait: bool,
        unlike: tuple[Unlike, ...],
    ) -> None:
        everybody = gathered()
        record = measure(everybody, self._layout, context)
        if not self._alike:  # it compares gradients of one rank's rows with those of all
            record = dataclasses.replace(record, noise_scale=None)
        coverage, evidence = row_evidence(everybody, self._tracker, context)
        stats, seen = self._audit.step(everybody, drift, told)
        evidence = dataclasses.replace(evidence, reduction=seen, unlike=unlike)
        data = self._tracker.deal.newest
        record = self._newest = dataclasses.replace(record, coverage=coverage, integrity=stats, data=data)
        self._sink.write(record)
        if self._ranks_before is not None:
            self._report(ranks_changed(record.step, self._ranks_before, len(self._members)))
            self._ranks_before = None
        if wait or self._unjudged:  # judged in order
            self._unjudged.append((record, evidence))
        else:
            self._judged(record, evidence)
        for repair in told.repairs:
            self._report(repair_event(repair, len(self._members)))

    def _judged(self, record: StepRecord, evidence: Evidence) -> None:
        if self._judge is not None:
            events = self._judge.step(record, evidence)
            self._sink.write_scores(self._judge.scores)
            for event in events:
                self._report(event)

    def _report(self, event: Event) -> None:
        event = in_whole(event, self._members)
        event = event if self.places is None else self.places.told(event)
        if event.severity in _ENDS[self._stop_on]:
            self.ends = event
        self._parted |= event.kind in PARTING and event.severity != "info" and not event.message.startswith(STILL)
        others = event.step == 0 or (event.severity == "error" and event.where in ELSEWHERE)
        if others and self._judge is not None:  # of the preflight, of a resume
            self._judge.told(event)
        self._sink.write_event(event)
        if self._beside is None:
            self._callbacks.call_with(event)
        else:
            self._callbacks.found.append(event)

    # -- between two steps ---------------------------------------------------------------------------------------------

    @property
    def last_record(self) -> StepRecord | None:  # type: ignore[override]
        self._end()
        return self._newest

    def settle(self, drift: Drift | None, step: int | None = None) -> None:
        self._end()
        while self._unjudged and (step is None or self._unjudged[0][0].step <= step):
            record, evidence = self._unjudged.pop(0)
            reduction = evidence.reduction
            if drift is not None and reduction is not None and record.step == step:
                reduction = dataclasses.replace(reduction, drift=drift)
            self._judged(record, dataclasses.replace(evidence, reduction=reduction))
        self._callbacks.call()

    def end_unlike(self, unlike: tuple[Unlike, ...], step: int) -> None:
        self._end()
        for event in self._judge.unlike(step, unlike) if self._judge is not None else []:
            self._report(event)
        self._callbacks.call()

    def repairs(self, repairs: tuple[Repair, ...]) -> None:
        self._end()
        for repair in repairs:
            self._report(repair_event(repair, len(self._members)))
        self._callbacks.call()

    def report(self, event: Event) -> None:
        try:
            self._end()
        finally:  # it may be about what broke there
            self._report(event)
            self._callbacks.call()

    def on_event(self, function: Callable[[Event], None]) -> None:
        self._end()
        self._callbacks.listeners.append(function)

    def flush(self) -> None:
        self._end()
        self._sink.flush()

    def close(self) -> None:
        try:
            self._end()
        finally:
            self._sink.close()
            if self._beside is not None:
                self._beside.end()

    def state_dict(self, rows_waiting: bool) -> dict[str, Any]:
        self.flush()
        judge = None if self._judge is None else self._judge.state_dict()
        return {"rows": self._tracker.state_dict(rows_waiting), "judge": judge, "ranks": len(self._members)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._end()
        try:
            if "rows" in state:
                self._tracker.load_state_dict(state["rows"])
            if self._judge is not None and state.get("judge") is not None:
                ranks = _ranks_of(state)
                if ranks in (None, len(self._members)):
                    self._judge.load_state_dict(state["judge"])
                else:
                    self._ranks_before = ranks
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("ds_silent: the observer's state in the checkpoint is not used: %s", error)


def _ranks_of(state: dict[str, Any]) -> int | None:
    """Whose state it is; one of before does not say it, but where its detectors have compared ranks."""
    compared = state["judge"].get("outlier") or {}
    ranks = state.get("ranks", compared.get("ranks"))
    return None if ranks is None else int(ranks)


def ranks_changed(step: int, before: int, now: int) -> Event:
    """A resume with another number of ranks: said once, with the first record after it."""
    message = (
        f"The training goes on with {now} ranks, its checkpoint is from {before}: what the detectors have learned of "
        f"{before} ranks is not used, they start anew."
    )
    remedy = (
        f"If that was meant, do nothing: the records go on, faults that were told before are told again. Else start "
        f"{before} ranks."
    )
    return Event(step, "ranks-changed", "info", (), "checkpoint", None, None, message, remedy)
