"""The page: what stands on its first screen, and that it needs nothing and runs nothing but its own."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ds_silent.cli import app
from ds_silent.records import Event, ObjectiveStats, Place, Score, Scores
from ds_silent.runs.report.page import gist
from ds_silent.runs.report.tables import settings_of
from ds_silent.runs.run import read_run
from ds_silent.sinks.jsonl import JsonlSink
from tests.support.made_records import Run


def bad_rank(directory: Path, steps: int = 20) -> Path:
    """Rank 2 of 4, on a host of its own, has gradients that are too large from step 10 on; told at step 12."""
    sink, run = JsonlSink(directory), Run()
    for step in range(1, steps + 1):
        sink.write(run.record(scale=5.0 if step >= 10 else 1.0))
        sink.write_scores(Scores(step, (Score("outlier", max(step - 9, 0) * 6.0, 16.6, 2),)))
    place = Place(2, 2, "node0087", 3, "cuda:3", None)
    said = "Rank 2 has larger gradients than the others, since about step 10. Most likely: a hook."
    where = (2,), "gradient norm", 18.0, 16.6
    sink.write_event(Event(12, "outlier-rank", "error", *where, said, "Look at its code.", places=(place,)))
    sink.close()
    return directory


def report(*arguments: Path | str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    return result.exit_code, result.output, result.stderr


def first_screen(page: str) -> str:
    return re.sub(r"<[^>]+>", " ", page[page.index("<header") : page.index("</header>")])


def test_rank_host_and_step_stand_on_the_first_screen(tmp_path: Path) -> None:
    code, told, _ = report(bad_rank(tmp_path / "run"), "-o", tmp_path / "report.html")
    assert code == 0
    assert "Rank 2 (node0087:3) is not like the others, since step 10 (found at step 12)." in told
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    first = first_screen(page)
    assert "Rank 2 (node0087:3) is not like the others, since step 10" in first
    assert "Most likely: a hook." in first
    assert re.search(r"Replicas\s+not observed\s+they were never compared", first)


def test_the_row_of_an_event_has_the_steps_of_the_headline(tmp_path: Path) -> None:
    sink, run = JsonlSink(tmp_path), Run()
    for _ in range(40):
        sink.write(run.record())
    event = Event(20, "outlier-rank", "warning", (3,), "loss", 9.0, 8.0, "Rank 3 is off, since about step 9.", "Look.")
    message = "Ended: outlier-rank, from step 9 to 30."
    ended = Event(31, "outlier-rank", "info", (3,), "loss", None, None, message, "", phase="ended")
    sink.write_event(event)
    sink.write_event(ended)
    sink.close()
    assert report(tmp_path)[0] == 0
    page = (tmp_path / "report.html").read_text()
    assert "from step 9 to 30." in first_screen(page)
    assert "steps 9 to 30 (found at step 20)" in page
    assert page.count("Rank 3 is off, from about step 9 to 30.") == 2
    assert "since about step 9" not in page


def test_causes_are_drawn_before_what_comes_of_them(tmp_path: Path) -> None:
    sink, run = JsonlSink(tmp_path), Run()
    for _ in range(40):
        sink.write(run.record())
    cause = Event(10, "update-mismatch", "warning", (1,), "decay", None, None, "Rank 1 decays.", "Look.")
    worse = Event(12, "replica-drift", "error", (1,), "weight", None, None, "Rank 1 differs.", "Look.")
    effect = Event(20, "outlier-rank", "error", (1,), "loss", None, None, "Off, since step 8.", "")
    for event in (worse, replace(effect, follows="update-mismatch (decay)"), cause):
        sink.write_event(event)
    sink.close()
    assert report(tmp_path)[0] == 0
    page = (tmp_path / "report.html").read_text()
    order = ["update-mismatch", "outlier-rank", "replica-drift"]
    assert re.findall(r'<text class="y"[^>]*>([\w-]+-[\w-]+) · 1<', page) == order
    assert re.findall(r"</span> <b>([\w-]+)</b>", page) == order


def test_a_fault_that_is_open_is_drawn_to_the_last_step(tmp_path: Path) -> None:
    sink, run = JsonlSink(tmp_path), Run()
    for _ in range(41):
        sink.write(run.record())
    open_fault = Event(21, "replica-drift", "error", (1,), "weight", None, None, "Apart.", "", phase="started")
    over = replace(open_fault, kind="drift", phase="started"), replace(open_fault, kind="drift", step=31, phase="ended")
    for event in (open_fault, *over, replace(open_fault, kind="outlier-rank", phase=None)):
        sink.write_event(event)
    sink.close()
    assert report(tmp_path)[0] == 0
    page = (tmp_path / "report.html").read_text()
    bars = re.findall(r'<rect class="span [^"]*" x="([\d.]+)%" y="\d+" width="([\d.]+%?)"', page)
    assert sorted(bars) == [("50.00", f"{1000 / 41:.2f}%"), ("50.00", f"{2000 / 41:.2f}%"), ("50.00", "6")]


def objective_of(directory: Path, *found: tuple[float, ...] | None) -> str:
    """The page's sentence on records with these weights: of all labels, of the least and of the largest; an angle."""
    sink, run = JsonlSink(directory), Run()
    for one in found:
        stats = ObjectiveStats(known=False) if one is None else ObjectiveStats(*one[:3], 100, True, *one[3:])
        sink.write(replace(run.record(), objective=stats))
    sink.close()
    assert report(directory)[0] == 0
    page = (directory / "report.html").read_text(encoding="utf-8")
    section = page[page.index('id="h-objective"') :]
    section = section[section.index("gradient.</p>") + len("gradient.") : section.index("</section>")]
    return html.unescape(re.sub(r"<[^>]+>", "", section)).strip()


