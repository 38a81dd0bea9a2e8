"""Instruction rows in Alpaca columns, from wherever they lie.

    rows = load_rows("alpaca.jsonl")      # a .json, .jsonl or .parquet file, a hub id, or "embedded"
    rows[17].output                       # its row id is its index, 17, in the source

Nothing is skipped here: a row keeps the index it has in its source, so that a row id means the same row in every
run. The text is untrusted: it is only ever quoted shortened and escaped.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.settings import UserError

COLUMNS = ("instruction", "input", "output")
EMBEDDED_ROWS = Path(__file__).parent / "embedded" / "rows.jsonl.gz"  # of launch/make_embedded_model.py
FILE_KINDS = (".json", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Row:
    """One instruction; ``input`` is often empty, and an empty ``output`` gives a row without labels."""

    instruction: str
    input: str
    output: str


def load_rows(source: str) -> list[Row]:
    """All rows of ``source``, in its order.

    Args:
        source: ``"embedded"`` (the project's own 4,096 rows), the path of a ``.json`` (a list, or an
            object whose ``data`` is one), ``.jsonl`` or ``.parquet`` file, or a data set id of the Hugging Face hub,
            whose ``train`` split is taken.

    Raises:
        UserError: the source is missing, unreadable or empty, or a row is malformed (named by its number).
    """
    rows = [parse_row(row, number, source) for number, row in enumerate(_raw_rows(source))]
    if not rows:
        raise UserError(f"{source} holds no rows: give --data a file or a data set with at least one")
    return rows


def parse_row(row: object, number: int, source: str) -> Row:
    """One row, checked. ``number`` counts from 0; the error names the row, the column and what is wrong."""
    where = f"row {number} (counted from 0) of {source}"
    if not isinstance(row, Mapping):
        raise UserError(f"{where} must be an object with the columns {', '.join(COLUMNS)}, got {_kind(row)}")
    for column in COLUMNS:
        if column not in row:
            raise UserError(f"{where} has no column {column!r}; it needs {', '.join(COLUMNS)}")
        if not isinstance(row[column], str):
            raise UserError(
                f"{where} must have text in column {column!r}, got {_kind(row[column])}: correct or remove it"
            )
    if not (row["instruction"].strip() or row["input"].strip()):
        raise UserError(f"{where} has neither an instruction nor an input: correct or remove it")
    return Row(row["instruction"], row["input"], row["output"])


def _raw_rows(source: str) -> Iterable[object]:
    if source == "embedded":
        return _json_lines(gzip.decompress(EMBEDDED_ROWS.read_bytes()).decode(), EMBEDDED_ROWS)
    path = Path(source)
    if path.is_dir():
        raise UserError(f"--data {source} is a directory; give one file of kind {', '.join(FILE_KINDS)} in it")
    if path.is_file() or path.suffix in FILE_KINDS:
        return _file_rows(path)
    return _hub_rows(source)


def _file_rows(path: Path) -> Iterable[object]:
    if not path.is_file():
        raise UserError(f"--data {path} does not exist; give a file, a hub id or 'embedded'")
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.suffix not in FILE_KINDS:
        raise UserError(
            f"--data {path} must be a file of kind {', '.join(FILE_KINDS)}, got {path.suffix or 'no suffix'!r}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--data {path} cannot be read as UTF-8 text: {_short(error)}") from error
    return _json_lines(text, path) if path.suffix == ".jsonl" else _json_rows(text, path)


def _json_rows(text: str, path: Path) -> list[Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"--data {path} is not valid JSON: {_short(error)}; correct it, or give JSON lines as .jsonl"
        ) from error
    rows = content.get("data") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise UserError(
            f"--data {path} must hold a list of rows, or an object whose 'data' is one, got {_kind(content)}"
        )
    return rows


def _json_lines(text: str, path: Path) -> list[Any]:
    rows: list[Any] = []
    for line in text.split("\n"):
        if not line.strip():
            continue  # a blank line is not a row
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"row {len(rows)} (counted from 0) of {path} is not valid JSON: {_short(error)}; correct or remove it"
            ) from error
    return rows


def _parquet_rows(path: Path) -> list[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"--data {path} is not a readable parquet file: {_short(error)}") from error
    rows: list[Any] = table.select([c for c in COLUMNS if c in table.column_names]).to_pylist()
    return rows


def _hub_rows(source: str) -> Iterable[object]:
    import datasets

    try:
        return list(datasets.load_dataset(source, split="train"))
    except Exception as error:  # the hub client raises a dozen unrelated types; all of them mean the same to the user
        raise UserError(
            f"--data {source} is neither a file here nor a data set that the hub gave: {_short(error)}"
        ) from error


def _kind(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {_short(repr(value))}"


def _short(value: object, limit: int = 120) -> str:
    """One line of printable characters, so that neither data nor a library's message can dress up the terminal."""
    text = " ".join(str(value).split())
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"
