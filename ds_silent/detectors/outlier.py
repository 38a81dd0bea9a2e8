"""Find a rank whose loss, gradient norm or direction differs from the others', or from its own past.

If rows are dealt at random, ranks are compared with each other (``comparisons.AgainstOthers``). Rank r is flagged when
its evidence reaches N * A, with A the mean number of steps between false alarms: then the average over the ranks is at
least A, which under the null hypothesis takes A steps or more in the mean.

If the deal is not known, a rank may differ because its rows do. Then each rank is also compared with its own past
(``comparisons.AgainstOwnPast``), and a difference since the beginning is a note. Both tests share the rate. The size
of a change decides whether it is a note or a warning, see ``effects``. A change that the rank's rows may have caused is
noted once, and then belongs to the rank's past.

``at_once`` shares the rate too. It flags a rank at its first step if the rank is so far above the others that no noise
explains it; at its third if its gradient is so far below, or if the rank is so far from its own past and rows are not
known to be dealt at random.

A flagged rank leaves the comparison and the history, back to the step where its fault began. The tilt that found it
keeps testing it; the fault ends when its log evidence falls below half the threshold. Two ranks cannot outvote each
other: both are named. The cause follows from all of a rank's numbers (``likely_causes``), which are weighed when the
rank is flagged, and again now and then for a note.

:class:`RankComparison` holds this test and that of the layers, and reports one finding per rank.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import numpy as np

from ds_silent.config import EffectsConfig
from ds_silent.detectors.at_once import LASTING, AtOnce, StandsOut
from ds_silent.detectors.comparisons import STATISTICS, AgainstOthers, AgainstOwnPast
from ds_silent.detectors.effects import Flag, Weigher
from ds_silent.detectors.finding import Detector, Finding
from ds_silent.detectors.layers import LayerTest
from ds_silent.detectors.sequential import Array, Flags, highest, only, strongest_tilt
from ds_silent.detectors.symptoms import SUDDEN
from ds_silent.measure.evidence import Evidence
from ds_silent.records import Event, Score, StepRecord
from ds_silent.text import TORCH, Words, named

AT_ONCE_SHARE = 1 / 16  # of the rate: its findings are far beyond any threshold, and the others hardly slow down
WEIGHED_AGAIN, AT_MOST = 32, 8  # steps until a note's size is weighed again; ranks weighed in one step
BEGINNING = 64  # steps; a rank that began to differ within them has always differed
NOTED_AGAIN = 256  # steps after which another change of a rank is noted: rows that go on changing are one note
_MEANING = {
    ("loss", 1): "a higher loss than {against} (given its tokens)",
    ("loss", -1): "a lower loss than {against} (given its tokens)",
    ("gradient norm", 1): "larger gradients than {against} (given its loss and its tokens)",
    ("gradient norm", -1): "smaller gradients than {against} (given its loss and its tokens)",
    ("gradient direction", 1): "a gradient that agrees with the others' mean more than {theirs}",
    ("gradient direction", -1): "a gradient that agrees with the others' mean less than {theirs}",
}
_OF_RANKS = ("outlier-rank:", "outlier-layer:")  # how the keys of such findings begin
_SPREAD = "a {where} further from the others' than theirs are from each other, above or below (given its tokens)"
_OTHERS = {"against": "the others", "theirs": "theirs do"}
_OWN_PAST = {"against": "before", "theirs": "before"}


class OutlierTest:
    """Follow the ranks of one run."""

    def __init__(self, ranks: int, log_threshold: float, words: Words = TORCH, sizes: EffectsConfig | None = None):
        self.scores: tuple[Score, ...] = ()
        self.notes: tuple[Event, ...] = ()
        self.ranks = ranks
        self._alone = log_threshold - math.log1p(-AT_ONCE_SHARE) + math.log(ranks)  # threshold of one comparison
        self._random: bool | None = None  # how rows are dealt, at the newest step
        cap = 2.0 * self._threshold  # room for a rank whose tokens were odd by chance just before its fault
        self._cap, self._level = cap, AgainstOthers(ranks, cap)
        self._change: AgainstOwnPast | None = None  # only where rows are not known to be dealt at random
        self._log_at_once = log_threshold - math.log(AT_ONCE_SHARE)
        self._at_once = AtOnce(ranks, self._log_at_once)
        self._usual = deque([np.full((2, ranks), np.nan)] * LASTING, maxlen=LASTING)  # [0]: before a run of odd steps
        self.weigher = Weigher(ranks, words, sizes or EffectsConfig())  # finds why a rank differs, and by how much
        self._began = 0  # the first step
        self._flagged: dict[int, Flag] = {}
        self._unsure: dict[int, Flag] = {}  # changes that may yet become warnings

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
            losses, lengths = np.array([loss, norms]) / usual
            apart = self._at_once.step(record.step, losses, lengths, tokens, healthy, least)
            self.scores = self._at_once.scores
            if apart is not None:  # before anything learns from it
                self._flag_at_once(apart, record.step, healthy)
            columns = np.array([loss, np.log(norms), _column(record.direction.per_rank, self.ranks), np.log(tokens)])
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
        """Return the findings of ranks flagged already, for a step at which ranks cannot be compared."""
        return [
            finding_of(rank, flag, bool(self._random))
            for rank, flag in self._flagged.items()
            if flag.severity != "info" or not flag.slight
        ]

    def _dealt(self, random: bool) -> None:
        """Drop findings under another null hypothesis."""
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
        """Return (N,) which ranks others are compared with; ``notes``: include ranks with an old note."""
        unflagged = np.ones(self.ranks, dtype=bool)
        unflagged[[rank for rank, flag in self._flagged.items() if not (notes and flag.severity == "info")]] = False
        return unflagged

    def _end(self) -> None:
        for rank, flag in list(self._flagged.items()):
            test = self._change if flag.own_past and self._change is not None else self._level
            series = STATISTICS.index(flag.where) if flag.series is None else flag.series
            flag.left = min(flag.left + test.gain(series, flag.component, rank), self._threshold)
            if flag.left < self._threshold / 2:
                del self._flagged[rank]
                self._level.forget(only(rank, self.ranks))
                if flag.own_past and self._change is not None:
                    self._change.begin_anew(only(rank, self.ranks))

    def _flag(self, step: int, test: AgainstOthers | AgainstOwnPast, healthy: Flags) -> None:
        if healthy.sum() < 2:  # nobody is left to compare the last one with
            test.forget(healthy)
            return
        own_past, candidates = test is self._change, healthy.copy()
        if own_past:
            candidates[list(self._unsure)] = False
        rank, score = highest(test.score, candidates)
        self.scores += (Score("change" if own_past else "outlier", score, self._threshold, rank),)
        if not score >= self._threshold:
            return
        found = test.strongest(rank)
        if not self._random and not own_past and found.onset.step > self._began + BEGINNING:
            test.forget(only(rank, self.ranks))  # its past differs since then: AgainstOwnPast decides
            return
        if found.spread and not self.weigher.far(rank, found, healthy):
            self._level.forget_sizes(rank)
            return
        onset, where, series = found.onset, found.statistic, found.series
        flag = Flag(where, onset.step, onset.sign, onset.component, score, self._threshold, series=series)
        meaning = _SPREAD if found.spread else _MEANING[where, onset.sign]
        meaning = meaning.format(where=where, **(_OWN_PAST if own_past else _OTHERS))
        flag.own_past, flag.spread, flag.meaning = own_past, found.spread, f"{meaning}, since about step {onset.step}"
        self._set_apart(step, rank, flag, healthy)
        test.forget(healthy & ~only(rank, self.ranks))  # they were compared with a faulty rank

    def _set_apart(self, step: int, rank: int, flag: Flag, healthy: Flags) -> None:
        """Weigh the flag, and take the rank out of the history since its fault began.

        A change that rows may have caused joins the rank's past once it is sure; any other stays flagged.
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
            self._change.begin_anew(only(rank, self.ranks))

    def _weigh_unsure(self, step: int) -> None:
        """Weigh a change of unsure kind again after twice as many steps, and last after SUDDEN."""
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
        flag.when = "at this step" if apart.since == step else f"since step {apart.since}"
        size, against = "larger" if apart.sign > 0 else "smaller", "before" if own_past else "all others"
        flag.meaning = f"a far {size} {apart.quantity} than {against}, {flag.when}: no noise explains it"
        self._set_apart(step, apart.rank, flag, healthy)

    def _weigh_again(self, step: int) -> None:
        """Weigh old notes again: one may become a fault, as with wrong labels, when only the others learn."""
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
        if state["change"] is not None:
            self._change = AgainstOwnPast(self.ranks, self._cap)
            self._change.load_state_dict(state["change"])
        self._random, self._began = state["random"], state["began"]
        self._at_once.load_state_dict(state["at_once"])
        self.weigher.load_state_dict(state)
        self._flagged = {int(rank): Flag(**flag) for rank, flag in state["flagged"].items()}
        self._unsure = {int(rank): Flag(**flag) for rank, flag in state["unsure"].items()}


