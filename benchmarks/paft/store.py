"""Results, one JSON line per training, appended as they come; what is there already is not run again.

results = Store(Path("runs/paft/results.jsonl"))
results.complete(trainings)            # runs what is missing
results[training]["scores"]
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from ds_silent.practice.ranks import on_ranks

from .training import RANKS, Training, train_all

Result = dict[str, Any]


class Store:
    """Trainings that are done, by what they were. A line that an interruption has torn is run again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._results: dict[str, Result] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self._torn = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            try:
                result = json.loads(line)
            except json.JSONDecodeError:
                continue
            self._results[result["key"]] = result

    def __getitem__(self, training: Training) -> Result:
        return self._results[training.key]

    def __contains__(self, training: Training) -> bool:
        return training.key in self._results

    def complete(self, trainings: Iterable[Training]) -> None:
        """Run what is missing, in one start of the ranks.

        Raises:
            RankBroke: a rank ended badly; the trainings before it are kept.
        """
        missing = tuple({training.key: training for training in trainings if training not in self}.values())
        if not missing:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with Progress(console=Console(stderr=True)) as progress, self.path.open("a", encoding="utf-8") as file:
            bar = progress.add_task("trainings", total=len(missing))
            for result in on_ranks(train_all, (missing,), RANKS):
                file.write("\n" * self._torn + json.dumps(result) + "\n")
                file.flush()
                self._torn = False
                self._results[result["key"]] = result
                progress.advance(bar)
