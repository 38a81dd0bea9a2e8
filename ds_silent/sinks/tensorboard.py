"""TensorBoard: curves, the cosine matrix as an image, events as text and as a curve, and a layout of the charts.

    tensorboard --logdir runs/my-run/tensorboard      # the tab "Custom Scalars" shows the layout

The step axis is the optimizer step. All scalars of a step are one protobuf event: ``add_scalar`` for each of the some
forty curves of eight ranks would cost several times as much, in the training loop.

No chart of TensorBoard's can hold text. So ``silent/events/{error,warning}`` count the events so far: where the
staircase rises, the tab "Text" says why. A count that only grows is still seen where TensorBoard thins out its points.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_silent.distributed.parts import ranks_of
from ds_silent.metrics import CHARTS, METRICS, RANK_METRICS
from ds_silent.records import Event, StepRecord
from ds_silent.sinks.base import SinkError
from ds_silent.sinks.files import MOST_RANKS, is_drawn, make_directory
from ds_silent.sinks.matrix_image import matrix_image, ranks_image
from ds_silent.sinks.scalars import MAX_RANKS_DRAWN, CurvesSink, scalars
from ds_silent.text import one_line

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FLUSH_SECONDS = 10  # what a killed run loses here at most; metrics.jsonl loses nothing
COUNTED = ("error", "warning")  # events of these have a curve beside the others


class TensorBoardSink(CurvesSink):
    """Writes event files into ``log_dir``, which is created and tried at once; the file comes with the first record.

    ``resume_step``: the last step of the checkpoint; later points of the earlier run disappear from the curves. None:
    the first record says it, because a checkpoint is loaded after this sink is opened.

    Raises SinkError: the directory cannot be written, or the package ``tensorboard`` is missing.
    """

    def __init__(self, log_dir: str | Path, *, resume_step: int | None = None) -> None:
        super().__init__()
        self._writer_type = summary_writer_type()
        self._log_dir = Path(log_dir)
        make_directory(self._log_dir)
        self._purge_step = None if resume_step is None else resume_step + 1
        self._writer: SummaryWriter | None = None
        self._early_events: list[Event] = []
        self._pictures = 0
        self._of_many: bool | None = None  # whether the charts in the file are those of many ranks
        self._counted = dict.fromkeys(COUNTED, 0)
        self._step = 0  # of the newest record

    def write(self, record: StepRecord) -> None:
        if record.step <= self._step and self._writer is not None:
            _begin_again(self._writer, record.step)
        writer, self._step = self._open(record.step), record.step
        of_many = record.world_size > MAX_RANKS_DRAWN
        if of_many != self._of_many:  # elastic training may change it
            self._of_many = of_many
            _add_layout(writer, of_many)
        _add_scalars(writer, [*scalars(record, self._named), *self._counts()], record.step)
        self._draw(writer, record)

    def _counts(self) -> list[tuple[str, float]]:
        return [(f"silent/events/{severity}", float(count)) for severity, count in self._counted.items()]

    def _draw(self, writer: SummaryWriter, record: StepRecord) -> None:
        """Draw the matrix; of more ranks than have one, each rank's cosine with the others."""
        matrix, each = record.cosine_matrix, record.direction.per_rank
        if matrix is None and (each is None or record.world_size <= MOST_RANKS):
            return
        self._pictures += 1
        if not is_drawn(self._pictures):
            return
        if matrix is not None:
            tag, image = "matrix", matrix_image(matrix, step=record.step, method=record.direction.method)
        else:
            tag, image = "ranks", ranks_image(each or (), step=record.step)
        if image is not None:
            writer.add_image(f"silent/direction/{tag}", image, record.step, dataformats="HWC")

    def write_event(self, event: Event) -> None:
        super().write_event(event)
        if event.severity in self._counted:
            self._counted[event.severity] += 1
        if self._writer is None and self._purge_step is None:
            # An event before the first record (preflight, step 0) must not decide what a resumed run purges.
            self._early_events.append(event)
            return
        writer = self._open(event.step)
        _add_text(writer, event)
        if event.severity in self._counted and self._of_many is not None:
            # never behind what is drawn already: of an event about an earlier step the curve would go back
            _add_scalars(writer, self._counts(), max(event.step, self._step))

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
            early, self._early_events = self._early_events, []
            for event in early:
                _add_text(self._writer, event)
        return self._writer


