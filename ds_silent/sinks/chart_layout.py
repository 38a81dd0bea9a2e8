"""What TensorBoard's tab "Custom Scalars" shows: categories of charts, which depend on how many ranks there are. Pure.

categories(ranks=4)["Per rank"]["loss"]       # a curve of each rank
categories(ranks=1024)["Per rank"]["loss"]    # the median within bands of all ranks
layout_of(ranks)                              # the same as TensorBoard's own message
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_silent.sinks.scalars import MAX_RANKS_DRAWN


@dataclass(frozen=True)
class Curves:
    """A chart of all tags that one of the regular expressions matches from the beginning."""

    patterns: tuple[str, ...]


@dataclass(frozen=True)
class Margins:
    """A chart of curves, each within a band: (value, lower, upper), which are whole tags."""

    series: tuple[tuple[str, str, str], ...]


Categories = Mapping[str, Mapping[str, Curves | Margins]]

_PER_RANK = "silent/per_rank/{}/"
_METRICS = {"loss": "loss", "grad_norm": "gradient norm", "cosine": "cosine with the mean of the others"}


def categories(ranks: int) -> Categories:
    """Category → title of a chart → what it shows."""
    return {
        "Consistency": {
            "events so far": Curves((r"silent/events/(error|warning)$",)),
            "loss dispersion": Curves((r"silent/loss/std$", r"silent/loss/range$")),
            "gradient-norm dispersion": Curves((r"silent/grad_norm/std$", r"silent/grad_norm/cv$")),
            "gradient direction (cosine)": Curves((r"silent/direction/(mean|min|max)_cosine$",)),
        },
        **({"Per rank": _of_each()} if ranks <= MAX_RANKS_DRAWN else {"Per rank": _bands(), "Ranks named": _named()}),
        "Health": {
            "noise scale (samples)": Curves((r"silent/noise_scale$",)),
            "norm of the aggregated gradient": Curves((r"silent/grad_norm/aggregated$",)),
            "integrity of the aggregation": Curves((r"silent/integrity/(relative_error|rounding_bound)$",)),
        },
    }


def layout_of(ranks: int) -> Any:
    """``tensorboard.plugins.custom_scalar.layout_pb2.Layout``; torch's own helper draws one band per chart only."""
    from tensorboard.plugins.custom_scalar import layout_pb2 as made

    def chart(title: str, shown: Curves | Margins) -> Any:
        if isinstance(shown, Curves):
            return made.Chart(title=title, multiline=made.MultilineChartContent(tag=shown.patterns))
        series = [
            made.MarginChartContent.Series(value=value, lower=lower, upper=upper)
            for value, lower, upper in shown.series
        ]
        return made.Chart(title=title, margin=made.MarginChartContent(series=series))

    return made.Layout(
        category=[
            made.Category(title=title, chart=[chart(name, shown) for name, shown in charts.items()])
            for title, charts in categories(ranks).items()
        ]
    )


def _of_each() -> dict[str, Curves | Margins]:
    return {title: Curves((_PER_RANK.format(metric) + r"rank_\d+$",)) for metric, title in _METRICS.items()}


def _bands() -> dict[str, Curves | Margins]:
    """All ranks, from the least to the most and from the first to the last tenth.

    TensorBoard tells the bands of a chart apart by the tag of the curve within: with one median only one is drawn.
    """
    charts: dict[str, Curves | Margins] = {}
    for metric, title in _METRICS.items():
        tag = _PER_RANK.format(metric)
        bands = (("max", "min", "max"), ("median", "q10", "q90"))
        charts[title] = Margins(tuple((tag + value, tag + lower, tag + upper) for value, lower, upper in bands))
    return charts


def _named() -> dict[str, Curves | Margins]:
    """The ranks that events have named, which have curves of their own, beside the median of all."""
    return {title: Curves((_PER_RANK.format(metric) + r"(rank_\d+|median)$",)) for metric, title in _METRICS.items()}
