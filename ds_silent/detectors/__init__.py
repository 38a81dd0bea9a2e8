"""From the numbers of a step to what is wrong: which rank, since when, why, and what to do.

    judge = Judge(config.detectors, interval=config.interval)      # on the writing rank
    events = judge.step(record, Evidence(...))                     # once per measured step, in order

``Judge`` has one list of detectors, each a :class:`~ds_silent.detectors.finding.Detector`. A detector returns what is
wrong at this step; ``lifecycle`` makes one event of it when it starts and one when it ends.

Four groups of detectors judge by chance and share ``false_alarms_per_million_steps`` equally: ``order``; the rank
comparison, which is ``outlier`` and ``layers``; ``jump``; the rounding bounds of ``reduction_errors``. The derivations
are in ``sequential``, ``layer_evidence`` and ``ds_silent.maths.rounding_bound``. The other detectors state facts.

Scores and thresholds of the first three groups are natural logarithms of evidence: chance reaches a threshold of 16
once in e^16 steps. Their events carry the smallest rate at which they would still be reported. ``judge.scores`` holds
the scores of the newest step, whether reported or not.
"""

from __future__ import annotations

import math
from typing import Any

from ds_silent.capture.untrained import Unlike
from ds_silent.config import DetectorsConfig, EffectsConfig
from ds_silent.detectors.batch_size import BatchSizeTest, FullLabelsTest, LabelTokensTest
from ds_silent.detectors.broken import BrokenNumbers, StaleParameters, ZeroLayers
from ds_silent.detectors.duplicate_data import SameGradients
from ds_silent.detectors.finding import Detector, Finding
from ds_silent.detectors.jump import JumpTest
from ds_silent.detectors.label_rules import LabelRulesTest
from ds_silent.detectors.label_weights import LabelWeightsTest
from ds_silent.detectors.lifecycle import Episodes, SettingsDetector, setting_findings
from ds_silent.detectors.order import OrderTest, SameOrderTest
from ds_silent.detectors.outlier import RankComparison
from ds_silent.detectors.own_weight import OwnWeightTest
from ds_silent.detectors.reduction_errors import ReductionErrors
from ds_silent.detectors.repeats import FewRowsTest, RepeatTest
from ds_silent.detectors.replica_errors import ReplicaErrors
from ds_silent.detectors.same_data import OverlapTest, WholeDataTest
from ds_silent.detectors.same_rows import FollowedRows, SameRows, SampledRowsTest
from ds_silent.detectors.script_changes import HandedOnTest, ScriptHookFactors
from ds_silent.measure.evidence import Evidence
from ds_silent.records import Event, Score, Scores, StepRecord
from ds_silent.text import TORCH, Words

__all__ = ["Finding", "Judge"]

_BY_CHANCE = 4  # detectors that share the false-alarm rate
_VERSION = 8  # of the state


def log_steps(config: DetectorsConfig, interval: int) -> float:
    """Natural logarithm of the mean number of measured steps between two false alarms of one detector."""
    rate = math.log(config.false_alarms_per_million_steps) + math.log(interval)  # a product may leave the floats
    return max(0.0, math.log(1e6 * _BY_CHANCE) - rate)


