"""``train.jsonl``: loss, learning rate and evaluation of a run, written by rank 0."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm


class RunLog:
    """One JSON object per line, flushed; a number that is not finite becomes its name as a string.

    Args:
        path: the file; made anew, or kept up to ``after_step`` when a run is resumed.
        after_step: the last step that is already done; later lines of an interrupted run are cut off.
        writes: whether this rank does; the others' calls do nothing.
    """

    def __init__(self, path: Path, after_step: int, writes: bool) -> None:
        self._path, self._writes = path, writes
        if writes:
            before = path.read_text(encoding="utf-8").splitlines() if after_step and path.is_file() else []
            path.write_text("".join(f"{line}\n" for line in before if _step_of(line) <= after_step), encoding="utf-8")

    def write(self, step: int, **numbers: float) -> None:
        """One line of ``numbers``, and the same beside the progress bar."""
        if self._writes:
            shown = {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **shown}) + "\n")
        self.say(f"step {step}  " + "  ".join(f"{name} {value:.6g}" for name, value in numbers.items()))

    def say(self, sentence: str) -> None:
        """One line that leaves the progress bar whole."""
        if self._writes:
            with tqdm.external_write_mode():
                print(sentence, flush=True)


def _step_of(line: str) -> float:
    with suppress(ValueError, KeyError, TypeError):  # the torn last line of a run that was killed
        return float(json.loads(line)["step"])
    return math.inf
