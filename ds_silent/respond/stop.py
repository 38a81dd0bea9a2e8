"""End a training that must not go on: a sentence, what the ranks have on disk, and exit status 3 on all of them.

Every rank gets here at the same step, because every rank read the same word or made the same comparison.
"""

from __future__ import annotations

import logging
from pathlib import Path

from ds_silent.framework import Framework
from ds_silent.records import Event

logger = logging.getLogger("ds_silent")
STOPPED = 3
"""Exit status of a training that was ended."""


def end_by_event(event: Event | None, stop_on: str) -> SystemExit:
    """To be raised: ``detectors.stop_on`` ends the training. ``event``: on the writing rank."""
    if event is not None:
        because = 'the event %s of step %d and silent_consistency.detectors.stop_on "%s": %s'
        said = f"ds_silent: the training ends here, because of {because}"
        logger.error(said, event.kind, event.step, stop_on, event.message)
    return SystemExit(STOPPED)


def end_suspect(step: int, why: str, output_dir: str, saved: Path | None, tells: bool) -> SystemExit:
    """To be raised: a response ends the training. ``saved``: where the suspect checkpoint is; ``tells``: this rank."""
    if tells:
        marked = "" if saved is None else f", and {saved} holds what the ranks have, marked as suspect"
        said = "ds_silent: the training ends here, at step %d, because of silent_consistency.%s; events.jsonl in %s "
        logger.error(said + "says what was wrong%s", step, why, output_dir, marked)
    return SystemExit(STOPPED)


def save_suspect(framework: Framework, step: int, why: str, output_dir: str, marks: bool) -> Path | None:
    """A checkpoint beside the user's own, which stay as they are. A collective. ``marks``: this rank, as suspect."""
    directory, tag = Path(output_dir, "suspect"), f"suspect_step{step}"
    try:
        framework.save_checkpoint(str(directory), tag, {"ds_silent_suspect": why})
        if marks:
            (directory / tag / "SUSPECT").write_text(f"{why}; see ../../events.jsonl\n", encoding="utf-8")
    except Exception as error:  # the training ends in any case
        logger.warning("ds_silent: the suspect checkpoint could not be written: %s", error)
        return None
    return directory / tag
