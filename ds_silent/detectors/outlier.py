"""One rank whose loss, gradient norm or direction is not like the others', or not like its own past any more.

Where rows are dealt at random, ranks are compared with each other (``comparisons.AgainstOthers``). Rank r is flagged
when its evidence reaches N * A, with A the mean number of steps between false alarms: then the average over the ranks
is at least A, which under the null takes A steps or more in the mean.

Where that is not known, a rank may differ because its rows do. Then each rank is also compared with its own past
(``comparisons.AgainstOwnPast``), and a difference since the beginning is a note. The two share the rate. Whether a
change is a note or a warning depends on its size, see ``effects``. A change that the rank's rows may have made is
noted once, and then belongs to the rank's past.

``at_once`` shares the rate too. It flags a rank at its first step if it is so far above the others that no noise
explains it, and at its third if its gradient is so far below, or if it is so far from its own past where rows are not
known to be dealt at random.

A flagged rank leaves the comparison and the history, back to the step where its fault began. The component that
flagged it goes on comparing it; when half of the (log) evidence has been taken back the fault has ended. Two ranks
cannot outvote each other: both are named. Why a rank differs follows from all of its numbers (``likely_causes``); they
are weighed when the rank is flagged, and those of a note now and then afterwards.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ds_silent.config import EffectsConfig
from ds_silent.detectors.at_once import LASTING, AtOnce, StandsOut
from ds_silent.detectors.comparisons import STATISTICS, AgainstOthers, AgainstOwnPast, Strongest
from ds_silent.detectors.effects import Flag, Weigher
from ds_silent.detectors.finding import Finding
from ds_silent.detectors.sequential import Array, Flags, strongest_tilt
from ds_silent.detectors.symptoms import SUDDEN
from ds_silent.measure.evidence import Evidence
from ds_silent.records import Event, Score, StepRecord
from ds_silent.text import TORCH, Words, named

AT_ONCE_SHARE = 1 / 16  # of the rate: what it finds is far beyond any threshold, and the others' delay hardly grows
WEIGHED_AGAIN, AT_MOST = 32, 8  # steps after which a note's size is looked at again; of so many ranks in one step
BEGINNING = 64  # steps; a rank that differs since then has always done so
_MEANING = {
    ("loss", 1): "a higher loss than {against} (given its tokens)",
    ("loss", -1): "a lower loss than {against} (given its tokens)",
    ("gradient norm", 1): "larger gradients than {against} (given its loss and its tokens)",
    ("gradient norm", -1): "smaller gradients than {against} (given its loss and its tokens)",
    ("gradient direction", 1): "a gradient that agrees with the others' mean more than {theirs}",
    ("gradient direction", -1): "a gradient that agrees with the others' mean less than {theirs}",
}
_SPREAD = "a {where} further from the others' than theirs are from each other, above or below (given its tokens)"
_OTHERS = {"against": "the others", "theirs": "theirs do"}
_OWN_PAST = {"against": "before", "theirs": "before"}
_AT_ONCE = "a far {size} {where} {against}, {when}: no noise explains it"


class OutlierTest:
    """Follow the ranks of one run.

    Args:
        ranks: N, at least 2.
        log_threshold: log A of the mean number of measured steps between false alarms of this detector.
        words: for the likely causes.
        sizes: below which a finding is a note.
        scores: the largest score of the ranks compared at the newest step; and what ``at_once`` saw.
        notes: of the newest step: changes that the rank's rows may have made.
    """

    def __init__(self, ranks: int, log_threshold: float, words: Words = TORCH, sizes: EffectsConfig | None = None):
        self.scores: tuple[Score, ...] = ()
        self.notes: tuple[Event, ...] = ()
        self.ranks = ranks
        self._alone = log_threshold - math.log1p(-AT_ONCE_SHARE) + math.log(ranks)  # threshold of one comparison
        self._random: bool | None = None  # how rows are dealt, at the newest step
        cap = 2.0 * self._threshold  # room for a rank whose tokens, by chance, were odd just before its fault
        self._cap, self._level = cap, AgainstOthers(ranks, cap)
        self._change: AgainstOwnPast | None = None  # only where rows are not known to be dealt at random
        self._log_at_once = log_threshold - math.log(AT_ONCE_SHARE)
        self._at_once = AtOnce(ranks, self._log_at_once)
        self._usual = deque([np.full((2, ranks), np.nan)] * LASTING, maxlen=LASTING)  # of the steps before a run
        self.weigher = Weigher(ranks, words, sizes or EffectsConfig())  # why a rank differs, and by how much
        self._began = 0  # the first step
        self._flagged: dict[int, Flag] = {}
        self._unsure: dict[int, Flag] = {}  # changes that are notes so far

    @property
    def _threshold(self) -> float:
        return self._alone if self._random else self._alone + math.log(2.0)

    def step(self, record: StepRecord, extras: Evidence) -> list[Finding]:
        """Return the findings of one step: one per flagged rank."""
        self.notes = ()
        self._dealt(extras.dealt == "random")
        self.weigher.recent.append(record, extras)
        self._began = self._began or record.step
        tokens = _column(extras.label_tokens, self.ranks)
        with np.errstate(all="ignore"):  # non-finite values are left out one by one below
            loss, norms = _column(record.loss.per_rank, self.ranks), _column(record.grad_norm.per_rank, self.ranks)
            usual, least = (1.0, 1) if self._random else (self._usual[0], LASTING)
            healthy = self._unflagged(notes=True)
            losses, lengths = np.stack([loss, norms]) / usual
            apart = self._at_once.step(record.step, losses, lengths, tokens, healthy, least)
            self.scores = self._at_once.scores
            if apart is not None:  # before anything is learnt from it
                self._flag_at_once(apart, record.step, healthy)
            columns = np.stack([loss, np.log(norms), _column(record.direction.per_rank, self.ranks), np.log(tokens)])
            healthy = self._unflagged()
            self._level.step(record.step, columns, healthy, bool(self._random))
            if self._change is not None:
                self._change.step(record.step, columns, self._unflagged(notes=True))
                self._usual.append(self._change.usual())
            self.weigher.remember_losses(record.step, loss, self._unflagged(notes=True))
        self._end()
        self._flag(record.step, self._level, healthy)
        if self._change is not None:
            self._weigh_unsure(record.step)
            self._flag(record.step, self._change, self._unflagged(notes=True))
        self._weigh_again(record.step)
        return self.standing()

    def standing(self) -> list[Finding]:
        """Return the findings of the ranks that are flagged already, for a step at which ranks cannot be compared."""
        return [finding_of(rank, flag, bool(self._random)) for rank, flag in self._flagged.items()]

    def _dealt(self, random: bool) -> None:
        """Drop what was found under another null hypothesis."""
        if self._random is not None and random != self._random:
            self._level.forget(np.ones(self.ranks, dtype=bool))
            self._change = None
            self._at_once = AtOnce(self.ranks, self._log_at_once)
            self._flagged = {r: f for r, f in self._flagged.items() if f.severity != "info" and not f.own_past}
            self._unsure = {}
        self._random = random
        if not random and self._change is None:
            self._change = AgainstOwnPast(self.ranks, self._cap)

    def _unflagged(self, notes: bool = False) -> Flags:
        """Return (N,) ranks that the others are compared with; with ``notes`` also ranks with an old note."""
        flags = [self._flagged.get(rank) for rank in range(self.ranks)]
        return np.array([flag is None or (notes and flag.severity == "info") for flag in flags])

    def _only(self, rank: int) -> Flags:
        return np.asarray(np.arange(self.ranks) == rank)

    def _end(self) -> None:
        for rank, flag in list(self._flagged.items()):
            test = self._change if flag.own_past and self._change is not None else self._level
            series = STATISTICS.index(flag.where) if flag.series is None else flag.series
            flag.left = min(flag.left + test.gain(series, flag.component, rank), self._threshold)
            if flag.left < self._threshold / 2:
                del self._flagged[rank]
                self._level.forget(self._only(rank))
                if flag.own_past and self._change is not None:
                    self._change.begin_anew(self._only(rank))

    def _flag(self, step: int, test: AgainstOthers | AgainstOwnPast, healthy: Flags) -> None:
        if healthy.sum() < 2:  # nobody is left to compare the last one with
            test.forget(healthy)
            return
        score, own_past = test.score(), test is self._change
        waiting = own_past & np.isin(np.arange(self.ranks), list(self._unsure))
        candidates = np.where(healthy & ~waiting, score, -np.inf)
        rank = int(np.argmax(candidates))
        self.scores += (Score("change" if own_past else "outlier", float(candidates[rank]), self._threshold, rank),)
        if not candidates[rank] >= self._threshold:
            return
        found = test.strongest(rank)
        if not self._random and not own_past and found.onset.step > self._began + BEGINNING:
            test.forget(self._only(rank))  # since when it began, its own past was another: see there
            return
        if found.spread and not self.weigher.far(rank, found, healthy):
            self._level.forget_sizes(rank)
            return
        onset, where, series = found.onset, found.statistic, found.series
        flag = Flag(where, onset.step, onset.sign, onset.component, float(score[rank]), self._threshold, series=series)
        flag.own_past, flag.spread, flag.meaning = own_past, found.spread, meaning_of(found, own_past)
        self._set_apart(step, rank, flag, healthy)
        test.forget(healthy & (~self._only(rank)))  # they were compared with a faulty rank

    def _set_apart(self, step: int, rank: int, flag: Flag, healthy: Flags) -> None:
        """Weigh the flag, and take the rank out of the history since its fault began.

        A change that rows may have made is the rank's past, as soon as that is sure; everything else goes on.
        """
        flag.weighed, flag.left = step, self._threshold
        self.weigher.weigh(rank, flag, healthy, self._unflagged(notes=True), bool(self._random))
        self._level.unlearn(rank, flag.since)
        if self._change is not None:
            self._change.unlearn(rank, flag.since)
        if self._change is None or not flag.own_past or flag.severity != "info":
            self._flagged[rank] = flag
        elif flag.unsure and step - flag.since < SUDDEN:
            self._unsure[rank] = flag
        else:
            if not flag.slight:
                self.notes += (note_of(step, rank, flag, bool(self._random)),)
            self._change.begin_anew(self._only(rank))

    def _weigh_unsure(self, step: int) -> None:
        """Weigh a change of an unsure kind again with twice as many steps, and at last with SUDDEN."""
        for rank, flag in list(self._unsure.items()):
            if step - flag.since < min(2 * (flag.weighed - flag.since), SUDDEN):
                continue
            del self._unsure[rank]
            if rank not in self._flagged:
                flag.severity = None
                self._set_apart(step, rank, flag, self._unflagged(notes=True))

    def _flag_at_once(self, apart: StandsOut, step: int, healthy: Flags) -> None:
        component, own_past = strongest_tilt(apart.sign), not self._random
        flag = Flag(apart.quantity, apart.since, apart.sign, component, apart.score, apart.threshold, own_past=own_past)
        flag.severity = "error" if self._random else None  # None: its size decides
        flag.meaning, flag.when = at_once_in_words(apart, step, bool(self._random))
        self._set_apart(step, apart.rank, flag, healthy)

    def _weigh_again(self, step: int) -> None:
        """Weigh old notes again: one may have become a fault, as when labels are wrong and only the others learn."""
        due = [r for r, f in self._flagged.items() if f.severity == "info" and step - f.weighed >= WEIGHED_AGAIN]
        for rank in due[:AT_MOST]:
            flag = self._flagged[rank]
            every = [other for other in range(self.ranks) if other != rank]
            others = [other for other in every if other not in self._flagged] or every
            flag.weighed, since = step, step - WEIGHED_AGAIN
            self.weigher.weigh_again(rank, flag, others, since, self._unflagged(notes=True), bool(self._random))

    def state_dict(self) -> dict[str, Any]:
        return {
            "ranks": self.ranks,
            **self._level.state_dict(),
            "change": None if self._change is None else self._change.state_dict(),
            "random": self._random,
            "began": self._began,
            "at_once": self._at_once.state_dict(),
            **self.weigher.state_dict(),
            "flagged": {str(rank): asdict(flag) for rank, flag in self._flagged.items()},
            "unsure": {str(rank): asdict(flag) for rank, flag in self._unsure.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict` of as many ranks."""
        self._level.load_state_dict(state)
        if state.get("change") is not None:  # older states lack what follows
            self._change = AgainstOwnPast(self.ranks, self._cap)
            self._change.load_state_dict(state["change"])
        if "highest" in state:
            self._random, self._began = state["random"], state["began"]
        if "at_once" in state:
            self._at_once.load_state_dict(state["at_once"])
        self.weigher.load_state_dict(state)
        self._flagged = {int(rank): Flag(**{"severity": "warning", **flag}) for rank, flag in state["flagged"].items()}
        self._unsure = {int(rank): Flag(**flag) for rank, flag in state.get("unsure", {}).items()}


