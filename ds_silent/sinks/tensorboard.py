"""TensorBoard: curves, the cosine matrix as an image, events as text, and a layout of the charts.

    tensorboard --logdir runs/my-run/tensorboard      # the tab "Custom Scalars" shows the layout

The step axis is the optimizer step. All scalars of a step are one protobuf event: ``add_scalar`` for each of the some
forty curves of eight ranks would cost several times as much, in the training loop.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_silent.ranks.parts import ranks_of
from ds_silent.records import Event, Scores, StepRecord
from ds_silent.sinks.base import SinkError
from ds_silent.sinks.drawn import is_drawn
from ds_silent.sinks.files import make_directory
from ds_silent.sinks.scalars import BANDS, Curves
from ds_silent.sinks.written import MOST_RANKS

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_PER_RANK = rf"silent/per_rank/{{}}/(rank_\d+|{'|'.join(BANDS)})$"
FLUSH_SECONDS = 10  # what a killed run loses here at most; metrics.jsonl loses nothing

LAYOUT: dict[str, dict[str, list[Any]]] = {
    "Consistency": {
        "loss dispersion": ["Multiline", [r"silent/loss/std$", r"silent/loss/range$"]],
        "gradient-norm dispersion": ["Multiline", [r"silent/grad_norm/std$", r"silent/grad_norm/cv$"]],
        "gradient direction (cosine)": ["Multiline", [r"silent/direction/(mean|min|max)_cosine$"]],
    },
    "Per rank": {
        "loss": ["Multiline", [_PER_RANK.format("loss")]],
        "gradient norm": ["Multiline", [_PER_RANK.format("grad_norm")]],
        "cosine with the mean of the others": ["Multiline", [_PER_RANK.format("cosine")]],
    },
    "Health": {
        "noise scale (samples)": ["Multiline", [r"silent/noise_scale$"]],
        "norm of the aggregated gradient": ["Multiline", [r"silent/grad_norm/aggregated$"]],
        "integrity of the aggregation": ["Multiline", [r"silent/integrity/(relative_error|rounding_bound)$"]],
    },
}
"""Category → chart → the tags it shows, as regular expressions."""


class TensorBoardSink:
    """Writes event files into ``log_dir``, which is created and tried at once; the file comes with the first record.

    Args:
        log_dir: where the event files go.
        resume_step: the last step that the checkpoint holds; later points of the earlier run disappear from the
            curves. ``None``: the first record says it, because a checkpoint is loaded after this sink is opened.

    Raises:
        SinkError: the directory cannot be written, or the package ``tensorboard`` is missing.
    """

    def __init__(self, log_dir: str | Path, *, resume_step: int | None = None) -> None:
        self._writer_type = summary_writer_type()
        self._log_dir = Path(log_dir)
        make_directory(self._log_dir)
        self._purge_step = None if resume_step is None else resume_step + 1
        self._writer: SummaryWriter | None = None
        self._early_events: list[Event] = []
        self._curves = Curves()
        self._pictures = 0

    def write(self, record: StepRecord) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        writer = self._open(record.step)
        summary = Summary()
        for tag, value in self._curves.of(record):
            summary.value.add(tag=tag, simple_value=value)
        # SummaryWriter.file_writer is a public attribute and add_summary a public method of it (torch 2.4-2.13).
        file_writer: Any = writer.file_writer
        file_writer.add_summary(summary, record.step)
        self._draw(writer, record)

    def _draw(self, writer: SummaryWriter, record: StepRecord) -> None:
        """The matrix; of more ranks than have one, each rank's cosine with the others."""
        matrix, each = record.cosine_matrix, record.direction.per_rank
        if matrix is None and (each is None or record.world_size <= MOST_RANKS):
            return
        self._pictures += 1
        if not is_drawn(self._pictures):
            return
        from ds_silent.sinks.matrix_image import matrix_image, ranks_image  # imports matplotlib, which is slow

        if matrix is not None:
            tag, image = "matrix", matrix_image(matrix, step=record.step, method=record.direction.method)
        else:
            tag, image = "ranks", ranks_image(each or (), step=record.step)
        if image is not None:
            writer.add_image(f"silent/direction/{tag}", image, record.step, dataformats="HWC")

    def write_scores(self, scores: Scores) -> None:
        """They are in scores.jsonl."""

    def write_event(self, event: Event) -> None:
        self._curves.write_event(event)
        if self._writer is None and self._purge_step is None:
            # An event before the first record (preflight, step 0) must not decide what a resumed run purges.
            self._early_events.append(event)
        else:
            self._add_text(self._open(event.step), event)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._early_events:
            self._open(None)
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, first_step: int | None) -> SummaryWriter:
        if self._writer is None:
            purge_step = first_step if self._purge_step is None else self._purge_step
            self._writer = self._writer_type(str(self._log_dir), purge_step=purge_step, flush_secs=FLUSH_SECONDS)
            self._writer.add_custom_scalars(LAYOUT)
            early, self._early_events = self._early_events, []
            for event in early:
                self._add_text(self._writer, event)
        return self._writer

    @staticmethod
    def _add_text(writer: SummaryWriter, event: Event) -> None:
        # One tag per kind: TensorBoard keeps only a sample of each tag's texts.
        writer.add_text(f"silent/events/{re.sub(r'[^a-z0-9-]', '_', event.kind)}", event_markdown(event), event.step)


def summary_writer_type() -> type[SummaryWriter]:
    """``SummaryWriter``, where the package is there.

    Raises:
        SinkError: it is not.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SinkError(
            f"silent_consistency.tensorboard is true but TensorBoard cannot be imported ({error}); "
            'install "tensorboard" or set it to false'
        ) from None
    return SummaryWriter


def event_markdown(event: Event) -> str:
    """The event as Markdown in which nothing of what the event says is read as Markdown or HTML."""
    who = f", {ranks_of(event.ranks)}" if event.ranks else ""
    lines = [
        f"**{escaped(event.severity)}** {escaped(event.kind)}{who}",
        escaped(event.message),
        f"Remedy: {escaped(event.remedy)}" if event.remedy else "",
        f"Where: {escaped(event.where)}" if event.where else "",
        "" if event.score is None else f"Score {event.score:.4g}, threshold {_number(event.threshold)}",
    ]
    return "\n\n".join(line for line in lines if line)


def escaped(text: str) -> str:
    """``text`` on one line, every ASCII punctuation mark as an HTML entity: inert in Markdown and in HTML."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    return "".join(f"&#{ord(c)};" if c.isascii() and not c.isalnum() and c not in " ,.;:()" else c for c in printable)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
