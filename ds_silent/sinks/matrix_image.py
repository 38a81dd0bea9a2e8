"""The N x N matrix of cosines between the ranks' gradients, as a picture."""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_silent.extras import installed, missing_sentence
from ds_silent.records import Matrix

logger = logging.getLogger("ds_silent")

MAX_RANKS_WITH_VALUES = 16  # beyond, the numbers would overlap
MAX_LABELS = 32


def matrix_image(matrix: Matrix, *, step: int, method: str | None = None) -> NDArray[np.uint8] | None:
    """The matrix as an RGB image, ranks on both axes, on a colour scale that is always -1 to 1.

    The scale is fixed so that two images can be compared; a healthy matrix is nearly white off the diagonal, one that
    is red all over shows ranks that compute the same gradient. Non-finite cosines are grey.

    Args:
        matrix: N rows of N cosines.
        step: the optimizer step, for the title.
        method: how the cosines were measured, for the title.

    Returns:
        (height, width, 3), uint8; None, with one note for the whole run, where matplotlib is not installed.
    """
    if not installed("matplotlib"):
        _note()
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and not there without the extra
    from matplotlib.figure import Figure

    values = np.asarray(matrix, dtype=np.float64)
    ranks = len(values)
    # Not pyplot: it is global state, and the training script may be using it.
    figure = Figure(figsize=(5.6, 5.0), dpi=100)  # no layout engine: it costs half as much again as the drawing
    canvas: Any = FigureCanvasAgg(figure)  # matplotlib types only a part of itself
    axes: Any = figure.add_subplot()
    axes.set_facecolor("0.6")
    image = axes.imshow(np.ma.masked_invalid(values), vmin=-1.0, vmax=1.0, cmap="RdBu_r")
    ticks = range(0, ranks, -(-ranks // MAX_LABELS))
    axes.set_xticks(ticks, [str(rank) for rank in ticks])
    axes.set_yticks(ticks, [str(rank) for rank in ticks])
    axes.set_xlabel("rank")
    axes.set_ylabel("rank")
    how = f" ({method})" if method else ""
    axes.set_title(f"cosine between the ranks' gradients, step {step}{how}", fontsize=10)
    if ranks <= MAX_RANKS_WITH_VALUES:
        for row in range(ranks):
            for column in range(ranks):
                value = values[row, column]
                colour = "white" if abs(value) > 0.6 else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(image, ax=axes, shrink=0.8)
    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])


@functools.cache
def _note() -> None:
    sentence = missing_sentence("the picture of the cosines in TensorBoard", ["matplotlib"], "plots")
    logger.warning("ds_silent: %s; everything else is written", sentence)