def _column(values: Sequence[float] | None, ranks: int) -> Array:
    return np.full(ranks, np.nan) if values is None else np.array(values, dtype=np.float64)


# -- in words ----------------------------------------------------------------------------------------------------------


def meaning_of(found: Strongest, own_past: bool) -> str:
    """Return what a lasting difference is, and since when."""
    meaning = _SPREAD if found.spread else _MEANING[found.statistic, found.onset.sign]
    meaning = meaning.format(where=found.statistic, **(_OWN_PAST if own_past else _OTHERS))
    return f"{meaning}, since about step {found.onset.step}"


def at_once_in_words(apart: StandsOut, step: int, random: bool) -> tuple[str, str]:
    """Return what a difference is that no noise explains, and when it was."""
    when = "at this step" if apart.since == step else f"since step {apart.since}"
    against = "than all others" if random else "than before"
    size = "larger" if apart.sign > 0 else "smaller"
    return _AT_ONCE.format(size=size, where=apart.quantity, against=against, when=when), when


def message_of(rank: int, flag: Flag, random: bool) -> str:
    """Return the sentences of a flagged rank.

    Args:
        random: whether rows are dealt at random.
    """
    ranks, since = tuple(flag.ranks), flag.since
    if len(ranks) == 2 and (flag.severity != "info" or random):
        when = flag.when or f"since about step {since}"
        return (
            f"{named(ranks).capitalize()} disagree in their {flag.where} {when}; with two ranks to compare "
            f"nobody can say which of them is wrong. Rank {rank} against rank {sum(ranks) - rank}: "
            f"{flag.numbers}. {flag.why}"
        )
    if flag.severity == "info" and not random:
        when = "the beginning" if since <= 1 else f"about step {since}"
        beside = " and its own past" if flag.own_past else ""
        if len(ranks) == 2:
            return (
                f"The data of {named(ranks)} are of unlike kinds since {when}. Rank {rank} against "
                f"rank {sum(ranks) - rank}{beside}: {flag.numbers}. Other rows on one of them look like this."
            )
        return (
            f"Rank {rank}'s data are of another kind since {when}. Against the others{beside}: {flag.numbers}. "
            "Other rows on this rank look like this."
        )
    return f"Rank {rank} has {flag.meaning}. Against the others: {flag.numbers}. {flag.why}"


def note_of(step: int, rank: int, flag: Flag, random: bool) -> Event:
    """Return the note of a change that the rank's rows may have made."""
    message, remedy = message_of(rank, flag, random), f"Look at {flag.look_at}."
    ranks, score, threshold = tuple(flag.ranks), flag.score, flag.threshold
    return Event(step, "outlier-rank", "info", ranks, flag.where, score, threshold, message, remedy)


def finding_of(rank: int, flag: Flag, random: bool) -> Finding:
    """Return the finding of a flagged rank."""
    assert flag.severity is not None
    key, message, remedy = f"outlier-rank:{rank}", message_of(rank, flag, random), f"Look at {flag.look_at}."
    ranks, where, score, threshold = tuple(flag.ranks), flag.where, flag.score, flag.threshold
    found = Finding(
        key, "outlier-rank", flag.severity, ranks, where, score, threshold, message, remedy, flag.since, guess=flag.why
    )
    return replace(found.by_chance(), effect=flag.effect)
