"""One rank whose loss, gradient norm or direction is not like the others', or not like its own past any more.

Where rows are dealt at random, ranks are compared with each other (``comparisons.AgainstOthers``). Rank r is flagged
when its evidence reaches N * A, with A the mean number of steps between false alarms: then the average over the ranks
is at least A, which under the null takes A steps or more in the mean.

Where it is not known that they are, a rank may differ because its rows do. Then each rank is compared with its own past
(``comparisons.AgainstOwnPast``), and what is so since the beginning is a note. The two share the rate. Whether what is
found is a note or a warning is a matter of its size, see ``effects``. A change that the rank's rows may have made is
written once, and from then on it is the rank's past.

A rank so far above the others that no noise explains it is flagged at its first step, by ``at_once``, or at its third
where its gradient is so far below; where rows are not known to be dealt at random, so far from what it was before, at
its third. It shares the rate with the others.

A flagged rank leaves the comparison and the history, back to the step where its fault began. The component that
flagged it goes on comparing it; when half of the (log) evidence has been taken back the fault has ended. Two ranks
cannot outvote each other: both are named. Why a rank differs follows from all of its numbers, see ``likely_causes``; it
is weighed when the rank is flagged, and its size now and then afterwards.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from ds_silent.config import EffectsConfig
from ds_silent.detectors.at_once import LASTING, AtOnce, StandsOut
from ds_silent.detectors.comparisons import STATISTICS, AgainstOthers, AgainstOwnPast, Strongest
from ds_silent.detectors.effects import SUDDEN, UNLIKE, EffectContext, effect_of, is_plain
from ds_silent.detectors.finding import Finding
from ds_silent.detectors.likely_causes import Symptoms, causes_in_words, either_in_words, in_words, likely_causes
from ds_silent.detectors.sequential import Array, Flags, strongest_tilt
from ds_silent.detectors.symptoms import Recent
from ds_silent.measure.evidence import Evidence
from ds_silent.records import Event, Score, StepRecord
from ds_silent.text import TORCH, Words, named

AT_ONCE_SHARE = 1 / 16  # of the rate: what it finds is far beyond any threshold, and the others' delay hardly grows
WEIGHED_AGAIN, AT_MOST = 32, 8  # steps after which a note's size is looked at again; of so many ranks in one step
HIGHEST_EVERY = 64  # steps between two looks at the highest losses so far
BEGINNING = 64  # steps; a rank that differs since then has always done so
FIRST = 8  # losses of each rank that are its beginning
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
_OF_DATA = (
    "this rank's rows: nothing is wrong where they are of another kind by design; else at their labels, their source, "
    "then at code between this rank's loss and the reduction"
)
_UNKNOWN = {  # of a flag that an older version has written
    "threshold": None,
    "severity": "warning",
    "meaning": "other numbers than the others",
    "numbers": "not known",
    "why": "",
    "look_at": "this rank's rows and code",
    "own_past": False,
    "effect": None,
    "weighed": 0,
}
_AT_ONCE = "a far {size} {where} {against}, {when}: no noise explains it"


class OutlierTest:
    """Follows the ranks of one run.

    Args:
        ranks: N, at least 2.
        log_threshold: log A of the mean number of measured steps between false alarms of this detector.
        words: for the likely causes.
        sizes: below which a finding is a note.

    Attributes:
        scores: the largest score of the ranks compared at the newest step; and what ``at_once`` saw.
        notes: of the newest step: changes that the rank's rows may have made.
    """

    def __init__(self, ranks: int, log_threshold: float, words: Words = TORCH, sizes: EffectsConfig | None = None):
        self.scores: tuple[Score, ...] = ()
        self.notes: tuple[Event, ...] = ()
        self.ranks, self._words, self._sizes = ranks, words, sizes or EffectsConfig()
        self._alone = log_threshold - math.log1p(-AT_ONCE_SHARE) + math.log(ranks)  # threshold of one comparison
        self._random: bool | None = None  # how rows are dealt, at the newest step
        cap = 2.0 * self._threshold  # room for a rank whose tokens, by chance, were odd just before its fault
        self._cap, self._level = cap, AgainstOthers(ranks, cap)
        self._change: AgainstOwnPast | None = None  # only where rows are not known to be dealt at random
        self._log_at_once = log_threshold - math.log(AT_ONCE_SHARE)
        self._at_once = AtOnce(ranks, self._log_at_once)
        self._usual = deque([np.full((2, ranks), np.nan)] * LASTING, maxlen=LASTING)  # of the steps before a run
        self._recent = Recent(ranks)
        self._highest: Array = np.full((2, ranks), -np.inf)  # losses: so far, and up to some steps ago
        self._began = 0  # the first step
        self._first: Array = np.zeros((2, ranks))  # sum of each rank's first losses, and how many
        self._flagged: dict[int, dict[str, Any]] = {}
        self._unsure: dict[int, dict[str, Any]] = {}  # changes that are notes so far

    @property
    def _threshold(self) -> float:
        return self._alone if self._random else self._alone + math.log(2.0)

    def step(self, record: StepRecord, extras: Evidence) -> list[Finding]:
        """Findings of one step: one per flagged rank."""
        self.notes = ()
        self._dealt(extras.dealt == "random")
        self._recent.append(record, extras)
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
            self._remember_highest(record.step, loss, self._unflagged(notes=True))
        self._end()
        self._flag(record.step, self._level, healthy)
        if self._change is not None:
            self._weigh_unsure(record.step)
            self._flag(record.step, self._change, self._unflagged(notes=True))
        self._weigh_again(record.step)
        return self.standing()

    def standing(self) -> list[Finding]:
        """What is flagged; also the answer at a step at which ranks cannot be compared."""
        return [self._finding(rank) for rank in self._flagged]

    def score(self) -> Array:
        """(N,) log evidence against each rank, to be compared with ``threshold``."""
        return self._level.score()

    def plain(self, rank: int, since: int) -> bool:
        """Whether a rank's loss is since a step as it was before, against the others'; False where not known."""
        others = [other for other in range(self.ranks) if other != rank]
        return is_plain(self._recent.symptoms(rank, others, since, own_past=True))

    def _dealt(self, random: bool) -> None:
        """What was found under another null hypothesis counts no more."""
        if self._random is not None and random != self._random:
            self._level.forget(np.ones(self.ranks, dtype=bool))
            self._change = None
            self._at_once = AtOnce(self.ranks, self._log_at_once)
            self._flagged = {
                rank: flag
                for rank, flag in self._flagged.items()
                if flag["severity"] != "info" and not flag["own_past"]
            }
            self._unsure = {}
        self._random = random
        if not random and self._change is None:
            self._change = AgainstOwnPast(self.ranks, self._cap)

    def _unflagged(self, notes: bool = False) -> Flags:
        """(N,) ranks that the others are compared with; ``notes``: those with a note of old too."""
        flags = [self._flagged.get(rank) for rank in range(self.ranks)]
        return np.array([flag is None or (notes and flag["severity"] == "info") for flag in flags])

    def _remember_highest(self, step: int, loss: Array, healthy: Flags) -> None:
        if step % HIGHEST_EVERY == 0:
            self._highest[1] = self._highest[0]
        known = healthy & np.isfinite(loss)
        early = np.isfinite(loss) & (self._first[1] < FIRST)
        self._first[:, early] += np.stack([loss, np.ones(self.ranks)])[:, early]
        self._highest[0, known] = np.maximum(self._highest[0], loss)[known]

    def _end(self) -> None:
        for rank, flag in list(self._flagged.items()):
            test = self._change if flag["own_past"] and self._change is not None else self._level
            series = flag.get("series", STATISTICS.index(flag["where"]))
            flag["left"] = min(flag["left"] + test.gain(series, flag["component"], rank), self._threshold)
            if flag["left"] < self._threshold / 2:
                del self._flagged[rank]
                own = np.arange(self.ranks) == rank
                self._level.forget(own)
                if flag["own_past"] and self._change is not None:
                    self._change.begin_anew(own)

    def _flag(self, step: int, test: AgainstOthers | AgainstOwnPast, healthy: Flags) -> None:
        if healthy.sum() < 2:  # nobody is left to compare the last one with
            test.forget(healthy)
            return
        score = test.score()
        own_past = test is self._change
        waiting = own_past & np.isin(np.arange(self.ranks), list(self._unsure))
        candidates = np.where(healthy & ~waiting, score, -np.inf)
        rank = int(np.argmax(candidates))
        self.scores += (Score("change" if own_past else "outlier", float(candidates[rank]), self._threshold, rank),)
        if not candidates[rank] >= self._threshold:
            return
        found = test.strongest(rank)
        if not self._random and not own_past and found.onset.step > self._began + BEGINNING:
            test.forget(np.arange(self.ranks) == rank)  # since when it began, its own past was another: see there
            return
        if found.spread and not self._far(rank, found, healthy):
            self._level.forget_sizes(rank)
            return
        flag = {"where": found.statistic, "since": found.onset.step, "series": found.series, "own_past": own_past}
        flag |= {"sign": found.onset.sign, "component": found.onset.component}
        flag |= {"score": float(score[rank]), "threshold": self._threshold, "severity": None, "weighed": step}
        meaning = _SPREAD if found.spread else _MEANING[found.statistic, found.onset.sign]
        meaning = meaning.format(where=found.statistic, **(_OWN_PAST if own_past else _OTHERS))
        flag |= {"meaning": f"{meaning}, since about step {found.onset.step}", "spread": found.spread}
        self._place(step, rank, self._set_apart(rank, flag, healthy))
        test.forget(healthy & (np.arange(self.ranks) != rank))  # they were compared with a faulty rank

    def _far(self, rank: int, found: Strongest, healthy: Flags) -> bool:
        """Whether a rank is so far from the others as no other number of rows makes it."""
        seen = self._recent.spread(rank, [int(r) for r in np.flatnonzero(healthy) if r != rank], found.onset.step)
        return found.onset.sign > 0 and (seen.loss is not None or seen.norm is not None)

    def _place(self, step: int, rank: int, flag: dict[str, Any]) -> None:
        """A change that rows may have made is the rank's past, as soon as that is sure; everything else goes on."""
        if flag["own_past"] and flag["severity"] == "info" and self._change is not None:
            if flag["unsure"] and step - flag["since"] < SUDDEN:
                self._unsure[rank] = flag
                return
            if not flag["slight"]:
                self.notes += (self._note(step, rank, flag),)
            self._change.begin_anew(np.arange(self.ranks) == rank)
        else:
            self._flagged[rank] = flag

    def _weigh_unsure(self, step: int) -> None:
        """A change whose kind few steps did not show is weighed again with twice as many, and at last with SUDDEN."""
        for rank, flag in list(self._unsure.items()):
            if step - flag["since"] < min(2 * (flag["weighed"] - flag["since"]), SUDDEN):
                continue
            del self._unsure[rank]
            if rank not in self._flagged:
                flag["severity"], flag["weighed"] = None, step
                self._place(step, rank, self._set_apart(rank, flag, self._unflagged(notes=True)))

    def _flag_at_once(self, apart: StandsOut, step: int, healthy: Flags) -> None:
        flag = {"where": apart.quantity, "since": apart.since, "sign": apart.sign}
        flag |= {"component": strongest_tilt(apart.sign)}
        flag |= {"score": apart.score, "threshold": apart.threshold, "severity": "error" if self._random else None}
        when = "at this step" if apart.since == step else f"since step {apart.since}"
        against = "than all others" if self._random else "than before"
        size = "larger" if apart.sign > 0 else "smaller"
        meaning = _AT_ONCE.format(size=size, where=apart.quantity, against=against, when=when)
        flag |= {"meaning": meaning, "when": when}
        flag |= {"own_past": not self._random, "weighed": step}
        self._place(step, apart.rank, self._set_apart(apart.rank, flag, healthy))

    def _set_apart(self, rank: int, flag: dict[str, Any], healthy: Flags) -> dict[str, Any]:
        """The rank leaves the history since its fault began; what its numbers say is added to the flag."""
        peers = [int(other) for other in np.flatnonzero(healthy)]
        others = [other for other in peers if other != rank]
        own_past, since = flag["own_past"], flag["since"]
        spread = flag.get("spread", False)
        seen = (
            self._recent.spread(rank, others, since) if spread else self._recent.symptoms(rank, others, since, own_past)
        )
        sudden = flag["weighed"] - since <= SUDDEN
        if own_past and sudden and not spread:
            sudden = not self._recent.gradual(rank, others, since, flag["where"])
        effect = effect_of(seen, flag["where"], self._sizes, self._setting(rank, others, since, own_past, sudden))
        self._level.unlearn(rank, since)
        if self._change is not None:
            self._change.unlearn(rank, since)
        return {
            **flag,
            "ranks": peers if len(peers) == 2 else [rank],
            **self._reasons(rank, others, seen, since, own_past, effect.of_data),
            "left": self._threshold,
            "severity": flag["severity"] or effect.severity,
            "effect": effect.size,
            "slight": effect.slight,
            "unsure": effect.unsure,
        }

    def _reasons(
        self, rank: int, others: Sequence[int], seen: Symptoms, since: int, own_past: bool, of_data: bool
    ) -> dict[str, str]:
        """What a rank's numbers say; of two ranks the other one may be the wrong one as well."""
        causes = likely_causes(seen, self._words)
        numbers, why, two = in_words(seen), causes_in_words(causes), len(others) == 1
        if two:
            [other] = others
            mirrored = likely_causes(self._recent.symptoms(other, [rank], since, own_past), self._words)
            numbers, why = in_words(seen, f"rank {other}"), either_in_words({rank: causes, other: mirrored})
            causes = (*causes[:2], *mirrored[:2])
        look_at = _OF_DATA if of_data else "; then ".join(dict.fromkeys(cause.look_at for cause in causes))
        look_at = look_at.replace("this rank", "each rank") if two else look_at
        ranks: Any = sorted((rank, *others)) if two else [rank]
        return {"ranks": ranks, "numbers": numbers, "why": why, "look_at": look_at}

    def _setting(
        self, rank: int, others: Sequence[int], since: int, own_past: bool = False, sudden: bool = True
    ) -> EffectContext:
        others = [other for other in np.flatnonzero(self._unflagged(notes=True)).tolist() if other != rank] or others
        highest = self._highest[0, list(others)].max(initial=-np.inf)
        if own_past:
            highest = max(highest, self._highest[1, rank])
        now = self._recent.loss(rank, since)
        above = now / highest if now is not None and 0.0 < highest < math.inf else None
        with np.errstate(all="ignore"):
            first = np.log(self._first[0] / self._first[1])
            theirs = first[list(others)]
            unlike = float(first[rank] - theirs.max() - UNLIKE * np.ptp(theirs))
        beyond = self._recent.beyond(rank, others, since, "gradient norm") if own_past else None
        if own_past and not self._recent.norm_moved_alone(rank, others, since):
            beyond = 0.0
        return EffectContext(
            bool(self._random), own_past, above, unlike if math.isfinite(unlike) else None, sudden, beyond
        )

    def _weigh_again(self, step: int) -> None:
        """A note may have become a fault, as when a rank's labels are wrong and only the others learn."""
        due = [r for r, f in self._flagged.items() if f["severity"] == "info" and step - f["weighed"] >= WEIGHED_AGAIN]
        for rank in due[:AT_MOST]:
            flag = self._flagged[rank]
            others = [other for other in range(self.ranks) if other != rank and other not in self._flagged]
            others = others or [other for other in range(self.ranks) if other != rank]
            flag["weighed"], newest = step, step - WEIGHED_AGAIN
            seen = self._recent.symptoms(rank, others, newest)
            effect = effect_of(seen, flag["where"], self._sizes, self._setting(rank, others, newest))
            if effect.severity != "info":
                flag |= {"severity": effect.severity, "effect": effect.size}
                flag |= self._reasons(rank, others, seen, newest, False, False)

    def _message(self, rank: int, flag: dict[str, Any]) -> str:
        ranks, since = tuple(flag["ranks"]), flag["since"]
        if len(ranks) == 2 and (flag["severity"] != "info" or self._random):
            when = flag.get("when", f"since about step {since}")
            return (
                f"{named(ranks).capitalize()} disagree in their {flag['where']} {when}; with two ranks to compare "
                f"nobody can say which of them is wrong. Rank {rank} against rank {sum(ranks) - rank}: "
                f"{flag['numbers']}. {flag['why']}"
            )
        if flag["severity"] == "info" and not self._random:
            when = "the beginning" if since <= 1 else f"about step {since}"
            beside = " and its own past" if flag["own_past"] else ""
            if len(ranks) == 2:
                return (
                    f"The data of {named(ranks)} are of unlike kinds since {when}. Rank {rank} against "
                    f"rank {sum(ranks) - rank}{beside}: {flag['numbers']}. Other rows on one of them look like this."
                )
            return (
                f"Rank {rank}'s data are of another kind since {when}. Against the others{beside}: {flag['numbers']}. "
                "Other rows on this rank look like this."
            )
        return f"Rank {rank} has {flag['meaning']}. Against the others: {flag['numbers']}. {flag['why']}"

    def _note(self, step: int, rank: int, flag: dict[str, Any]) -> Event:
        message, remedy = self._message(rank, flag), f"Look at {flag['look_at']}."
        ranks, score, threshold = tuple(flag["ranks"]), flag["score"], flag["threshold"]
        return Event(step, "outlier-rank", "info", ranks, flag["where"], score, threshold, message, remedy)

    def _finding(self, rank: int) -> Finding:
        flag = self._flagged[rank]
        return Finding(
            key=f"outlier-rank:{rank}",
            kind="outlier-rank",
            severity=flag["severity"],
            ranks=tuple(flag["ranks"]),
            where=flag["where"],
            score=flag["score"],
            threshold=flag["threshold"],
            message=self._message(rank, flag),
            remedy=f"Look at {flag['look_at']}.",
            since=flag["since"],
            guess=flag["why"],
            log_excess=flag["score"] - flag["threshold"],
            effect=flag["effect"],
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        highest = [[None if value == -np.inf else float(value) for value in row] for row in self._highest]
        return {
            "ranks": self.ranks,
            **self._level.state_dict(),
            "change": None if self._change is None else self._change.state_dict(),
            "random": self._random,
            "highest": highest,
            "began": self._began,
            "first": self._first.tolist(),
            "at_once": self._at_once.state_dict(),
            "recent": self._recent.state_dict(),
            "flagged": {str(rank): flag for rank, flag in self._flagged.items()},
            "unsure": {str(rank): flag for rank, flag in self._unsure.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; of another number of ranks nothing can be taken over."""
        if state["ranks"] != self.ranks:
            return
        self._level.load_state_dict(state)
        if state.get("change") is not None:  # older states lack what follows
            self._change = AgainstOwnPast(self.ranks, self._cap)
            self._change.load_state_dict(state["change"])
        if "highest" in state:
            self._random, self._began = state["random"], state["began"]
            self._first = np.array(state["first"], dtype=np.float64)
            self._highest = np.array(
                [[-np.inf if value is None else value for value in row] for row in state["highest"]], dtype=np.float64
            )
        if "at_once" in state:
            self._at_once.load_state_dict(state["at_once"])
            self._recent.load_state_dict(state["recent"])
        self._flagged = {int(rank): {**_UNKNOWN, **flag} for rank, flag in state["flagged"].items()}
        self._unsure = {int(rank): flag for rank, flag in state.get("unsure", {}).items()}


def _column(values: Sequence[float] | None, ranks: int) -> Array:
    return np.full(ranks, np.nan) if values is None else np.array(values, dtype=np.float64)
