"""The page of a comparison: what differs and nothing else, escaped, with a curve for each link that differs."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from pathlib import Path

from ds_silent.comparison import compare
from ds_silent.runs.report.page import comparison_page
from tests.comparison.conftest import Trained
from tests.comparison.test_command import compare as command
from tests.support.pages import ROOT


def panels(page: str) -> list[str]:
    return re.findall(r'<figure class="panel"><h3>(.*?)</h3>', page)


def test_it_shows_what_differs(trained: Trained, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    command(trained(), trained(fault="clipping", ranks=2), "--page", path, code=1)
    page = path.read_text(encoding="utf-8")
    found = compare(trained(), trained(fault="clipping", ranks=2))
    assert f"<h1>{found.sentence}</h1>" in page
    assert "<li>gradient_clipping: 1.0 in A, 0.5 in B</li>" in page
    assert "applied gradient: parts" in panels(page)
    assert "rows" not in " ".join(panels(page))
    marks = page.count('class="told error"')
    assert marks == len(panels(page)) > 1
    assert "<script" not in page
    style = (ROOT / "ds_silent/runs/report/page.css").read_text(encoding="utf-8")
    assert f"style-src 'sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}'" in page.replace(
        "&#39;", "'"
    )
    assert "cannot be written" in command(trained(), trained(), "--page", tmp_path / "no" / "x.html", code=2).stderr


def test_a_curve_has_each_step_and_ends_with_what_is_in_the_table(trained: Trained) -> None:
    found = compare(trained(), trained(ranks=2))
    assert not found.parted
    for link in found.links:
        assert len(link.curve) == link.compared
        assert [step for step, *_ in link.curve] == sorted({step for step, *_ in link.curve})
        assert link.equal == sum(size == 0.0 for _, size, _ in link.curve)
        assert link.largest == max((size for _, size, _ in link.curve), default=0.0)


def test_equal_trainings_have_no_curve(trained: Trained) -> None:
    page = comparison_page(compare(trained(), trained()))
    assert panels(page) == []
    assert 'class="verdict ok"' in page


def test_names_are_escaped(trained: Trained) -> None:
    hostile = "<img src=x onerror=alert(1)>\x1b[31m"
    found = replace(compare(trained(), trained(fault="rate")), a=hostile, left_out=(hostile,), versions=(hostile,))
    page = comparison_page(found)
    assert "<img" not in page
    assert "\x1b" not in page
    assert "&lt;img src=x" in page
