"""What the pages say leads somewhere: links, anchors, names of files, examples, and the index of docs/."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from pathlib import Path

import pytest

from ds_silent.config import parse
from ds_silent.records import Event, EventKind, to_json
from ds_silent.sinks import open_files
from tests.sinks.example_records import full_record
from tests.support.pages import DOCS, PAGES, ROOT, anchors, commands, fences, links, paths

LONGEST_README = 150
LARGEST_PICTURE = 100_000  # bytes
PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@PAGE
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{link} of {page.name} is not there"
        if anchor:
            known = anchors(target.read_text(encoding="utf-8"))
            assert anchor in known, f"{link} of {page.name}: the headings there are {known}"


@PAGE
def test_files_that_are_named_exist(page: Path) -> None:
    missing = [path for path in paths(page.read_text(encoding="utf-8")) if not (ROOT / path).exists()]
    assert missing == []


@PAGE
def test_examples_can_be_copied(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for example in fences(text, "python"):
        compile(example, str(page), "exec")
    for example in fences(text, "json"):
        assert parse(json.loads(f"{{{example}}}")) is not None


def test_the_example_of_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, per_rank = fences((DOCS / "records.md").read_text(encoding="utf-8"), "python")
    monkeypatch.chdir(tmp_path)
    record = full_record(ranks=65, layers=(), cosine_matrix=None)
    files = open_files(tmp_path / "runs" / "my-run", tensorboard=False)
    files.write(record)
    files.close()
    printed: list[tuple[object, ...]] = []
    exec(metrics, {"print": lambda *values: printed.append(values)})
    assert printed == [(record.step, record.loss.std, record.direction.mean_cosine)]
    exec(per_rank, {"print": lambda *values: printed.append(values)})
    assert printed[1][:3] == (record.step, pytest.approx(max(record.loss.per_rank or ())), 64)


def test_every_field_of_the_records_is_explained() -> None:
    record = to_json(full_record())
    named = {*record, *(key for part in record.values() if isinstance(part, dict) for key in part)}
    text = (DOCS / "records.md").read_text(encoding="utf-8")
    assert {name for name in named if f"`{name}`" not in text} == set()
    text = (DOCS / "events.md").read_text(encoding="utf-8")
    assert {field.name for field in dataclasses.fields(Event) if f"`{field.name}`" not in text} == set()


def test_every_kind_of_event_is_explained() -> None:
    table = (DOCS / "events.md").read_text(encoding="utf-8").split("## The kinds")[1].split("\n## ")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(.*?)`", " ".join(first_cells))) == set(typing.get_args(EventKind))


def test_every_kind_of_event_has_its_section_in_the_runbook() -> None:
    first, *sections = (DOCS / "runbook.md").read_text(encoding="utf-8").split("\n## ")[1:]
    assert first.startswith("First, for any event")
    titles = [section.splitlines()[0] for section in sections]
    assert titles == list(typing.get_args(EventKind))
    asked = ["Cause.", "Confirm.", "Remedy."]
    for section in sections:
        labels = re.findall(r"^\* \*\*(.*?)\*\* \S", section, re.MULTILINE)
        assert labels in (asked, [*asked, "Note."]), section.splitlines()[0]


def test_the_pictures_are_small_and_each_is_shown() -> None:
    shown = {(page.parent / link).resolve() for page in PAGES for link in links(page.read_text(encoding="utf-8"))}
    pictures = set((DOCS / "pictures").glob("*.png"))
    assert len(pictures) >= 6
    assert pictures <= shown
    assert max(picture.stat().st_size for picture in pictures) < LARGEST_PICTURE


def test_first_steps_are_few_lines() -> None:
    text = (DOCS / "first-steps.md").read_text(encoding="utf-8")
    examples = fences(text, "python")
    assert len(examples) == 6
    assert max(len(example.strip().splitlines()) for example in examples) <= 12
    for example in examples:
        assert "ds_silent" in example


def test_the_index_names_every_page() -> None:
    index = links((DOCS / "README.md").read_text(encoding="utf-8"))
    assert {page.name for page in DOCS.glob("*.md")} - {"README.md"} <= set(index)


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= LONGEST_README


def test_commands_are_found_in_every_form() -> None:
    page = """
`make demo`, `no`, [`launch/gpu.sh`](x) and `torchrun
-m x`

    ds-silent check \\
        a.json    # why
    no command

```python
import x
```

make no command of a line between two fences

```sh
# a remark
python x.py --a
srun anything
```

```json
make nothing
```
"""
    assert commands(page) == [
        "make demo",
        "launch/gpu.sh",
        "torchrun -m x",
        "ds-silent check a.json",
        "python x.py --a",
        "srun anything",
    ]


def test_anchors_are_those_of_github() -> None:
    page = "# What it costs?\n\n## `interval` & *more*\n\n## Twice\n\n## Twice\n\n```sh\n# no heading\n```\n"
    assert anchors(page) == ["what-it-costs", "interval--more", "twice", "twice-1"]


def test_links_are_found_in_every_form() -> None:
    page = "[a](b.md#c)\n\n![d](e.png)\n\n| [f](g) |\n|---|\n| [`h`](i) |\n\n`[no](link)`\n"
    assert links(page) == ["b.md#c", "e.png", "g", "i"]