def test_the_objective_is_a_sentence(tmp_path: Path) -> None:
    mean = "The labels of a step weigh together 1: its gradient is that of a mean."
    even, uneven = (1.0, 0.01, 0.01), (1.0, 0.01, 0.018)
    assert objective_of(tmp_path / "even", even, even) == f"{mean} All labels of a step count alike."
    said = f"{mean} Within a step one label counts up to 1.8 times another."
    assert objective_of(tmp_path / "uneven", even, None, uneven) == said
    turned = ": ranks do not weigh their labels alike, which turns the gradient by up to 2.5 degrees"
    angles = [(*even, 0.0, 0.0), (*uneven, 2.5, 0.25), (*uneven, 1.0, 0.5), uneven]
    assert objective_of(tmp_path / "turned", *angles) == f"{said[:-1]}{turned} (± 0.25)."
    assert objective_of(tmp_path / "exactly", (*uneven, 2.5, 0.0)) == f"{said[:-1]}{turned}."
    added_up = "The labels of a step weigh together 4: its gradient is 4 times a mean's."
    assert objective_of(tmp_path / "added", (4.0, 0.01, 0.01)).startswith(added_up)
    sums = "The labels of a step weigh together 90 to 110; a mean's weigh 1."
    assert objective_of(tmp_path / "sums", (90.0, 1.0, 1.0), (110.0, 1.0, 1.0)).startswith(sums)
    assert objective_of(tmp_path / "unknown", None).startswith("How much a label counts is not known")