def summary_writer_type() -> type[SummaryWriter]:
    """Return ``SummaryWriter``, whose import takes a second; SinkError where the package is not there."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SinkError(
            f"silent_consistency.tensorboard is true but TensorBoard cannot be imported ({error}); "
            'install "tensorboard" or set it to false'
        ) from None
    return SummaryWriter


def _add_text(writer: SummaryWriter, event: Event) -> None:
    # One tag per kind: TensorBoard keeps only a sample of each tag's texts.
    writer.add_text(f"silent/events/{re.sub(r'[^a-z0-9-]', '_', event.kind)}", event_markdown(event), event.step)


def _add_scalars(writer: SummaryWriter, values: list[tuple[str, float]], step: int) -> None:
    from tensorboard.compat.proto.summary_pb2 import Summary

    summary = Summary()
    for tag, value in values:
        summary.value.add(tag=tag, simple_value=value)
    _file_of(writer).add_summary(summary, step)


def _begin_again(writer: SummaryWriter, step: int) -> None:
    """Let later points disappear from the curves, as ``purge_step`` does when a writer is made."""
    from tensorboard.compat.proto.event_pb2 import Event as WrittenEvent
    from tensorboard.compat.proto.event_pb2 import SessionLog

    _file_of(writer).add_event(WrittenEvent(session_log=SessionLog(status=SessionLog.START)), step)


def _add_layout(writer: SummaryWriter, of_many: bool) -> None:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG, create_summary_metadata

    tensor = TensorProto(dtype="DT_STRING", string_val=[layout(of_many).SerializeToString()])
    tensor.tensor_shape.SetInParent()
    # Rebuilt by this process's messages: the plugin's may come from TensorFlow, where that is installed.
    summary, described = Summary(), create_summary_metadata().SerializeToString()
    value = summary.value.add(tag=CONFIG_SUMMARY_TAG, tensor=tensor)
    value.metadata.ParseFromString(described)
    _file_of(writer).add_summary(summary, None)


def _file_of(writer: SummaryWriter) -> Any:
    """Return what add_summary and add_event are public methods of, as it is a public attribute (torch 2.4-2.13)."""
    return writer.file_writer


def event_markdown(event: Event) -> str:
    """Return the event as Markdown in which nothing of what the event says is read as Markdown or HTML."""
    who = f", {ranks_of(event.ranks)}" if event.ranks else ""
    threshold = "none" if event.threshold is None else f"{event.threshold:.4g}"
    lines = [
        f"**{escaped(event.severity)}** {escaped(event.kind)}{who}",
        escaped(event.message),
        f"Remedy: {escaped(event.remedy)}" if event.remedy else "",
        f"Where: {escaped(event.where)}" if event.where else "",
        "" if event.score is None else f"Score {event.score:.4g}, threshold {threshold}",
    ]
    return "\n\n".join(line for line in lines if line)


def escaped(text: str) -> str:
    """Return ``text`` on one line, every ASCII punctuation mark as an HTML entity: inert in Markdown and in HTML."""
    inert = one_line(text)
    return "".join(f"&#{ord(c)};" if c.isascii() and not c.isalnum() and c not in " ,.;:()" else c for c in inert)


def layout(of_many: bool) -> Any:
    """Return the tab "Custom Scalars" as TensorBoard's own ``Layout``; torch's helper draws one band per chart only.

    Args:
        of_many: more ranks than have a curve each. Then there are bands from the least to the most and from the first
            to the last tenth, and charts of the ranks that events have named, beside the median of all.
    """
    from tensorboard.plugins.custom_scalar import layout_pb2 as made

    def lines(title: str, *patterns: str) -> Any:
        return made.Chart(title=title, multiline=made.MultilineChartContent(tag=[f"silent/{one}$" for one in patterns]))

    def bands(title: str, name: str) -> Any:
        # TensorBoard tells the bands of a chart apart by the curve within: with one median only one is drawn.
        each = ({"value": "max", "lower": "min", "upper": "max"}, {"value": "median", "lower": "q10", "upper": "q90"})
        tags = [{key: f"silent/per_rank/{name}/{curve}" for key, curve in one.items()} for one in each]
        series = [made.MarginChartContent.Series(**one) for one in tags]
        return made.Chart(title=title, margin=made.MarginChartContent(series=series))

    def of_records(category: str) -> list[Any]:
        tags = {title: [one.tag for one in METRICS if one.chart == title] for title in CHARTS[category]}
        return [lines(title, *patterns) for title, patterns in tags.items()]

    named = r"(rank_\d+|median)" if of_many else r"rank_\d+"
    by_rank = [lines(one.title, f"per_rank/{one.name}/{named}") for one in RANK_METRICS]
    categories = {"Consistency": [lines("events so far", "events/(error|warning)"), *of_records("Consistency")]}
    if of_many:
        categories["Per rank"] = [bands(one.title, one.name) for one in RANK_METRICS]
    categories["Ranks named" if of_many else "Per rank"] = by_rank
    categories["Health"] = of_records("Health")
    return made.Layout(category=[made.Category(title=title, chart=charts) for title, charts in categories.items()])