def _column(values: Sequence[float] | None, ranks: int) -> Array:
    return np.full(ranks, np.nan) if values is None else np.array(values, dtype=np.float64)


# -- in words ----------------------------------------------------------------------------------------------------------

_UNLESS_DEALT = (
    'If rows are dealt to the ranks at random, write "detectors": {"dealt": "random"}: then this is an alarm.'
)
_Said = TypeVar("_Said", Event, Finding)


def message_of(rank: int, flag: Flag, random: bool) -> str:
    """Return a flagged rank's sentences; ``random``: whether rows are dealt at random."""
    ranks, since = tuple(flag.ranks), flag.since
    if len(ranks) == 2 and (flag.severity != "info" or random):
        when = flag.when or f"since about step {since}"
        return (
            f"{named(ranks).capitalize()} disagree in their {flag.where} {when}; with two ranks to compare "
            f"nobody can say which of them is wrong. Rank {rank} against rank {sum(ranks) - rank}: "
            f"{flag.numbers}. {flag.why}"
        )
    if flag.severity == "info" and not random:
        first, last = _of_data(rank, flag)
        whom = f"Rank {rank} against rank {sum(ranks) - rank}" if len(ranks) == 2 else "Against the others"
        return f"{first}{whom}{' and its own past' if flag.own_past else ''}: {flag.numbers}. {last}"
    return f"Rank {rank} has {flag.meaning}. Against the others: {flag.numbers}. {flag.why}"


