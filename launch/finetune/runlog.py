"""``train.jsonl``: what the trainer itself knows of a run (loss, learning rate, evaluation), written by rank 0."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import IO

from tqdm import tqdm

from finetune.ranks import Ranks


class RunLog:
    """One JSON object per line, flushed; a number that is not finite becomes its name as a string.

    Args:
        path: the file; made anew, or kept up to ``after_step`` when a run is resumed.
        after_step: the last step that is already done; later lines of an interrupted run are cut off.
    """

    def __init__(self, path: Path, ranks: Ranks, after_step: int) -> None:
        self._path = path
        self._ranks = ranks
        self._after_step = after_step
        self._file: IO[str] | None = None

    def __enter__(self) -> RunLog:
        if self._ranks.is_first:
            kept = _lines_up_to(self._path, self._after_step)
            self._file = self._path.open("w", encoding="utf-8")
            self._file.writelines(kept)
            self._file.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, step: int, **numbers: float) -> None:
        """One line of ``numbers``, and the same beside the progress bar."""
        if self._file is None:
            return
        shown = {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
        self._file.write(json.dumps({"step": step, **shown}) + "\n")
        self._file.flush()
        self.say(f"step {step}  " + "  ".join(f"{name} {value:.6g}" for name, value in numbers.items()))

    def say(self, sentence: str) -> None:
        """One line on rank 0 that leaves the progress bar whole."""
        if self._ranks.is_first:
            with tqdm.external_write_mode():
                print(sentence, flush=True)


def _lines_up_to(path: Path, step: int) -> list[str]:
    if step == 0 or not path.is_file():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # the torn last line of a run that was killed
    return kept
