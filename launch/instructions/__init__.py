"""The embedded instruction set: rows in Alpaca columns that a fixed seed makes, the same on every machine.

    rows = generate(rows=4096, seed=0)      # [{"instruction": ..., "input": ..., "output": ...}, ...]

What the rows are about is in ``tasks.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from instructions.tasks import TASKS, Draw

__all__ = ["TASKS", "generate"]

ATTEMPTS_AT_A_NEW_ROW = 20


def generate(rows: int = 4096, seed: int = 0, tasks: Sequence[str] | None = None) -> list[dict[str, str]]:
    """The instruction set of one seed: about 40 % of its rows have an input, and questions hardly ever repeat.

    Args:
        rows: how many, at least 1.
        seed: other seeds give other rows of the same kinds.
        tasks: the kinds to draw from, names of :data:`TASKS`; None is all of them.

    Returns:
        ``rows`` dicts with the Alpaca columns ``instruction``, ``input`` (may be empty) and ``output``.

    Raises:
        ValueError: ``rows`` is below 1, or a name in ``tasks`` is unknown.
    """
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    unknown = [name for name in tasks or () if name not in TASKS]
    if unknown:
        raise ValueError(f"unknown task {unknown[0]!r}; the tasks are {', '.join(TASKS)}")
    makers = [TASKS[name] for name in tasks or TASKS]
    draw = Draw(seed)
    seen: set[tuple[str, str]] = set()
    made: list[dict[str, str]] = []
    while len(made) < rows:
        maker = draw.pick(makers)
        for _ in range(ATTEMPTS_AT_A_NEW_ROW):
            instruction, text, output = maker(draw)
            if (instruction, text) not in seen:
                break
        seen.add((instruction, text))
        made.append({"instruction": instruction, "input": text, "output": output})
    return made
