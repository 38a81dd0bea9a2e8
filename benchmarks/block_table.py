"""The table of every key of the block, for ``docs/block.md``, from what :mod:`ds_silent.config` says of each.

python benchmarks/block_table.py docs/block.md     # `make docs`: writes it between the page's two marks
block_table()                                      # the lines of the table, as Markdown
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from ds_silent.config import SilentConsistencyConfig
from ds_silent.config.fields import about, block_type, is_list
from ds_silent.text import shown

BEGIN = "<!-- the table: `make docs` writes it from ds_silent/config/__init__.py -->"
END = "<!-- end of the table -->"
BOUNDS = (
    ("^true or false$", "boolean"),
    ("^a number, (?=at least)", ""),
    ("^a whole number, (?=at least)", "whole, "),
    (r"at least (\S+) and at most", r"\1 to"),
    ("^a number greater than 0 and at most", "above 0, to"),
)
"""What a mistake's sentence says -> what a cell says."""


def block_table() -> str:
    """A row per key: its name, its default, what it must be, what it means. A block within the block is a row too."""
    rows = [("key", "default", "must be", "meaning"), ("---",) * 4, *_rows(SilentConsistencyConfig, "")]
    return "\n".join("|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|" for row in rows)


def with_table(page: str) -> str:
    """``page`` with the table of today between its two marks.

    Raises:
        ValueError: the page does not have each mark once.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page must have the lines {BEGIN} and {END} once each")
    before, _, after = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{block_table()}\n\n{END}{after.partition(END)[2]}"


def _rows(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    for name, field in model.model_fields.items():
        inner = block_type(model, name)
        if inner is not None and not is_list(model, name):
            yield f"**`{prefix}{name}`**", "", "", _cell(inner.__doc__)
        else:
            must = str(about(model, name)["must"])
            yield (
                f"`{prefix}{name}`",
                "" if field.is_required() else f"`{shown(field.default)}`",
                _cell(_bound(must.removeprefix("be "))),
                _cell(field.description),
            )
        if inner is not None:
            yield from _rows(inner, f"{prefix}{name}{'[]' * is_list(model, name)}.")


def _bound(must: str) -> str:
    """The sentence of a mistake as a cell: "a whole number, at least 1 and at most 100" is "whole, 1 to 100"."""
    for sentence, cell in BOUNDS:
        must = re.sub(sentence, cell, must)
    return must


def _cell(text: str | None) -> str:
    """One line of Markdown from a docstring's reStructuredText."""
    return re.sub(r"\s+", " ", text or "").strip().replace("``", "`").replace("|", r"\|")


def main(path: str) -> None:
    """Write the page anew."""
    page = Path(path)
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
