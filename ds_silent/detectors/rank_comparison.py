"""Compare the ranks with each other by their whole gradients and by their layers, and report one finding per rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ds_silent.config import EffectsConfig
from ds_silent.detectors.finding import Detector, Finding
from ds_silent.detectors.layers import LayerTest
from ds_silent.detectors.outlier import OutlierTest
from ds_silent.measure.evidence import Evidence
from ds_silent.records import Event, StepRecord
from ds_silent.text import Words

NOTED_AGAIN = 256
"""Steps after which another change of a rank is noted: rows that go on changing are one note."""


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
        if any(finding.kind == "duplicate-data" for finding in before):
            # ranks that hold the same rows are not exchangeable with the others
            whole, single = outlier.standing(), layers.standing()
        else:
            random = evidence.dealt == "random"
            whole = outlier.step(record, evidence)
            single = layers.step(record.step, evidence.layers, evidence.label_tokens, random, outlier.weigher.plain)
            self.scores = (*outlier.scores, *layers.scores)
            self.notes = tuple(self._new_notes(record.step, (*outlier.notes, *layers.notes)))
        untrained = {rank for finding in before if finding.key.startswith("stale:") for rank in finding.ranks}
        return self._one_of_each(whole, single, untrained)

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