def test_the_page_needs_nothing_and_its_policy_admits_its_own_script_alone(tmp_path: Path) -> None:
    report(bad_rank(tmp_path / "run"), "-o", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", page)
    assert not re.findall(r"\sstyle=|\son\w+=", page)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    assert "default-src 'none'" in policy[1].replace("&#39;", "'")
    for element in ("script", "style"):
        (text,) = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"sha256-{digest}" in policy[1]


def test_hovering_has_the_numbers_that_were_recorded(tmp_path: Path) -> None:
    run = bad_rank(tmp_path / "run")
    report(run, "-o", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    held = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert held["axes"][0]["steps"] == [[step, step] for step in range(1, 21)]
    (loss,) = (one for one in held["figures"] if one["title"] == "Loss")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    (mean,) = (one["mean"] for one in loss["series"] if one["name"] == "mean")
    assert mean == [float(f"{line['loss']['mean']:.4g}") for line in lines]
    (norms,) = (one for one in held["figures"] if one["title"].startswith("Gradient norm, rank"))
    assert norms["rows"][0].startswith("rank 2")  # the guilty row is on top
    each = lines[14]["grad_norm"]["per_rank"]
    middle = sorted(each)[1:3]
    expected = each[2] / (middle[0] * middle[1]) ** 0.5  # of the median of the logarithms
    assert abs(norms["values"][0][14] / expected - 1) < 0.01
    assert held["since"] == 10


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    bad_rank(tmp_path / "runs" / "a")
    sink = JsonlSink(tmp_path / "runs" / "b")
    sink.write(Run().record())
    sink.close()
    code, told, _ = report(tmp_path / "runs", "-o", tmp_path / "report.html")
    assert code == 0
    assert "2 runs, 1 with an alarm" in told
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "1 of 2 runs has an alarm." in page
    assert page.count('<article class="run ') == 2


def test_the_page_lies_beside_its_run_and_overwrites_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("report.html").write_text("somebody's own")
    for name in ("monday", "tuesday"):
        bad_rank(Path("runs", name))
    for given, page in (
        (("runs/monday",), "runs/monday/report.html"),
        (("runs/monday", tmp_path / "runs" / "tuesday"), "runs/report.html"),
        (("runs",), "runs/report.html"),
    ):
        code, told, _ = report(*given)
        assert code == 0
        assert f"{page}'; open it in a browser" in told
        assert "is not like the others" in Path(page).read_text(encoding="utf-8")
        Path(page).unlink()
    assert Path("report.html").read_text() == "somebody's own"


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for given, says in (
        ((tmp_path / "none",), "is no directory of a run; give the output_dir"),
        ((tmp_path / "empty",), "holds no records of ds_silent"),
        ((bad_rank(tmp_path / "run"), "-o", tmp_path / "run" / "metrics.jsonl" / "r.html"), "choose another -o"),
    ):
        code, out, error = report(*given)
        assert code == 2
        assert says in (error or out)
        assert "Traceback" not in out + error


def test_the_likeliest_cause_is_on_the_first_screen_also_behind_a_number() -> None:
    message = "The ranks disagree since step 21 at least. Cosine -0.054. Most likely: its rows. Else: its loss."
    assert gist(message) == "The ranks disagree since step 21 at least. Most likely: its rows."
    either = "Most likely, if rank 0 is wrong: its rows; if rank 1 is wrong: its loss."
    assert gist(f"It is off. Cosine -0.5. {either} So it is.") == f"It is off. {either}"
    assert gist("It is off. So it is.") == "It is off."


def test_settings_are_shown_as_people_write_them(tmp_path: Path) -> None:
    directory = bad_rank(tmp_path / "run")
    settings = {"lr": 6e-4 * (1 + 2**-52), "betas": [0.9, 0.30000000000000004], "eps": 1e-8, "optimizer": "AdamW"}
    assert str(settings["lr"]) != "0.0006"
    facts = {"settings": {name: {"value": value, "from": "yours"} for name, value in settings.items()}}
    (directory / "run.json").write_text(json.dumps(facts))
    assert settings_of(read_run(directory)) == (
        ("lr", "0.0006", "yours"),
        ("betas", "[0.9, 0.3]", "yours"),
        ("eps", "1e-08", "yours"),
        ("optimizer", "AdamW", "yours"),
    )


def test_a_page_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    code, _, said = report(bad_rank(tmp_path / "run"), "-o", tmp_path / "taken")
    assert (code, "cannot be written" in said) == (2, True)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run", "taken"]