class Judge:
    """Hold the detectors of one run.

    Args:
        config: the caller looks at ``enabled``.
        interval: optimizer steps between measurements; the rate is per million *optimizer* steps.
        words: the framework's terms, for messages.
        alike: whether ranks can be compared with each other, see
            :attr:`ds_silent.framework.Framework.ranks_comparable`.
        effects: sizes below which a finding is a note; None: the defaults.

    Attributes:
        scores: of the newest step, of the detectors that judge by evidence.
    """

    def __init__(
        self,
        config: DetectorsConfig,
        interval: int = 1,
        words: Words = TORCH,
        alike: bool = True,
        effects: EffectsConfig | None = None,
    ):
        self.scores = Scores(0, ())
        rate, steps = config.false_alarms_per_million_steps, log_steps(config, interval)
        half = steps + math.log(2.0)  # order and repeats share a quarter of the rate; so do whole gradients and layers
        seldom = steps + math.log(1000.0)  # for a thousandth of the rate it takes one or two steps, or rows, more
        repeats, whole = RepeatTest(half), WholeDataTest()
        self._episodes = Episodes(rate)
        self._detectors: tuple[Detector, ...] = (  # in order of severity of what they are about
            BrokenNumbers(),
            ReductionErrors(words),
            HandedOnTest(),
            OwnWeightTest(seldom, words),
            ReplicaErrors(),
            BatchSizeTest(words),
            SettingsDetector(),
            ScriptHookFactors(),
            LabelWeightsTest(),
            LabelRulesTest(),
            StaleParameters(alike),
            ZeroLayers(alike),
            SameRows(steps),
            SampledRowsTest(steps),
            FollowedRows(),
            whole,
            OverlapTest(whole),
            SameGradients(alike),
            repeats,
            OrderTest(half, repeats),
            FewRowsTest(),
            SameOrderTest(seldom, words, repeats),
            RankComparison(half, words, effects or EffectsConfig(), alike),
            JumpTest(steps, rate),
            FullLabelsTest(),
            LabelTokensTest(),  # behind the one that learns from steps without a finding: this is no fault by itself
        )

    def told(self, event: Event) -> None:
        """Take in a fault that the preflight has found: its consequences are no second alarm."""
        self._episodes.told(event)

    def step(self, record: StepRecord, extras: Evidence) -> list[Event]:
        """Return the events of one measured step, then its notes.

        Of a step that nobody applies, such as one to warm up or to read gradients, little can be wrong.
        """
        if extras.left_out:
            found = [one for kind in self._detectors if kind.of_any_step for one in kind.step(record, extras)]
            self.scores = Scores(record.step, ())
            return [event for finding in found for event in self._episodes.start(record.step, finding)]
        findings: list[Finding] = []
        scores: list[Score] = []
        notes: list[Event] = []
        for detector in self._detectors:
            findings += detector.step(record, extras, findings)
            scores += detector.scores
            notes += detector.notes
        self.scores = Scores(record.step, tuple(scores))
        if record.world_size > 1:
            findings = _without_consequences(findings)
        events = self._episodes.update(record.step, findings)
        return events + [note for note in notes if not self._episodes.explains(note)]

    def unlike(self, step: int, found: tuple[Unlike, ...]) -> list[Event]:
        """Return the events of settings that the last observation showed to differ; no step is judged after it."""
        return [event for finding in setting_findings(found) for event in self._episodes.start(step, finding)]

    def state_dict(self) -> dict[str, Any]:
        """Return baselines and what is going on, as JSON values, so that a resume neither forgets nor repeats."""
        state = {"version": _VERSION, "episodes": self._episodes.state_dict()}
        for detector in self._detectors:
            state |= detector.save()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; ValueError for that of another version, KeyError where it is not whole."""
        if state.get("version") != _VERSION:
            raise ValueError(
                f"the detectors' state has version {state.get('version')!r}, this one reads {_VERSION}: start the "
                "detectors without it"
            )
        self._episodes.load_state_dict(state["episodes"])
        for detector in self._detectors:
            detector.load(state)


def _without_consequences(findings: list[Finding]) -> list[Finding]:
    """Drop what follows from a setting: a rank with other code has other gradients, or none for some parameters."""
    odd = {rank for finding in findings if finding.kind == "config-mismatch" for rank in finding.ranks}

    def follows(finding: Finding) -> bool:
        untrained = finding.kind == "zero-gradient" and finding.where == "parameters"
        return (untrained or finding.kind == "outlier-rank") and odd.issuperset(finding.ranks)

    return [finding for finding in findings if not (odd and follows(finding))]
