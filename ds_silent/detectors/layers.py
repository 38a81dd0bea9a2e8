"""One rank whose gradient is off in some layers only: what the whole gradient's norm and direction hardly show.

    test = LayerTest(ranks=4, log_threshold=16.6)
    findings = test.step(record.step, evidence.layers, evidence.label_tokens)      # one per flagged rank

Two statistics of each layer l and rank r are followed, both *against the rank's own other layers*:

* size: log |g_rl| minus the median of log |g_rk| over the other layers k;
* direction: the cosine of g_rl with the others' mean of that layer, minus the median of the rank's other layers.

What all layers of a rank share - a short batch, a scaled loss, a gradient that is wrong as a whole - cancels; that is
the business of :mod:`ds_silent.detectors.outlier`. What is left is much calmer than the norms themselves, so that a
factor of 1.5 in one of 28 layers shows within some steps. A function of a rank's own values that is the same for all
ranks keeps exchangeable ranks exchangeable, so the null hypothesis and the evidence of one step are those of
:mod:`ds_silent.detectors.sequential`: with z the residual against the other ranks and t a tilt,

    L_r = exp(t z_r) / mean over the ranks (and, for half of the weight, the past) of exp(t z),        E L_r = 1,

and M = (1 + M) L (Shiryaev-Roberts) has the expectation n after n steps.

The mixture. S = 2 x layers series, C tilts with weights w_c, N ranks: every M_scr by itself has E M = n, so the mean

    M_r = (1 / S) sum over s, c of w_c M_scr,      E M_r = n,      (1 / N) sum over r of M_r reaches A after A steps or
                                                                    more in the mean,

however the layers depend on each other: a mean of expectations asks for no independence. Rank r is flagged when M_r >=
N A, so all layers, statistics, tilts and ranks together raise the false alarms that A allows, and each of S series pays
log S for the company of the others: 4 nats with 28 layers. A fault in several layers adds up.

Label tokens that are dealt unevenly break the null without a fault: as in ``outlier``, the evidence is divided by that
of the rank's label tokens, which can only lower it, and takes half of its logarithm back where all ranks have as many.

Where it is not known that rows are dealt at random, both statistics are taken against the rank's own past, see
:mod:`ds_silent.detectors.own_past`: which layers a rank's own rows train is no fault. A layer that changes while the
rank's loss changes too, or step by step, or not beyond what it has been, or no further than the same layer of other
ranks, is written once, as a note: other rows do that, as while a layer begins to learn.

There may be 30,000 series x ranks, on the training thread of one rank: so powers of one exponential instead of many,
products instead of sums of logarithms, sums of the past instead of the past.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_silent.config import EffectsConfig
from ds_silent.detectors.effects import SUDDEN, beyond, is_gradual, moved_alone
from ds_silent.detectors.finding import Finding
from ds_silent.detectors.own_past import OwnPast
from ds_silent.measure.evidence import LayerValues
from ds_silent.records import Event, Score, Severity
from ds_silent.text import named

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

WINDOW = 64  # steps that make a rank's own past
MOVES, TURNS, TOKENS = 0.02, 0.01, 0.02  # of a layer's log norm, its cosine, the log label tokens: always expected
WITHIN, HISTORY = (0.25, 1.0, 4.0), (1.0, 4.0)
"""Tilts. Shifts between two of them lose a quarter of their speed at most."""
CLIP = 4.0  # deviations beyond which all are equally extreme
POOL, SCALES = 1024, 64  # residuals remembered, over all ranks; steps whose spread makes the scale
FEW = 16  # ranks up to which each is compared with exactly the others
HISTORY_STEPS, HISTORY_NUMBERS = 256, 1 << 20  # of the sizes, where a rank is compared with its past; down to 8 steps
NEWEST = 8  # steps that say which layer it is, and by how much
REST = math.log(1.5)  # from which on the rank's other layers are what is off
ZERO = 20.0  # log of the ratio at which a layer without gradient is held
RESOLUTION = 1e-6  # relative differences that are rounding, not spread
TOGETHER = 1024  # ranks
MOST = 1e100  # evidence that need not grow
_SIGNS = np.array([*(1,) * 3, *(-1,) * 3, *(1,) * 2, *(-1,) * 2])
_REMEMBERS = np.array([False] * 6 + [True] * 4)
_MIDDLE = [1, 4]
_WEIGHTS = np.where(_REMEMBERS, 0.25 / len(HISTORY), 0.25 / len(WITHIN))
_REMEDY = (
    "Look for code that treats this layer differently on this rank (a factor, a frozen or detached part, another dtype "
    "or kernel); if there is none, run this host's hardware diagnostics: silent data corruption looks like this."
)

_CLIPPED = "Look for clipping or scaling before the reduction on this rank, of each parameter or value by itself."


class LayerTest:
    """Follows the layers of one run's ranks.

    Args:
        ranks: N, at least 2.
        log_threshold: log A of the mean number of measured steps between false alarms of this detector.
        sizes: below which a finding is a note.

    Attributes:
        scores: the largest score of the ranks compared at the newest step.
        notes: of the newest step: changes that the rank's rows may have made.
    """

    def __init__(self, ranks: int, log_threshold: float, sizes: EffectsConfig | None = None):
        self.scores: tuple[Score, ...] = ()
        self.notes: tuple[Event, ...] = ()
        self.ranks, self._sizes = ranks, sizes or EffectsConfig()
        self._own: OwnPast | None = None  # where rows are not known to be dealt at random
        self._random, self._turns = True, False  # how rows are dealt; whether layers have directions
        self._threshold = log_threshold + math.log(ranks)
        self._series = 0  # known with the first values
        self._flagged: dict[int, dict[str, Any]] = {}
        self._of_tokens: Array = np.ones((ranks, len(_WEIGHTS)))  # CUSUM, at least 1
        self._spreads: Array | None = None
        self._spread_steps = np.full(SCALES, -1, dtype=np.int64)

    def step(
        self,
        step: int,
        seen: LayerValues | None,
        label_tokens: Sequence[float] | None,
        random: bool = True,
        plain: Callable[[int, int], bool] = lambda rank, since: True,
    ) -> list[Finding]:
        """Findings of one step: one per flagged rank.

        Args:
            random: whether rows are known to be dealt at random.
            plain: whether a rank's loss is since a step as it was before.
        """
        self.scores, self.notes = (), ()
        if seen is None or len(seen.names) < 2:
            return self.standing()
        values = self._values(seen, label_tokens)
        self._turns = seen.cosines is not None
        if len(values) != self._series or random != self._random:
            self._random = random
            self._start(len(values))
        self._remember(seen)
        healthy = np.array([rank not in self._flagged for rank in range(self.ranks)])
        tokens, slack = values[-1], None
        if self._own is not None:
            self._sizes_before.append((step, values[: self._directions].astype(np.float32)))
            moved = self._own.moved(values)
            self._moves += (np.nan_to_num(moved[:-1]) - self._moves) / NEWEST
            change = self._own.step(moved, values, healthy)
            values, slack = change.deviations, change.slack
        known = np.isfinite(values)
        known &= ((known & healthy).sum(axis=1) >= 1)[:, None] & (known.sum(axis=1) >= 2)[:, None]
        residuals, spreads, scales = self._residuals(np.where(known, values, 0.0), known & healthy)
        self._grow(step, residuals, known, known & healthy, None if slack is None else slack / scales)
        self._learn(step, residuals, spreads, known & healthy)
        if len(np.unique(tokens[np.isfinite(tokens) & healthy])) == 1:
            self._of_tokens = np.sqrt(self._of_tokens)
        self._end()
        if healthy.sum() > 1:
            self._flag(step, seen.names, healthy, plain)
        else:  # nobody is left to compare the last one with
            self._forget(healthy)
        return self.standing()

    def standing(self) -> list[Finding]:
        """What is flagged; also the answer at a step at which ranks cannot be compared."""
        return [self._finding(rank) for rank in self._flagged]

    def score(self) -> Array:
        """(N,) log evidence against each rank, to be compared with the threshold."""
        together = np.log(np.maximum(self._of_series[:-1].mean(axis=0), 1e-300))
        return np.asarray(together - np.log(self._of_tokens @ _WEIGHTS))

    # -- one step ------------------------------------------------------------------------------------------------------

    def _values(self, seen: LayerValues, label_tokens: Sequence[float] | None) -> Array:
        """(S + 1, N): sizes, directions, and last the label tokens."""
        with np.errstate(all="ignore"):
            rows = [np.clip(_against_others(seen.log_norms), -ZERO, ZERO).T]
            if seen.cosines is not None:
                rows.append(_against_others(seen.cosines).T)
            tokens = np.full(self.ranks, np.nan) if label_tokens is None else np.log(np.asarray(label_tokens, float))
        return np.vstack([*rows, tokens[None]])

    def _start(self, series: int) -> None:
        shape = (len(_WEIGHTS), series, self.ranks)
        self._series = series
        steps = max(8, min(HISTORY_STEPS, HISTORY_NUMBERS // (series * self.ranks)))
        self._sizes_before: deque[tuple[int, npt.NDArray[np.float32]]] = deque(maxlen=steps)  # (L, N) each
        self._moves: Array = np.zeros((series - 1, self.ranks))  # against the rank's own past, over the newest steps
        self._own = None
        if not self._random:
            self._flagged = {}
            smallest = np.array([MOVES] * (series - 1) + [TOKENS])
            smallest[self._directions : -1] = TURNS
            self._own = OwnPast(series, self.ranks, WINDOW, smallest)
        self._evidence = np.zeros(shape)  # M
        self._gain = np.ones(shape)  # L of the newest step
        self._of_series = np.zeros(shape[1:])  # weighted mean of M over the tilts
        self._of_tokens = np.ones((self.ranks, len(_WEIGHTS)))
        self._cusum = np.ones((2, *shape[1:]))  # of the middle tilt, up and down: for the onset
        self._since = np.zeros((2, *shape[1:]), dtype=np.int64)
        self._recent: dict[bool, Array] = {}  # sizes and directions: (N, L) means over the newest steps
        if self._spreads is None or self._spreads.shape[1] != series:
            self._spreads = np.full((SCALES, series), np.nan)
            self._spread_steps = np.full(SCALES, -1, dtype=np.int64)
        length = max(1, POOL // self.ranks)
        self._past = np.zeros((length, int(_REMEMBERS.sum()), series))  # sums over the ranks of exp(t z)
        self._past_counts = np.zeros((length, series))
        self._past_steps = np.full(length, -1, dtype=np.int64)
        self._taken = 0

    def _residuals(self, values: Array, peers: Flags) -> tuple[Array, Array, Array]:
        """(S, N) deviations from the peers' middle in units of their spread, clipped; (S,) that spread; (S, N) or
        (S, 1) the units."""
        assert self._spreads is not None
        with np.errstate(all="ignore"):
            past = np.nan_to_num(_median(self._spreads.T))[:, None]
            own = np.where(peers, values, np.nan)
            if self.ranks <= FEW:
                middle, spread = _others(own)
                whole = _spread(own)
            else:
                middle = _median(own)[:, None]
                whole = _median(np.abs(own - middle)) * 1.4826  # of normal values, their standard deviation
                spread = whole[:, None]
        floor = RESOLUTION * np.maximum(np.abs(middle), RESOLUTION)
        scale = np.maximum(np.maximum(np.nan_to_num(spread), past), floor)
        return np.clip((values - np.nan_to_num(middle)) / scale, -CLIP, CLIP), whole, scale

    def _grow(self, step: int, residuals: Array, known: Flags, peers: Flags, slack: Array | None) -> None:
        count = np.repeat(peers.sum(axis=1)[None].astype(float), len(self._gain), axis=0)
        total = np.zeros_like(count)
        for part in self._parts():
            gain = self._gain[:, :, part]
            quarter = np.exp(residuals[:, part] / 4.0)
            whole = np.square(np.square(quarter))
            four = np.square(np.square(whole))
            up = np.stack([quarter, whole, four])
            down = 1.0 / up
            gain[:3], gain[3:6], gain[6:8], gain[8:] = up, down, up[1:], down[1:]
            total += self._sums(gain, peers[:, part])
        if slack is not None:  # off every bet
            bet = np.exp(-slack / 4.0)
            less = np.stack([bet, bet**4, bet**16])
            for first, last in ((0, 3), (3, 6)):
                self._gain[first:last] *= less
            for first, last in ((6, 8), (8, 10)):
                self._gain[first:last] *= less[1:]
        total[_REMEMBERS] += self._past.sum(axis=0)
        count[_REMEMBERS] += self._past_counts.sum(axis=0)
        for part in self._parts():
            self._grow_part(step, part, total, count, known[:, part], peers[:, part])
        of_tokens = np.clip(self._of_tokens * self._gain[:, -1].T, 1.0, MOST)
        self._of_tokens = np.where(known[-1][:, None], of_tokens, self._of_tokens)

    def _parts(self) -> Iterator[slice]:
        """Of the ranks, so many that what is made of them stays in a cache."""
        return (slice(begin, begin + TOGETHER) for begin in range(0, self.ranks, TOGETHER))

    def _grow_part(self, step: int, part: slice, total: Array, count: Array, known: Flags, peers: Flags) -> None:
        gain, evidence = self._gain[:, :, part], self._evidence[:, :, part]
        outsiders = known & ~peers
        if outsiders.any():  # flagged ranks: compared with the peers and themselves
            gain *= (count[:, :, None] + outsiders) / np.maximum(total[:, :, None] + outsiders * gain, 1e-300)
        else:
            gain *= (count / np.maximum(total, 1e-300))[:, :, None]
        if not known.all():
            gain[:, ~known] = np.nan
        cusum, since = self._cusum[:, :, part], self._since[:, :, part]
        since[cusum <= 1.0] = step
        np.clip(cusum * np.where(known, gain[_MIDDLE], 1.0), 1.0, MOST, out=cusum)
        grown = evidence + 1.0
        grown *= gain
        np.minimum(grown, MOST, out=grown)
        evidence[...] = grown if known.all() else np.where(known, grown, evidence)
        self._of_series[:, part] = np.einsum("c,csr->sr", _WEIGHTS, evidence)

    @staticmethod
    def _sums(tilted: Array, peers: Flags) -> Array:
        return np.asarray(tilted.sum(axis=2) if peers.all() else np.einsum("csr,sr->cs", tilted, peers.astype(float)))

    def _learn(self, step: int, residuals: Array, spreads: Array, peers: Flags) -> None:
        assert self._spreads is not None
        measured = np.isfinite(spreads)
        if measured.any():  # one rank alone has no spread, and what was known stays
            at = self._taken % SCALES
            self._spreads[at, measured], self._spread_steps[at] = spreads[measured], step
        at = self._taken % len(self._past)
        large = np.where(peers, np.exp(residuals), 0.0)
        small = np.where(peers, np.exp(-residuals), 0.0)
        for place, tilted in enumerate((large, large**4, small, small**4)):
            self._past[at, place] = tilted.sum(axis=1)
        self._past_counts[at], self._past_steps[at] = peers.sum(axis=1), step
        self._taken += 1

    # -- who is flagged ------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        for rank, flag in list(self._flagged.items()):
            gain = float(self._gain[flag["component"], flag["series"], rank]) if flag["series"] < self._series else 1.0
            if math.isfinite(gain):
                flag["left"] = min(flag["left"] + math.log(max(gain, 1e-300)), self._threshold)
            if flag["left"] < self._threshold / 2:
                del self._flagged[rank]
                self._forget(np.arange(self.ranks) == rank)
                if self._own is not None:
                    self._own.forget(np.arange(self.ranks) == rank)

    def _remember(self, seen: LayerValues) -> None:
        for direction, values in ((False, seen.log_norms), (True, seen.cosines)):
            if values is None:
                continue
            largest = np.where(np.isnan(values), -np.inf, values).max(axis=1, keepdims=True)
            held = values if direction else np.maximum(values, largest - ZERO)
            known = self._recent.get(direction, held)
            self._recent[direction] = np.where(np.isfinite(held), known + (held - known) / NEWEST, known)

    def _flag(self, step: int, names: tuple[str, ...], healthy: Flags, plain: Callable[[int, int], bool]) -> None:
        score = np.where(healthy, self.score(), -np.inf)
        rank = int(np.argmax(score))
        self.scores = (Score("layers", float(score[rank]), self._threshold, rank),)
        if not score[rank] >= self._threshold:
            return
        series = int(np.argmax(self._of_series[:-1, rank]))
        component = int(np.argmax(self._evidence[:, series, rank] * _WEIGHTS))
        direction = series >= len(names)
        # The others' medians hold the layer that is off, so the calmest layer may have the most evidence. What was
        # measured says which it is.
        recent = np.nan_to_num(self._recent[direction])
        others = np.median(recent[healthy & (np.arange(self.ranks) != rank)], axis=0)
        shift = recent[rank] - others
        if self._own is not None:
            part = slice(self._directions, None) if direction else slice(self._directions)
            moves = self._moves[part]
            shift = moves[:, rank] - np.median(moves[:, healthy & (np.arange(self.ranks) != rank)], axis=1)
        shift -= np.median(shift)
        layer = int(np.argmax(np.abs(shift)))
        where = layer + len(names) * direction
        best = int(np.argmax(self._evidence[:, where, rank] * _WEIGHTS))
        if self._evidence[best, where, rank] > 1.0:
            series, component = where, best
        peers = [int(other) for other in np.flatnonzero(healthy)]
        since = int(self._since[int(_SIGNS[component] < 0), series, rank])
        flag = {
            "ranks": peers if len(peers) == 2 else [rank],
            "where": names[layer],
            "direction": direction,
            "component": component,
            "series": series,
            "more": int((np.abs(shift) >= np.abs(shift[layer]) / 2.0).sum()) - 1,
            "shift": float(shift[layer]),
            "own": float(recent[rank, layer]),
            "others": float(others[layer]),
            "since": since,
            "score": float(score[rank]),
            "left": self._threshold,
            "severity": self._severity(float(shift[layer]), direction),
        }
        if self._own is not None and flag["severity"] != "info":
            peers = np.flatnonzero(healthy & (np.arange(self.ranks) != rank)).tolist()
            if not plain(rank, since) or self._of_rows(step, since, rank, layer, peers):
                flag["severity"] = "info"
        if self._own is not None and flag["severity"] == "info":
            self.notes = (self._note(step, rank, flag),)
            self._own.forget(np.arange(self.ranks) == rank)
            self._forget(healthy)
        else:
            self._flagged[rank] = flag
            self._forget(healthy & (np.arange(self.ranks) != rank))  # they were compared with a faulty rank
        spoiled = self._past_steps >= since
        self._past[spoiled], self._past_counts[spoiled] = 0.0, 0.0
        assert self._spreads is not None
        self._spreads[self._spread_steps >= since] = np.nan

    def _severity(self, shift: float, direction: bool) -> Severity:
        """By size alone: of ranks whose rows are dealt at random; of others as far as their rows do not explain it."""
        sizes = self._sizes
        if self._own is None:
            least = sizes.direction if direction else math.log1p(sizes.layer)
            return "warning" if abs(shift) >= least else "info"
        return "warning" if not direction and abs(shift) >= math.log1p(sizes.changed_norm) else "info"

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

    def _note(self, step: int, rank: int, flag: dict[str, Any]) -> Event:
        more = f" and {flag['more']} more layer{'s' * (flag['more'] > 1)}" if flag["more"] else ""
        message = (
            f"Rank {rank}'s data are of another kind since about step {flag['since']}: the gradient of {flag['where']}"
            f"{more} changed against its other layers. Other rows on this rank look like this."
        )
        remedy = (
            "Nothing to do if this rank's rows changed there; else look for code that treats this layer differently."
        )
        where, ranks = flag["where"], tuple(flag["ranks"])
        return Event(step, "outlier-rank", "info", ranks, where, flag["score"], self._threshold, message, remedy)

    def _forget(self, ranks: Flags) -> None:
        self._evidence[:, :, ranks] = 0.0
        self._of_series[:, ranks] = 0.0
        self._cusum[:, :, ranks] = 1.0
        self._of_tokens[ranks] = 1.0

    @property
    def _directions(self) -> int:
        """Where the directions begin among the series: behind the sizes of as many layers; or there are none."""
        return (self._series - 1) // 2 if self._turns else self._series - 1

    def _finding(self, rank: int) -> Finding:
        flag = self._flagged[rank]
        ranks, where = tuple(flag["ranks"]), flag["where"]
        two = len(ranks) == 2
        others = "the other rank" if two else "the other ranks"
        more = f" and {flag['more']} more layer{'s' * (flag['more'] > 1)}" if flag["more"] else ""
        shift, remedy = flag["shift"], _CLIPPED if self._others_moved(flag) else _REMEDY
        if flag["direction"]:
            what = "agrees less" if flag["shift"] < 0 else "agrees more"
            how = (
                f"{what} with the other ranks' mean than theirs do (cosine {flag['own']:.2f}, median of the others "
                f"{flag['others']:.2f})"
            )
        elif self._others_moved(flag):
            whole, rest = (math.exp(x) for x in (flag["own"] - flag["others"], flag["own"] - flag["others"] - shift))
            how = f"is {whole:.2g} times what it is on {others}, and its other layers {rest:.2g} times"
        elif flag["shift"] < -ZERO / 4:
            how = f"is nearly or exactly zero, and not on {others}"
        else:
            what = "larger" if flag["shift"] > 0 else "smaller"
            about = f"about {math.exp(min(flag['shift'], ZERO)):.2g} times"
            how = f"is {what}, measured by its other layers, than on {others} ({about} in the newest steps)"
        whose = f"{named(ranks).capitalize()} disagree: the" if two else f"Rank {rank}'s"
        nobody = "; with two ranks to compare nobody can say which of them is wrong" if two else ""
        of = f" of rank {rank}" if two else ""
        message = f"{whose} gradient of {where}{more}{of} {how}, since about step {flag['since']}{nobody}."
        return Finding(
            key=f"outlier-layer:{rank}",
            kind="outlier-rank",
            severity=flag.get("severity", "warning"),
            ranks=ranks,
            where=where,
            score=flag["score"],
            threshold=self._threshold,
            effect=None if flag["direction"] else math.exp(max(-ZERO, min(flag["shift"], ZERO))),
            message=message,
            remedy=remedy.replace("this rank", "one of them").replace("this host's", "both ranks'") if two else remedy,
            since=flag["since"],
            log_excess=flag["score"] - self._threshold,
        )

    def _others_moved(self, flag: dict[str, Any]) -> bool:
        """Whether the layer is about as large as on the others, and the rank's other layers are not."""
        whole = abs(flag["own"] - flag["others"])
        rest = abs(flag["own"] - flag["others"] - flag["shift"])
        return self._own is None and not flag["direction"] and rest > max(2.0 * whole, REST)

    # -- a resume ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: who is flagged and the scales. Evidence that is not enough yet starts anew: it would be as many
        numbers as there are layers, ranks and tilts."""
        return {
            "ranks": self.ranks,
            "flagged": {str(rank): flag for rank, flag in self._flagged.items()},
            "spreads": None if self._spreads is None else np.nan_to_num(_median(self._spreads.T)).tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; of another number of ranks nothing can be taken over."""
        if state["ranks"] != self.ranks:
            return
        self._flagged = {int(rank): dict(flag) for rank, flag in state["flagged"].items()}
        if state["spreads"] is not None:
            self._spreads = np.full((SCALES, len(state["spreads"])), np.nan)
            self._spread_steps = np.full(SCALES, -1, dtype=np.int64)
            self._spreads[-1] = state["spreads"]