def _of_data(rank: int, flag: Flag) -> tuple[str, str]:
    """Return the first and the last sentence of a note."""
    # against the others it may only have become sure then: what began later is found against the rank's own past
    began = "the beginning" if flag.since <= 1 else f"about step {flag.since}" if flag.own_past else ""
    when = f" since {began}" * bool(began)
    if len(flag.ranks) == 2:
        return (
            f"The data of {named(tuple(flag.ranks))} are of unlike kinds{when}. ",
            "Other rows on one of them look like this.",
        )
    return f"Rank {rank}'s data are of another kind{when}. ", "Other rows on this rank look like this."


def note_of(step: int, rank: int, flag: Flag, random: bool) -> Event:
    """Return the note of a change that the rank's rows may have caused."""
    message, place = message_of(rank, flag, random), (tuple(flag.ranks), flag.where, flag.score, flag.threshold)
    return Event(step, "outlier-rank", "info", *place, message, f"Look at {flag.look_at}.")


def _unless_dealt(said: _Said) -> _Said:
    """Let a note say what makes an alarm of it."""
    return replace(said, remedy=f"{said.remedy} {_UNLESS_DEALT}") if said.severity == "info" else said


def finding_of(rank: int, flag: Flag, random: bool) -> Finding:
    """Return the finding of a flagged rank."""
    assert flag.severity is not None
    key, message, remedy = f"outlier-rank:{rank}", message_of(rank, flag, random), f"Look at {flag.look_at}."
    place = tuple(flag.ranks), flag.where, flag.score, flag.threshold
    found = Finding(key, "outlier-rank", flag.severity, *place, message, remedy, flag.since)
    guesses = _of_data(rank, flag) if flag.severity == "info" and not random else (flag.why,)
    return replace(found.by_chance(), effect=flag.effect, guesses=guesses)


