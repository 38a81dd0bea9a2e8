"""One rank whose gradient is off in some layers only: what the whole gradient's norm and direction hardly show.

    test = LayerTest(ranks=4, log_threshold=16.6)
    findings = test.step(record.step, evidence.layers, evidence.label_tokens)      # one per flagged rank

Two statistics of each layer l and rank r are followed, both *against the rank's own other layers*:

* size: log |g_rl| minus the median of log |g_rk| over the other layers k;
* direction: the cosine of g_rl with the others' mean of that layer, minus the median of the rank's other layers.

What all layers of a rank share - a short batch, a scaled loss, a gradient that is wrong as a whole - cancels; that is
the business of :mod:`ds_silent.detectors.outlier`. The evidence is that of :mod:`ds_silent.detectors.layer_evidence`.

Where it is not known that rows are dealt at random, both statistics are taken against the rank's own past, see
:mod:`ds_silent.detectors.own_past`: which layers a rank's own rows train is no fault. A layer is noted once, as other
rows may do it, if the rank's loss changes too, if the change comes step by step, if it stays within what the layer has
been, or if the same layer of other ranks changes as far, as while it begins to learn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_silent.config import EffectsConfig
from ds_silent.detectors.finding import Finding
from ds_silent.detectors.layer_evidence import LayerEvidence
from ds_silent.detectors.own_past import OwnPast
from ds_silent.detectors.sequential import Array, Flags, clip, median, only
from ds_silent.detectors.symptoms import SUDDEN, beyond, is_gradual, moved_alone
from ds_silent.measure.evidence import LayerValues
from ds_silent.records import Event, Score, Severity
from ds_silent.text import named

WINDOW = 64  # steps that make a rank's own past
MOVES, TURNS, TOKENS = 0.02, 0.01, 0.02  # of a layer's log norm, its cosine, the log label tokens: always expected
HISTORY_STEPS, HISTORY_NUMBERS = 256, 1 << 20  # of the sizes, where a rank is compared with its past; down to 8 steps
NEWEST = 8  # steps that say which layer it is, and by how much
REST = math.log(1.5)  # from which on the rank's other layers are what is off
ZERO = 20.0  # log of the ratio at which a layer without gradient is held
_REMEDY = (
    "Look for code that treats this layer differently on this rank (a factor, a frozen or detached part, another dtype "
    "or kernel); if there is none, run this host's hardware diagnostics: silent data corruption looks like this."
)

_CLIPPED = "Look for clipping or scaling before the reduction on this rank, of each parameter or value by itself."


@dataclass
class LayerFlag:
    """A rank that is named or noted for one of its layers."""

    ranks: Sequence[int]
    where: str  # the layer
    direction: bool  # the direction is off; else the size
    component: int  # the tilt that goes on comparing it
    series: int
    more: int  # layers that are off by half as much, or more
    shift: float  # by how much it is off, against the rank's other layers
    own: float  # log norm or cosine
    others: float
    since: int
    score: float
    left: float  # log evidence; at half of the threshold the fault has ended
    severity: Severity = "warning"

    @property
    def layers(self) -> str:
        """Name the layer, and count the others that are off with it."""
        return self.where + (f" and {self.more} more layer{'s' * (self.more > 1)}" if self.more else "")


class LayerTest:
    """Follow the layers of one run's ranks."""

    def __init__(self, ranks: int, log_threshold: float, sizes: EffectsConfig | None = None):
        self.scores: tuple[Score, ...] = ()
        self.notes: tuple[Event, ...] = ()
        self.ranks, self._sizes = ranks, sizes or EffectsConfig()
        self._own: OwnPast | None = None  # where rows are not known to be dealt at random
        self._random, self._turns = True, False  # how rows are dealt; whether layers have directions
        self._threshold = log_threshold + math.log(ranks)
        self._test = LayerEvidence(ranks)
        self._flagged: dict[int, LayerFlag] = {}

    def step(
        self,
        step: int,
        seen: LayerValues | None,
        label_tokens: Sequence[float] | None,
        random: bool = True,
        plain: Callable[[int, int], bool] = lambda rank, since: True,
    ) -> list[Finding]:
        """Return a finding per flagged rank; ``plain``: whether a rank's loss is since a step as it was before."""
        self.scores, self.notes = (), ()
        if seen is None or len(seen.names) < 2:
            return self.standing()
        values = _values(seen, label_tokens, self.ranks)
        self._turns = seen.cosines is not None
        if random != self._random:  # values are of another unit
            self._test.load_scales(None)
        if len(values) != self._test.series or random != self._random:
            self._random = random
            self._start(len(values))
        _remember(self._recent, seen)
        healthy = np.ones(self.ranks, dtype=bool)
        healthy[list(self._flagged)] = False
        tokens, slack = values[-1], None
        if self._own is not None:
            self._sizes_before.append((step, values[: self._directions].astype(np.float32)))
            moved = self._own.moved(values)
            self._moves += (np.where(np.isnan(moved[:-1]), 0.0, moved[:-1]) - self._moves) / NEWEST
            values, slack = self._own.step(moved, values, healthy)
        self._test.step(step, values, healthy, slack)
        compared = tokens[np.isfinite(tokens) & healthy]
        if len(compared) and compared.min() == compared.max():
            self._test.halve_tokens()
        self._end()
        if healthy.sum() > 1:
            self._flag(step, seen.names, healthy, plain)
        else:  # nobody is left to compare the last one with
            self._test.forget(healthy)
        return self.standing()

    def standing(self) -> list[Finding]:
        """Return the findings of the ranks that are flagged already, for a step at which ranks cannot be compared."""
        return [_finding(rank, flag, self._threshold, self._own is None) for rank, flag in self._flagged.items()]

    # -- one step ------------------------------------------------------------------------------------------------------

    def _start(self, series: int) -> None:
        steps = max(8, min(HISTORY_STEPS, HISTORY_NUMBERS // (series * self.ranks)))
        self._sizes_before: deque[tuple[int, npt.NDArray[np.float32]]] = deque(maxlen=steps)  # (L, N) each
        self._moves: Array = np.zeros((series - 1, self.ranks))  # against the rank's own past, over the newest steps
        self._recent: dict[bool, Array] = {}  # sizes and directions: (N, L) means over the newest steps
        self._own = None
        self._test.start(series)
        if not self._random:
            self._flagged = {}
            smallest = np.array([MOVES] * (series - 1) + [TOKENS])
            smallest[self._directions : -1] = TURNS
            self._own = OwnPast(series, self.ranks, WINDOW, smallest)

    # -- who is flagged ------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        for rank, flag in list(self._flagged.items()):
            known = flag.series < self._test.series
            gain = float(self._test.gain[flag.component, flag.series, rank]) if known else 1.0
            if math.isfinite(gain):
                flag.left = min(flag.left + math.log(max(gain, 1e-300)), self._threshold)
            if flag.left < self._threshold / 2:
                del self._flagged[rank]
                self._test.forget(only(rank, self.ranks))
                if self._own is not None:
                    self._own.forget(only(rank, self.ranks))

    def _flag(self, step: int, names: tuple[str, ...], healthy: Flags, plain: Callable[[int, int], bool]) -> None:
        score = np.where(healthy, self._test.score(), -np.inf)
        rank = int(np.argmax(score))
        self.scores = (Score("layers", float(score[rank]), self._threshold, rank),)
        if not score[rank] >= self._threshold:
            return
        series, component = self._test.strongest(rank)
        direction = series >= len(names)
        own, others, shift = self._shifts(rank, direction, healthy)
        layer = int(np.argmax(np.abs(shift)))
        where = layer + len(names) * direction
        best = self._test.strongest_tilt(where, rank)
        if self._test.evidence[best, where, rank] > 1.0:
            series, component = where, best
        compared = np.flatnonzero(healthy).tolist()
        flag = LayerFlag(
            ranks=compared if len(compared) == 2 else [rank],
            where=names[layer],
            direction=direction,
            component=component,
            series=series,
            more=int((np.abs(shift) >= np.abs(shift[layer]) / 2.0).sum()) - 1,
            shift=float(shift[layer]),
            own=float(own[layer]),
            others=float(others[layer]),
            since=self._test.onset(series, component, rank),
            score=float(score[rank]),
            left=self._threshold,
            severity=self._severity(float(shift[layer]), direction),
        )
        if self._own is not None and flag.severity != "info":
            peers = [other for other in compared if other != rank]
            if not plain(rank, flag.since) or self._of_rows(step, flag.since, rank, layer, peers):
                flag.severity = "info"
        if self._own is not None and flag.severity == "info":
            self.notes = (_note(step, rank, flag, self._threshold),)
            self._own.forget(only(rank, self.ranks))
            self._test.forget(healthy)
        else:
            self._flagged[rank] = flag
            self._test.forget(healthy & ~only(rank, self.ranks))  # they were compared with a faulty rank
        self._test.unlearn(flag.since)

    def _shifts(self, rank: int, direction: bool, healthy: Flags) -> tuple[Array, Array, Array]:
        """Return (L,) newest values of a rank, the others' medians, and by how much each layer is off against the rest.

        The others' medians hold the layer that is off, so that the calmest layer may have the most evidence. These say
        which layer it is.
        """
        others = healthy & ~only(rank, self.ranks)
        recent = np.nan_to_num(self._recent[direction])
        middle = np.median(recent[others], axis=0)
        shift = recent[rank] - middle
        if self._own is not None:
            moves = self._moves[self._directions :] if direction else self._moves[: self._directions]
            shift = moves[:, rank] - np.median(moves[:, others], axis=1)
        return recent[rank], middle, shift - np.median(shift)

    def _severity(self, shift: float, direction: bool) -> Severity:
        """Return the severity by size alone: whether rows explain it is asked separately."""
        if self._own is None:
            least = self._sizes.direction if direction else math.log1p(self._sizes.layer)
        else:
            least = math.inf if direction else math.log1p(self._sizes.changed_norm)
        return "warning" if abs(shift) >= least else "info"

    def _of_rows(self, step: int, since: int, rank: int, layer: int, others: list[int]) -> bool:
        """Whether a rank's own rows may have changed the size of its layer: slowly, as before, or as other ranks'."""
        if step - since > SUDDEN:
            return True
        seen = np.array([values[layer] for _, values in self._sizes_before], dtype=np.float64)  # (T, N)
        at = np.array([number for number, _ in self._sizes_before])
        known = np.isfinite(seen[:, rank]) & np.isfinite(seen[:, others]).all(axis=1)
        before, after = seen[known & (at < since)], seen[known & (at >= since)]
        if not moved_alone(before, after, rank, others):
            return True
        apart = [part[:, rank] - np.median(part[:, others], axis=1) for part in (before, after)]
        further = beyond(*apart)
        return is_gradual(*apart) or (further is not None and further < math.log1p(self._sizes.changed_norm))

    @property
    def _directions(self) -> int:
        """Return where the directions begin among the series: behind the sizes of all layers, or at the end."""
        return (self._test.series - 1) // 2 if self._turns else self._test.series - 1

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: who is flagged and the scales. The rest would be as many numbers as layers x ranks x tilts."""
        return {
            "ranks": self.ranks,
            "random": self._random,
            "flagged": {str(rank): asdict(flag) for rank, flag in self._flagged.items()},
            "spreads": self._test.scales(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict` of as many ranks."""
        self._flagged = {int(rank): LayerFlag(**flag) for rank, flag in state["flagged"].items()}
        self._random = state.get("random", self._random)
        self._test.load_scales(state["spreads"])


def _note(step: int, rank: int, flag: LayerFlag, threshold: float) -> Event:
    message = (
        f"Rank {rank}'s data are of another kind since about step {flag.since}: the gradient of {flag.layers} changed "
        "against its other layers. Other rows on this rank look like this."
    )
    remedy = "Nothing to do if this rank's rows changed there; else look for code that treats this layer differently."
    place = tuple(flag.ranks), flag.where
    return Event(step, "outlier-rank", "info", *place, flag.score, threshold, message, remedy)


def _finding(rank: int, flag: LayerFlag, threshold: float, random: bool) -> Finding:
    ranks, where = tuple(flag.ranks), flag.where
    two, moved = len(ranks) == 2, random and _others_moved(flag)
    others = "the other rank" if two else "the other ranks"
    shift, remedy = flag.shift, _CLIPPED if moved else _REMEDY
    if flag.direction:
        what = "agrees less" if flag.shift < 0 else "agrees more"
        how = (
            f"{what} with the other ranks' mean than theirs do (cosine {flag.own:.2f}, median of the others "
            f"{flag.others:.2f})"
        )
    elif moved:
        whole, rest = (math.exp(x) for x in (flag.own - flag.others, flag.own - flag.others - shift))
        how = f"is {whole:.2g} times what it is on {others}, and its other layers {rest:.2g} times"
    elif flag.shift < -ZERO / 4:
        how = f"is nearly or exactly zero, and not on {others}"
    else:
        what = "larger" if flag.shift > 0 else "smaller"
        about = f"about {math.exp(min(flag.shift, ZERO)):.2g} times"
        how = f"is {what}, measured by its other layers, than on {others} ({about} in the newest steps)"
    whose = f"{named(ranks).capitalize()} disagree: the" if two else f"Rank {rank}'s"
    nobody = "; with two ranks to compare nobody can say which of them is wrong" if two else ""
    of = f" of rank {rank}" if two else ""
    message = f"{whose} gradient of {flag.layers}{of} {how}, since about step {flag.since}{nobody}."
    if two:
        remedy = remedy.replace("this rank", "one of them").replace("this host's", "both ranks'")
    key, severity, score = f"outlier-layer:{rank}", flag.severity, flag.score
    found = Finding(key, "outlier-rank", severity, ranks, where, score, threshold, message, remedy, flag.since)
    effect = None if flag.direction else math.exp(max(-ZERO, min(flag.shift, ZERO)))
    return replace(found.by_chance(), effect=effect)


def _others_moved(flag: LayerFlag) -> bool:
    """Return whether the layer is about as large as on the others, and the rank's other layers are not."""
    whole = flag.own - flag.others
    return not flag.direction and abs(whole - flag.shift) > max(2.0 * abs(whole), REST)


def _values(seen: LayerValues, label_tokens: Sequence[float] | None, ranks: int) -> Array:
    """(S + 1, N): sizes, directions, and last the label tokens."""
    with np.errstate(all="ignore"):
        rows = [clip(_against_others(seen.log_norms), -ZERO, ZERO).T]
        if seen.cosines is not None:
            rows.append(_against_others(seen.cosines).T)
        tokens = np.full(ranks, np.nan) if label_tokens is None else np.log(np.asarray(label_tokens, float))
    return np.vstack([*rows, tokens[None]])


def _remember(recent: dict[bool, Array], seen: LayerValues) -> None:
    """Follow the sizes and the directions over the newest steps."""
    for direction, values in ((False, seen.log_norms), (True, seen.cosines)):
        if values is None:
            continue
        largest = np.where(np.isnan(values), -np.inf, values).max(axis=1, keepdims=True)
        held = values if direction else np.maximum(values, largest - ZERO)
        known = recent.get(direction, held)
        with np.errstate(invalid="ignore"):  # of a layer without a gradient
            recent[direction] = np.where(np.isfinite(held), known + (held - known) / NEWEST, known)


def _against_others(values: Array) -> Array:
    """(N, L) minus each rank's median of its other layers; of all its layers where there are many."""
    count = values.shape[1]
    if count > 8:
        return np.asarray(values - median(values)[:, None])
    others = np.stack([np.delete(values, layer, axis=1) for layer in range(count)], axis=1)
    return np.asarray(values - median(others))
