"""``ds-silent compare`` as people, CI and test suites call it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from ds_silent.cli import app
from ds_silent.comparison.output import STATES
from ds_silent.comparison.result import LINKS, PHRASES
from ds_silent.testing import assert_same_training
from tests.comparison.conftest import Trained
from tests.support.pages import DOCS, ROOT, fences
from tests.support.traced import Training, write


def compare(*arguments: object, code: int) -> Any:
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)], env={"COLUMNS": "100"})
    assert result.exit_code == code, result.output
    return result


def test_the_answer_comes_first_and_the_table_behind_it(trained: Trained) -> None:
    said = compare(trained(), trained(fault="clipping", ranks=2), code=1).stdout
    first, a, b, *table = said.splitlines()
    assert first == (
        "The trainings part at step 1 at the applied gradient: another clip factor: A uses 1 of it, B clips to 0.5 "
        "(gradient_clipping: 1.0 in A, 0.5 in B)."
    )
    assert (a, b) == (f"A: {trained() / 'trace.jsonl'}", f"B: {trained(fault='clipping', ranks=2) / 'trace.jsonl'}")
    rows = [re.split(r" *│ *", line)[1:-1] for line in table if line.startswith("│")]
    assert [row[0] for row in rows] == [PHRASES[link] for link in LINKS[1:]]
    assert {row[1] for row in rows} <= set(STATES.values())
    assert [row[:3] for row in rows if row[1] == "parts"] == [["applied gradient", "parts", "1"]]
    assert "Settings that differ:\n  gradient_clipping: 1.0 in A, 0.5 in B\n" in said


def test_the_exit_status(tmp_path: Path, trained: Trained) -> None:
    compare(trained(), trained(ranks=2), code=0)
    compare(trained(), trained(fault="rate"), code=1)
    wrong = compare(trained(), tmp_path, code=2)
    assert wrong.stdout == ""
    assert wrong.stderr.count("\n") == 1
    assert "holds no trace.jsonl" in wrong.stderr
    assert "got 1\n" in compare(trained(), code=2).stderr
    assert "got 4\n" in compare(*[trained()] * 4, code=2).stderr
    assert "got 3 runs" in compare(*[trained()] * 3, "--golden", trained(), code=2).stderr
    assert "cannot be written" in compare(trained(), trained(), "--json", tmp_path / "no" / "x.json", code=2).stderr
    full = compare(trained(), trained(), "--json", "/dev/full", code=2)
    assert full.stderr == "ds-silent: the output cannot be written (No space left on device); choose another path\n"
    compare(trained(), trained(), "--tolerance", "-1", code=2)


def test_assert_prints_the_answer_alone(trained: Trained) -> None:
    said = compare(trained(), trained(fault="rate", since=6), "--assert", code=1).stdout
    answer = "another rate of every group from this step on: 0.001 in A, 0.0011 in B"
    assert said == f"The trainings part at step 6 at the rates: {answer}.\n"


def test_a_golden_run_takes_the_place_of_a(trained: Trained) -> None:
    golden, other = trained(), trained(fault="sign", since=6)
    answers = [
        compare(*arguments, "--assert", code=1).stdout
        for arguments in ((golden, other), ("--golden", golden, other), (other, "--golden", golden))
    ]
    assert len(set(answers)) == 1
    compare(trained(ranks=2), "--golden", golden, code=0)
    compare(trained(ranks=2), trained(order=1), "--golden", golden, code=0)  # and a repetition of it


def test_the_json(tmp_path: Path, trained: Trained) -> None:
    path = tmp_path / "found.json"
    compare(trained(), trained(fault="layer-scaled", since=6), "--json", path, code=1)
    found = json.loads(path.read_text())
    assert found["factor"] == pytest.approx(1.001, rel=1e-5)
    expected = {"parted": True, "step": 6, "layer": "layers.0", "link": "local", "left_out": [], "layers": ["layers.0"]}
    assert {name: found[name] for name in expected} == expected
    assert found["sentence"].startswith("The trainings part at step 6, in layer layers.0, at the local gradient: ")
    assert [one["link"] for one in found["links"]] == list(LINKS[1:])
    compare(trained(), trained(ranks=2), "--json", path, code=0)
    together = json.loads(path.read_text())
    assert [together[name] for name in ("parted", "step", "layer", "link", "factor", "cause")] == [False, *[None] * 5]


def test_the_junit_file(tmp_path: Path, trained: Trained) -> None:
    path = tmp_path / "found.xml"
    compare(trained(), trained(fault="sign", since=6), "--junit", path, code=1)
    suite = ElementTree.parse(path).getroot()
    assert suite.tag == "testsuite"
    assert [case.get("name") for case in suite] == [PHRASES[link] for link in LINKS]
    failed = [case for case in suite if case.find("failure") is not None]
    assert [case.get("name") for case in failed] == ["local gradient"]
    failure = failed[0].find("failure")
    assert failure is not None
    assert str(failure.get("message")).startswith("The trainings part at step 6, in layer layers.0, at the local")
    assert suite.get("failures") == "1"
    assert suite.get("tests") == str(len(LINKS))
    compare(trained(), trained(ranks=2), "--junit", path, code=0)
    assert ElementTree.parse(path).getroot().get("failures") == "0"


def test_names_of_a_hostile_trace_move_no_cursor_and_break_no_file(tmp_path: Path, trained: Trained) -> None:
    hostile = "layers.0\x1b[2J\u2028[red]\x00<&\ud800"
    names = [name for name in _heads_names(trained()) if name.startswith("layers.0")]
    assert names
    for name in ("a", "b"):
        text = ((trained() if name == "a" else trained(fault="sign")) / "trace.jsonl").read_text()
        (tmp_path / name).mkdir()
        (tmp_path / name / "trace.jsonl").write_text(text.replace('"layers.0', json.dumps(hostile)[:-1]))
    xml, found = tmp_path / "x.xml", tmp_path / "x.json"
    said = compare(tmp_path / "a", tmp_path / "b", "--junit", xml, "--json", found, code=1).stdout
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u2028]", said)
    assert ElementTree.parse(xml).getroot().get("failures") == "1"
    assert json.loads(found.read_text())["layer"].startswith("layers.0")


def _heads_names(path: Path) -> list[str]:
    return [one["name"] for one in json.loads((path / "trace.jsonl").read_text().splitlines()[0])["tensors"]]


def test_a_map_of_names(tmp_path: Path, trained: Trained) -> None:
    names = tmp_path / "names.json"
    names.write_text(json.dumps({"layers.0": "layers.0"}))
    compare(trained(), trained(ranks=2), "--map", names, code=0)
    names.write_text(json.dumps({"blocks": "layers"}))
    assert "--map names 'blocks', which A has not" in compare(trained(), trained(), "--map", names, code=2).stderr


def test_it_needs_no_torch(trained: Trained) -> None:
    program = "import sys; sys.modules['torch'] = None; from ds_silent.cli import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", program, "compare", str(trained()), str(trained(fault="rate")), "--assert"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("The trainings part at step 1 at the rates")


def test_the_assertion(trained: Trained) -> None:
    assert assert_same_training(trained(), trained(ranks=2)).compared == 10
    with pytest.raises(AssertionError) as raised:
        assert_same_training(trained(), trained(fault="layer-scaled"))
    assert str(raised.value).startswith("The trainings part at step 1, in layer layers.0, at the local gradient")
    assert not assert_same_training(trained(), trained(fault="layer-scaled"), tolerance=0.01).parted


def test_the_fixture(tmp_path: Path, trained: Trained) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["ds_silent.testing"]\n')
    (tmp_path / "test_upgrade.py").write_text(
        f"def test_same(assert_same_training):\n"
        f"    assert_same_training({str(trained())!r}, {str(trained(ranks=2))!r})\n"
        f"def test_other(assert_same_training):\n"
        f"    assert_same_training({str(trained())!r}, {str(trained(fault='rate'))!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "AssertionError: The trainings part at step 1 at the rates: another rate of every group" in done.stdout


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Training(), Path("runs/a"))
    write(Training(ranks=2, fault="sign", since=6), Path("runs/b"))
    said = compare("runs/a", "runs/b", code=1).stdout
    [shown] = fences((DOCS / "compare.md").read_text(encoding="utf-8"), "text")
    assert said.splitlines()[0] == shown.strip()
