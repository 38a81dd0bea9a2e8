"""Pictures for TensorBoard: the N x N matrix of cosines between the ranks' gradients, and of many ranks each one's.

image = matrix_image(record.cosine_matrix, step=12)       # (500, 560, 3) uint8
image = ranks_image(record.direction.per_rank, step=12)   # where the ranks are too many for a matrix
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_silent.extras import installed, missing_sentence
from ds_silent.records import Matrix
from ds_silent.sinks.base import logger

MAX_RANKS_WITH_VALUES = 16  # beyond, the numbers would overlap
MAX_LABELS, MAX_LABELS_BELOW = 16, 8  # beside the lines, and below, where they are as wide as they are long
MAX_CELLS = 64
"""Rows of cells; of more ranks a cell stands for a block of pairs."""
MARKED = 5
"""Ranks that are marked and named among many."""
_TITLE, _LABEL = 12, 11  # TensorBoard shows the picture at about half its size
Floats = NDArray[np.float64]
Picture = NDArray[np.uint8]


def matrix_image(matrix: Matrix, *, step: int, method: str | None = None) -> Picture | None:
    """Draw the matrix (N, N) as an RGB image, ranks on both axes, on a colour scale that is always -1 to 1.

    The scale is fixed so that two images can be compared; a healthy matrix is nearly white off the diagonal, one that
    is red all over shows ranks that compute the same gradient. Non-finite cosines are grey. Above :data:`MAX_CELLS`
    ranks a cell is of several ranks each way and shows the pair that is furthest from the usual, so that none hides.

    Returns:
        (500, 560, 3), uint8; None, with one note for the whole run, where matplotlib is not installed.
    """
    values = np.asarray(matrix, dtype=np.float64)
    ranks = len(values)
    per_cell = -(-ranks // MAX_CELLS)
    title = f"cosine between the ranks' gradients\nstep {step}{f', {method}' if method else ''}"
    if per_cell > 1:
        title += f"; of each {per_cell} x {per_cell} ranks the oddest pair"

    def label(axes: Any) -> None:
        for set_ticks, labels in ((axes.set_xticks, MAX_LABELS_BELOW), (axes.set_yticks, MAX_LABELS)):
            ticks = range(0, ranks, ranks // labels if ranks > MAX_LABELS else 1)
            set_ticks([rank / per_cell for rank in ticks], [str(rank) for rank in ticks], fontsize=_LABEL)
        axes.set_xlabel("rank", fontsize=_LABEL)
        axes.set_ylabel("rank", fontsize=_LABEL)
        for (row, column), value in np.ndenumerate(values) if ranks <= MAX_RANKS_WITH_VALUES else ():
            size, colour = min(14.0, 110.0 / ranks), "white" if abs(value) > 0.6 else "black"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=size, color=colour)

    return _drawn(blocks_of(values, per_cell), title, label)


def ranks_image(cosines: Sequence[float], *, step: int) -> Picture | None:
    """Draw each rank's cosine with the mean of the others, a cell per rank, in the order of the ranks line by line.

    The ranks furthest from the median have a frame, and the title names them. Scale and result: :func:`matrix_image`.
    """
    values = np.asarray(cosines, dtype=np.float64)
    width = 1 << max(int(np.ceil(np.log2(max(len(values), 1)) / 2)), 0)
    cells = np.full(-(-len(values) // width) * width, np.nan)
    cells[: len(values)] = values
    odd = oddest(values)
    named = ", ".join(f"{rank} ({values[rank]:.2f})" for rank in odd[:2])
    title = f"each rank's cosine with the mean of the others\nstep {step}; oddest: {named}"

    def label(axes: Any) -> None:
        from matplotlib.patches import Rectangle

        rows = len(cells) // width
        lines = range(0, rows, -(-rows // MAX_LABELS))
        columns = range(0, width, -(-width // MAX_LABELS_BELOW))
        axes.set_yticks(lines, [str(line * width) for line in lines], fontsize=_LABEL)
        axes.set_xticks(columns, [f"+{column}" for column in columns], fontsize=_LABEL)
        axes.set_xlabel("rank = line + column", fontsize=_LABEL)
        for rank in odd:
            corner = (rank % width - 0.5, rank // width - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="black", linewidth=1.5))

    return _drawn(cells.reshape(-1, width), title, label, aspect="auto")


def blocks_of(values: Floats, per_cell: int) -> Floats:
    """Return (M, M) of (N, N): of each block of ``per_cell`` ranks each way the value furthest from the median.

    The diagonal, which is 1 whatever happens, counts only where a block has nothing else; what is not finite comes
    before everything.
    """
    if per_cell <= 1:
        return values
    ranks = len(values)
    cells = -(-ranks // per_cell)
    padded = np.full((cells * per_cell, cells * per_cell), np.nan)
    padded[:ranks, :ranks] = values
    outside = np.ones(padded.shape, dtype=bool)
    outside[:ranks, :ranks] = np.eye(ranks, dtype=bool)
    distance = _from_the_usual(padded, ~outside)
    distance[outside] = -1.0

    def tiles(of: Floats) -> Floats:
        rows = of.reshape(cells, per_cell, cells, per_cell)
        return np.asarray(rows.swapaxes(1, 2).reshape(cells, cells, -1), dtype=np.float64)

    chosen = tiles(distance).argmax(axis=2)[..., None]
    return np.asarray(np.take_along_axis(tiles(padded), chosen, axis=2)[..., 0], dtype=np.float64)


def oddest(values: Floats) -> list[int]:
    """Return the ranks furthest from the median, the furthest first; one without a number before all."""
    distance = _from_the_usual(values, np.ones(values.shape, dtype=bool))
    return [int(rank) for rank in np.argsort(-distance, kind="stable")[:MARKED]]


def _from_the_usual(values: Floats, counted: NDArray[np.bool_]) -> Floats:
    """Return the distances from the median of those that are counted; infinity of what is not finite."""
    finite = np.isfinite(values)
    usual = np.median(values[finite & counted]) if (finite & counted).any() else 0.0
    return np.where(finite, np.abs(values - usual), np.inf)


def _drawn(cells: Floats, title: str, label: Callable[[Any], None], aspect: str = "equal") -> Picture | None:
    """Return a picture of the cells, to whose axes ``label`` has been applied; None where there is no matplotlib."""
    if not installed("matplotlib"):
        _note()
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and not there without the extra
    from matplotlib.figure import Figure

    # Not pyplot: it is global state, and the training script may be using it.
    figure = Figure(figsize=(5.6, 5.0), dpi=100)  # no layout engine: it costs half as much again as the drawing
    canvas: Any = FigureCanvasAgg(figure)  # matplotlib types only a part of itself
    axes: Any = figure.add_axes((0.13, 0.12, 0.70, 0.74))
    axes.set_facecolor("0.6")
    image = axes.imshow(np.ma.masked_invalid(cells), vmin=-1.0, vmax=1.0, cmap="RdBu_r", aspect=aspect)
    axes.set_title(title, fontsize=_TITLE)
    bar: Any = figure.colorbar(image, cax=figure.add_axes((0.86, 0.20, 0.03, 0.58)), ticks=[-1, -0.5, 0, 0.5, 1])
    bar.ax.tick_params(labelsize=_LABEL)
    label(axes)
    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])


@functools.cache
def _note() -> None:
    sentence = missing_sentence("the picture of the cosines in TensorBoard", ["matplotlib"], "plots")
    logger.warning("ds_silent: %s; everything else is written", sentence)