class RankComparison(Detector):
    """Report of each rank its whole gradient or a layer, whichever was found first."""

    def __init__(self, log_threshold: float, words: Words, sizes: EffectsConfig, alike: bool = True):
        self._log_threshold, self._words, self._sizes, self._alike = log_threshold, words, sizes, alike
        self.outlier: OutlierTest | None = None  # both: until the number of ranks is known
        self.layers: LayerTest | None = None
        self._noted: dict[int, int] = {}  # when a rank's rows were last noted
        self._layers_first: set[int] = set()  # ranks of which a layer was named, and not the whole gradient

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        self.scores, self.notes = (), ()
        if record.world_size < 2 or not self._alike:
            return []
        outlier, layers = self.outlier, self.layers
        if outlier is None or layers is None or outlier.ranks != record.world_size:
            outlier, layers = self._begin(record.world_size)
            self._layers_first, self._noted = set(), {}
        if not evidence.independent or any(finding.kind == "duplicate-data" for finding in before):
            # ranks that hold the same rows are not exchangeable with the others
            whole, single = outlier.standing(), layers.standing()
        else:
            random = evidence.dealt == "random"
            whole = outlier.step(record, evidence)
            single = layers.step(record.step, evidence.layers, evidence.label_tokens, random, outlier.weigher.plain)
            self.scores = (*outlier.scores, *layers.scores)
            self.notes = tuple(self._new_notes(record.step, (*outlier.notes, *layers.notes)))
            if evidence.dealt == "unknown":
                self.notes = tuple(_unless_dealt(note) for note in self.notes)
                whole, single = ([_unless_dealt(one) for one in found] for found in (whole, single))
        untrained = {rank for finding in before if finding.key.startswith("stale:") for rank in finding.ranks}
        found = self._one_of_each(whole, single, untrained)
        if not evidence.crosses:
            return found
        # else one rank's fault is in the others' gradients, too
        return [one if one.severity == "info" else replace(one, effects=(*one.effects, *_OF_RANKS)) for one in found]

    def _begin(self, ranks: int) -> tuple[OutlierTest, LayerTest]:
        self.outlier = OutlierTest(ranks, self._log_threshold, self._words, self._sizes)
        self.layers = LayerTest(ranks, self._log_threshold, self._sizes)
        return self.outlier, self.layers

    def _one_of_each(self, whole: list[Finding], layers: list[Finding], untrained: set[int]) -> list[Finding]:
        """Return one finding per rank, and all notes; of ``untrained`` ranks a missing gradient is reported."""
        notes = [finding for finding in whole if finding.severity == "info"]
        outliers = [finding for finding in whole if finding.severity != "info"]
        by_whole = {rank for finding in outliers for rank in finding.ranks}
        standing = {rank for finding in layers for rank in finding.ranks}
        self._layers_first = (self._layers_first & standing) | (standing - by_whole - untrained)
        return [
            *notes,
            *(finding for finding in outliers if not self._layers_first.issuperset(finding.ranks)),
            *(finding for finding in layers if self._layers_first.issuperset(finding.ranks)),
        ]

    def _new_notes(self, step: int, notes: Iterable[Event]) -> list[Event]:
        """Return the notes of ranks of which none was made lately."""
        new = []
        for note in notes:
            if any(step - self._noted.get(rank, -NOTED_AGAIN) >= NOTED_AGAIN for rank in note.ranks):
                self._noted.update(dict.fromkeys(note.ranks, step))
                new.append(note)
        return new

    def state_dict(self) -> dict[str, Any]:
        return {
            "outlier": None if self.outlier is None else self.outlier.state_dict(),
            "layers": None if self.layers is None else self.layers.state_dict(),
            "layers_first": sorted(self._layers_first),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.outlier = None
        if state["outlier"] is not None:
            outlier, layers = self._begin(state["outlier"]["ranks"])
            outlier.load_state_dict(state["outlier"])
            layers.load_state_dict(state["layers"])
        self._layers_first = set(state["layers_first"])
