"""From the numbers of a step to what is wrong: who, since when, why, and what to do.

    judge = Judge(config.detectors, interval=config.interval)      # on the writing rank
    events = judge.step(record, Evidence(...))                     # once per measured step, in order

Every detector is a file: what is no number or is missing (``broken``), equal rows (``duplicates``), the order of the
data (``order``), the same order in every epoch (``same_order``), a rank that takes the same rows again (``repeats``)
or another number of rows (``batch_size``), a rank that differs (``outlier``) or one of its layers (``layers``), a rank
whose code does something else (``conduct``), a jump against the run's past (``jump``), a result that is wrong
(``result``). They say what they see at this step; ``episodes`` makes one event of it when it starts and one when it
ends.

``false_alarms_per_million_steps`` is shared equally by the four that judge by chance: order with repeats, outlier with
layers, drift and the rounding bounds of ``result``. The derivations are in ``sequential``, ``layers`` and
``ds_silent.maths.rounding_bound``. The others state facts. Scores and thresholds of the first three are natural
logarithms of evidence: a threshold of 16 says that chance reaches it once in e^16 steps. Their events carry the rate at
which they would just still be told; ``judge.scores`` is what they saw at the newest step, told or not.
"""

from __future__ import annotations

import math
from typing import Any

from ds_silent.capture.conduct import Unlike
from ds_silent.config import DetectorsConfig, EffectsConfig
from ds_silent.detectors import broken, conduct, duplicates
from ds_silent.detectors.batch_size import BatchSizeTest, LabelTokensTest
from ds_silent.detectors.finding import Finding, with_odds
from ds_silent.detectors.jump import JumpTest
from ds_silent.detectors.layers import LayerTest
from ds_silent.detectors.lifecycle import Episodes
from ds_silent.detectors.order import OrderTest
from ds_silent.detectors.outlier import OutlierTest
from ds_silent.detectors.own_weight import OwnWeightTest
from ds_silent.detectors.repeats import RepeatTest
from ds_silent.detectors.result import bounds, notes, reduction, replicas
from ds_silent.detectors.same_order import SameOrderTest
from ds_silent.detectors.sampled_rows import SampledRowsTest
from ds_silent.measure.evidence import Evidence
from ds_silent.records import Event, Scores, StepRecord
from ds_silent.text import TORCH, Words

__all__ = ["Finding", "Judge"]

_BY_CHANCE = 4  # detectors that share the false-alarm rate
_VERSION = 2  # of the state
NOTED_AGAIN = 256
"""Steps after which another change of a rank is noted: rows that go on changing are one note."""


def log_steps(config: DetectorsConfig, interval: int) -> float:
    """Natural logarithm of the mean number of measured steps between two false alarms of one detector."""
    rate = math.log(config.false_alarms_per_million_steps) + math.log(interval)  # a product may leave the floats
    return max(0.0, math.log(1e6 * _BY_CHANCE) - rate)


