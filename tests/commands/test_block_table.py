"""The table in ``docs/block.md`` is what ``ds_silent/config/__init__.py`` says, key by key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.block_table import BEGIN, END, block_table, main, with_table
from ds_silent.config import AlertConfig, SilentConsistencyConfig, TraceConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "block.md"


def keys(value: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, inner in value.items():
        found += keys(inner, f"{prefix}{key}.") if isinstance(inner, dict) else [prefix + key]
    return found


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, "config.py has changed: `make docs` writes the table anew"


def test_every_key_has_a_row_with_its_default_and_its_bound() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in block_table().splitlines()]
    assert all(line.count("|") == 5 for line in block_table().splitlines())
    named = [row[0].strip(" |`") for row in rows[2:] if "**" not in row[0]]
    expected = keys(SilentConsistencyConfig(trace=TraceConfig()).model_dump())
    place = expected.index("alerts") + 1
    expected[place:place] = [f"alerts[].{key}" for key in AlertConfig.model_fields]
    assert named == expected
    assert "| `interval` | `1` | whole, at least 1 | Optimizer steps between measurements. |" in block_table()
    assert '| `reduction` | `"native"` | "native" or "ordered" | `ordered`: a reduction whose bits' in block_table()
    assert "| `respond.retries` | `3` | whole, 1 to 100 |" in block_table()
    assert "| `effects.loss` | `0.05` | 0 to 1000 |" in block_table()
    assert "| `preflight` | `true` | boolean |" in block_table()
    assert "| `alerts[].timeout` | `10.0` | above 0, to 60 |" in block_table()
    assert "| **`direction`** | | | How the ranks' gradient directions are compared. |" in block_table()


def test_make_docs_writes_only_the_table(tmp_path: Path) -> None:
    page = tmp_path / "block.md"
    page.write_text(f"# Before\n\n{BEGIN}\nold\n{END}\n\nafter\n", encoding="utf-8")
    main(str(page))
    assert page.read_text(encoding="utf-8") == f"# Before\n\n{BEGIN}\n\n{block_table()}\n\n{END}\n\nafter\n"
    [command] = [line for line in (ROOT / "Makefile").read_text().splitlines() if "block_table" in line]
    program = command.split("$(PYTHON_IN_VENV) ")[1].split()
    page.write_text(PAGE.read_text(encoding="utf-8").replace("| `1` |", "| `2` |"), encoding="utf-8")
    subprocess.run([sys.executable, *program[:-1], str(page)], cwd=ROOT, check=True, timeout=120)
    assert page.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


def test_a_page_without_the_marks_is_left_alone() -> None:
    with pytest.raises(ValueError, match="once each"):
        with_table("# A page\n")