def _against_others(values: Array) -> Array:
    """(N, L) minus each rank's median of its other layers; of all its layers where there are many."""
    count = values.shape[1]
    if count > 8:
        return np.asarray(values - np.median(values, axis=1, keepdims=True))
    others = np.stack([np.delete(values, layer, axis=1) for layer in range(count)], axis=1)
    return np.asarray(values - np.median(others, axis=2))


def _others(own: Array) -> tuple[Array, Array]:
    """(S, N) with NaN to the median and the spread of the *other* known values of each row."""
    without = np.repeat(own[:, None, :], own.shape[1], axis=1)
    without[:, np.arange(own.shape[1]), np.arange(own.shape[1])] = np.nan
    return _median(without), _spread(without)


def _median(values: Array) -> Array:
    """Over the last axis, of what is known; NaN where nothing is."""
    ordered = np.sort(values, axis=-1)  # NaN comes last
    count = np.isfinite(values).sum(axis=-1)
    low = np.take_along_axis(ordered, np.maximum(count - 1, 0)[..., None] // 2, axis=-1)[..., 0]
    high = np.take_along_axis(ordered, np.minimum(count // 2, values.shape[-1] - 1)[..., None], axis=-1)[..., 0]
    return np.asarray((low + high) / 2.0)


def _spread(values: Array) -> Array:
    """Standard deviation over the last axis, of what is known; 0 of a single value."""
    known = np.isfinite(values)
    count = known.sum(axis=-1)
    mean = np.where(known, values, 0.0).sum(axis=-1) / np.maximum(count, 1)
    squares = np.where(known, np.square(values - mean[..., None]), 0.0).sum(axis=-1)
    return np.asarray(np.sqrt(squares / np.maximum(count - 1, 1)))