class Judge:
    """Detectors, baselines and thresholds of one run. Touches nothing but its own state.

    Args:
        config: ``enabled`` is the caller's business.
        interval: optimizer steps between measurements; the rate is per million *optimizer* steps.
        words: the framework's, for what is said of it.
        alike: see :class:`ds_silent.framework.Ranks`; else no rank is compared with the others.
        effects: sizes below which a finding is a note; None: the defaults.

    Attributes:
        scores: what those that judge by evidence saw at the newest step.
    """

    def __init__(
        self,
        config: DetectorsConfig,
        interval: int = 1,
        words: Words = TORCH,
        alike: bool = True,
        effects: EffectsConfig | None = None,
    ):
        self._effects = effects or EffectsConfig()
        self.scores = Scores(0, ())
        self._words, self._alike = words, alike
        self._log_steps = log_steps(config, interval)
        self._rate = config.false_alarms_per_million_steps
        self._episodes = Episodes(self._rate)
        self._order = OrderTest(self._log_steps + math.log(2.0))  # the two share one quarter of the rate
        self._repeats = RepeatTest(self._log_steps + math.log(2.0))
        # judged once an epoch: for a thousandth of the rate a pass needs one or two rows more
        self._same_order = SameOrderTest(self._log_steps + math.log(1000.0), words)
        self._jump = JumpTest(self._log_steps)
        self._batch_size = BatchSizeTest(words)
        self._label_tokens = LabelTokensTest()
        self._outlier: OutlierTest | None = None  # made when the world size is known
        self._layers: LayerTest | None = None
        self._own_weight: OwnWeightTest | None = None
        self._noted: dict[int, int] = {}  # when a rank's rows were last noted
        self._layers_first: set[int] = set()  # ranks of which a layer was named, and not the whole gradient
        self._pairs_before: set[tuple[int, int]] = set()
        self._sampled_rows = SampledRowsTest(self._log_steps)
        self._apart: list[Finding] = []
        self._stale_key: str | None = None
        self._conditional = False  # the model trains other parameters on other ranks, in health

    def told(self, event: Event) -> None:
        """What the preflight has found: it goes on, and what follows from it is no second alarm."""
        self._episodes.told(event)

    def step(self, record: StepRecord, extras: Evidence) -> list[Event]:
        """The events of one measured step, in order of severity of what they are about: broken numbers first."""
        findings = broken.non_finite(record, extras) + broken.zero_gradient(record, extras)
        impaired = bool(findings)
        wrong = reduction(record, extras.reduction, self._words)
        findings += wrong + self._entering(record, extras, bool(wrong)) + self._replicas(record, extras)
        findings += self._batch_size.step(record, extras)
        unlike = conduct.unlike(extras.unlike)
        findings += unlike
        stale = self._stale(record, extras)
        findings += stale
        same = self._duplicates(record, extras)
        findings += same
        told = notes(extras.reduction, self._words)
        again = self._repeats.step(record, extras)
        again += self._order.step(record, extras, bool(same), self._repeats.attributed)
        findings += again
        findings += self._same_order.step(record, extras, bool(again) or self._repeats.attributed > 0)
        saw = [
            *bounds(extras.reduction),
            *(() if self._own_weight is None else self._own_weight.saw),
            *self._repeats.saw,
            *self._order.saw,
            *self._same_order.saw,
        ]
        if record.world_size > 1:
            outliers = []
            if self._alike:
                outliers = self._outliers(record, extras, bool(same), {r for f in stale for r in f.ranks})
                if not same:
                    assert self._outlier is not None
                    assert self._layers is not None
                    told += self._new_notes(record.step, [*self._outlier.notes, *self._layers.notes])
                    saw += [*self._outlier.saw, *self._layers.saw]
            settings = [found for found in unlike if found.kind == "config-mismatch"]
            findings = _without_consequences(findings + outliers, settings)
            if not impaired and not findings:  # never learn from a flagged step
                for note in self._jump.step(record):
                    assert note.score is not None
                    assert note.threshold is not None
                    told.append(with_odds(note, self._rate, note.score - note.threshold))
                saw += self._jump.saw
        self.scores = Scores(record.step, tuple(saw))
        quiet = self._label_tokens.step(record, extras)  # no fault by itself: what is learnt here stays right
        return self._episodes.update(record.step, findings + quiet) + told

    def _entering(self, record: StepRecord, extras: Evidence, told: bool) -> list[Finding]:
        """Ranks whose gradient enters with another weight, where each knows its own: above the gather limit."""
        own = None if extras.reduction is None else extras.reduction.own
        if own is not None and (self._own_weight is None or self._own_weight.ranks != record.world_size):
            # for a thousandth of the rate it takes a few steps more
            self._own_weight = OwnWeightTest(record.world_size, self._log_steps + math.log(1000.0), self._words)
        return [] if self._own_weight is None else self._own_weight.step(record, own, told)

    def _outliers(self, record: StepRecord, extras: Evidence, same: bool, told: set[int]) -> list[Finding]:
        """Ranks that are not like the others; for ``same`` and ``told`` see :meth:`_with_layers`."""
        if self._outlier is None or self._outlier.ranks != record.world_size:
            self._make_tests(record.world_size)
            self._layers_first, self._noted = set(), {}
        assert self._outlier is not None
        # ranks that hold the same rows are not exchangeable with the others
        outliers = self._outlier.standing() if same else self._outlier.step(record, extras)
        return self._with_layers(record, extras, outliers, same, told)

    def _new_notes(self, step: int, notes: list[Event]) -> list[Event]:
        """The notes of ranks of which none was made lately."""
        new = []
        for note in notes:
            if any(step - self._noted.get(rank, -NOTED_AGAIN) >= NOTED_AGAIN for rank in note.ranks):
                self._noted.update(dict.fromkeys(note.ranks, step))
                new.append(note)
        return new

    def _make_tests(self, ranks: int) -> None:
        log_steps = self._log_steps + math.log(2.0)
        self._outlier = OutlierTest(ranks, log_steps, self._words, self._effects)
        self._layers = LayerTest(ranks, log_steps, self._effects)

    def _with_layers(
        self, record: StepRecord, extras: Evidence, outliers: list[Finding], same: bool, told: set[int]
    ) -> list[Finding]:
        """One fault, one event: of each rank the whole gradient or a layer, whichever was seen first.

        Args:
            told: ranks some of whose parameters have no gradient; that is said already.
        """
        assert self._layers is not None
        assert self._outlier is not None
        random, plain = extras.dealt == "random", self._outlier.plain
        layers = self._layers.standing()
        if not same:
            layers = self._layers.step(record.step, extras.layers, extras.label_tokens, random, plain)
        notes = [finding for finding in outliers if finding.severity == "info"]
        outliers = [finding for finding in outliers if finding.severity != "info"]
        by_whole = {rank for finding in outliers for rank in finding.ranks}
        standing = {rank for finding in layers for rank in finding.ranks}
        self._layers_first = (self._layers_first & standing) | (standing - by_whole - told)
        return [
            *notes,
            *(finding for finding in outliers if not self._layers_first.issuperset(finding.ranks)),
            *(finding for finding in layers if self._layers_first.issuperset(finding.ranks)),
        ]

    def unlike(self, step: int, found: tuple[Unlike, ...]) -> list[Event]:
        """What the last observation of all says of the ranks' code; nothing is judged after it."""
        return [event for finding in conduct.unlike(found) for event in self._episodes.start(step, finding)]

    def _duplicates(self, record: StepRecord, extras: Evidence) -> list[Finding]:
        if extras.rows_sampled < 1.0:
            found = self._sampled_rows.step(record, extras)
        else:
            found = duplicates.by_ids(record, extras, self._pairs_before)
            self._pairs_before = duplicates.shared_pairs(extras)
        if found or not self._alike:
            return found
        return duplicates.by_gradients(record, extras.directions)  # also with ids: they may be counted per rank

    def _replicas(self, record: StepRecord, extras: Evidence) -> list[Finding]:
        """Replicas are compared now and then: those that differ do so until a comparison says otherwise."""
        seen = extras.reduction
        if seen is not None and seen.replicas is not None:
            self._apart = replicas(record, seen.replicas, seen.drift)
        return self._apart

    def _stale(self, record: StepRecord, extras: Evidence) -> list[Finding]:
        found = [] if self._conditional or not self._alike else broken.stale_parameters(record, extras)
        if found and self._stale_key not in (None, found[0].key):
            self._conditional = True
            return []
        if found:
            self._stale_key = found[0].key
        return found

    # -- a resume ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: baselines and what is going on, so that a resume neither forgets nor repeats."""
        return {
            "version": _VERSION,
            "episodes": self._episodes.state_dict(),
            "order": self._order.state_dict(),
            "repeats": self._repeats.state_dict(),
            "same_order": self._same_order.state_dict(),
            "drift": self._jump.state_dict(),
            "batch_size": self._batch_size.state_dict(),
            "label_tokens": self._label_tokens.state_dict(),
            "outlier": None if self._outlier is None else self._outlier.state_dict(),
            "layers": None if self._layers is None else self._layers.state_dict(),
            "own_weight": None if self._own_weight is None else self._own_weight.state_dict(),
            "layers_first": sorted(self._layers_first),
            "sampled_rows": self._sampled_rows.state_dict(),
            "pairs_before": [list(pair) for pair in sorted(self._pairs_before)],
            "stale_key": self._stale_key,
            "conditional": self._conditional,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            ValueError: the state was written by another version.
        """
        if state.get("version") != _VERSION:
            raise ValueError(
                f"the detectors' state has version {state.get('version')!r}, this one reads {_VERSION}: start the "
                "detectors without it"
            )
        self._episodes.load_state_dict(state["episodes"])
        self._order.load_state_dict(state["order"])
        self._repeats.load_state_dict(state["repeats"])
        self._jump.load_state_dict(state["drift"])
        if "batch_size" in state:  # older states lack it
            self._batch_size.load_state_dict(state["batch_size"])
        if "label_tokens" in state:
            self._label_tokens.load_state_dict(state["label_tokens"])
        if "same_order" in state:
            self._same_order.load_state_dict(state["same_order"])
        self._outlier = None
        if state["outlier"] is not None:
            self._make_tests(state["outlier"]["ranks"])
            assert self._outlier is not None
            assert self._layers is not None
            self._outlier.load_state_dict(state["outlier"])
            if state.get("layers") is not None:  # absent in a state of before
                self._layers.load_state_dict(state["layers"])
        if state.get("own_weight") is not None:
            own = state["own_weight"]
            self._own_weight = OwnWeightTest(own["ranks"], self._log_steps + math.log(1000.0), self._words)
            self._own_weight.load_state_dict(own)
        self._layers_first = set(state.get("layers_first", ()))
        self._pairs_before = {(int(i), int(j)) for i, j in state["pairs_before"]}
        if "sampled_rows" in state:  # older states lack it
            self._sampled_rows.load_state_dict(state["sampled_rows"])
        self._stale_key, self._conditional = state["stale_key"], state["conditional"]


def _without_consequences(findings: list[Finding], causes: list[Finding]) -> list[Finding]:
    """One fault, one event: a rank whose code does something else has other gradients, or none for some parameters."""
    named = {rank for cause in causes for rank in cause.ranks}

    def follows(finding: Finding) -> bool:
        untrained = finding.kind == "zero-gradient" and finding.where == "parameters"
        return (untrained or finding.kind == "outlier-rank") and named.issuperset(finding.ranks)

    return [finding for finding in findings if not (named and follows(finding))]
