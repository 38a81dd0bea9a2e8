"""Whatever stands in a run's directory: a page, or one sentence; nothing of it acts in the page."""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ds_silent.runs import read_run
from ds_silent.runs.report import write_report
from ds_silent.runs.run import ReadingError
from ds_silent.sinks.per_rank import MAGIC, MARK, VERSION

HTML = "</script></style><script>alert(1)</script><img src=x onerror=alert(1)>\"'><svg onload=alert(1)>"
ESCAPES = "\x1b[2J\x1b]0;owned\x07\u202e\u0000\r\n\u2028"


def step(number: Any = 1, **more: Any) -> dict[str, Any]:
    record = {
        "step": number,
        "samples": 16,
        "epoch": 0.1,
        "world_size": 4,
        "loss": {"mean": 2.0, "std": 0.1, "range": 0.2, "per_rank": [1.9, 2.0, 2.1, 2.0]},
        "grad_norm": {"method": "exact", "mean": 1.0, "cv": 0.1, "aggregated": 0.5, "per_rank": [1.0, 1.1, 0.9, 1.0]},
        "direction": {"method": "sketch", "mean_cosine": 0.1, "per_rank": [0.1, 0.1, 0.1, 0.1]},
        "noise_scale": 100.0,
        "integrity": {"relative_error": 1e-8, "rounding_bound": 1e-7, "replica_groups": [[0, 1, 2, 3]]},
        "seconds": {"step": 0.1, "observe": 0.01},
    }
    return record | more


def event(**more: Any) -> dict[str, Any]:
    told = {"step": 1, "kind": "outlier-rank", "severity": "error", "ranks": [2], "where": "loss", "score": 20.0}
    return told | {"threshold": 16.0, "message": "Rank 2 is off.", "remedy": "Look."} | more


def lines(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def run(per_rank: bytes | None = None, **files: Any) -> dict[str, bytes]:
    """A run's files: of lines (a list is one of objects), or of one object (a dictionary)."""
    found = {} if per_rank is None else {"per_rank.bin": per_rank}
    for name, content in files.items():
        one = lines(*content) if isinstance(content, list) else content
        ending = "json" if name in ("run", "ranks", "preflight") else "jsonl"
        found[f"{name}.{ending}"] = json.dumps(one).encode() if isinstance(one, dict) else one
    return found


def block(number: int, ranks: int, data: bytes, columns: int = 7) -> bytes:
    head = struct.pack("<4sIIIQI", MARK, ranks, columns, zlib.crc32(data), number, 0)
    return head + struct.pack("<I", zlib.crc32(head)) + data


START = struct.pack("<8sII", MAGIC, VERSION, 0)
TABLE = [[1.0, 0.5], [0.5, 1.0]]
ONE = [step(1)]
NOT_CODED, EVERY_BYTE = lines(event()).replace(b"Rank", b"\xff\xfe\xc3"), bytes(range(256)) * 40
HTML_EVENT = event(message=HTML, remedy=HTML, where=HTML, kind=HTML, severity=HTML, places=[{"rank": 2, "host": HTML}])
ODD_MATRICES = ([], [[]], [[1], [1, 2]], "x", [["nan"]], [[None, 1], [1, {}]], TABLE)
ODD_LAYERS = ([], [1, None], [{"name": 3}], [{"mean_cosine": "nan"}])
HOSTILE: dict[str, dict[str, bytes]] = {
    "torn": run(metrics=lines(step(1), step(2))[:-30], events=lines(event())[:-5]),
    "torn in the middle": run(metrics=lines(step(1))[:-40] + b"\n" + lines(step(2))),
    "empty files": run(metrics=b"", events=b"", preflight=b"", run=b""),
    "only newlines": run(metrics=b"\n\n\n\n", events=b"\n"),
    "binary": run(metrics=EVERY_BYTE, events=EVERY_BYTE, run=EVERY_BYTE, ranks=EVERY_BYTE),
    "no UTF-8": run(events=NOT_CODED),
    "foreign lines": run(metrics=[{"loss": 1}, [1, 2], "text", 7, None, {"step": "1"}, step(3)]),
    "another program's JSON": run(run=lines([1, 2]), preflight=b'"text"', ranks=b"3"),
    "steps that are none": run(metrics=[step(s) for s in (-1, 1.5, True, None, "2", 10**400, 2**63, 4)]),
    "steps backwards": run(metrics=[step(s) for s in range(30, 0, -1)]),
    "one step a thousand times": run(metrics=ONE * 1000),
    "steps far apart": run(metrics=[step(1), step(2), step(2**62)]),
    "NaN strings": run(metrics=[step(1, loss={"mean": "nan", "std": "inf", "per_rank": ["nan", "-inf", 1, 2]})]),
    "NaN as Python writes it": run(metrics=b'{"step": 1, "loss": {"mean": NaN, "per_rank": [NaN, Infinity]}}\n'),
    "all ranks NaN": run(metrics=[step(s, loss={"mean": "nan", "per_rank": ["nan"] * 4}) for s in range(1, 9)]),
    "huge numbers": run(
        metrics=[step(1, noise_scale=10**500), step(2, loss={"mean": 1e308, "per_rank": [1e308, -1e308]})]
    ),
    "tiny numbers": run(metrics=[step(1, loss={"mean": 5e-324}), step(2, loss={"mean": 0.0})]),
    "huge rounding bound": run(
        metrics=[step(1, integrity={"relative_error": 1e300, "rounding_bound": 1e-300}), step(2)]
    ),
    "negative norms": run(metrics=[step(1, grad_norm={"mean": -1.0, "per_rank": [-1.0, 0.0, 1.0, 2.0]})]),
    "wrong types": run(
        metrics=[step(1, loss="text", grad_norm=[1], direction=7, integrity=None, seconds=True, coverage="x")]
    ),
    "wrong types inside": run(
        metrics=[step(1, loss={"mean": [1], "per_rank": {"0": 1}}, grad_norm={"per_rank": [[], {}, "x"]})]
    ),
    "0 ranks": run(metrics=[step(1, world_size=0, loss={"per_rank": []}, direction={"per_rank": []})]),
    "minus one ranks": run(metrics=[step(1, world_size=-1)], events=[event(ranks=[-1])]),
    "more ranks than there are": run(metrics=[step(1, world_size=10**12)]),
    "ranks come and go": run(
        metrics=[step(s, world_size=s % 5 + 1, loss={"per_rank": [1.0] * (s % 5 + 1)}) for s in range(1, 60)]
    ),
    "quantiles that are none": run(metrics=[step(1, world_size=99, loss={"quantiles": {"min": "x"}})]),
    "ranks nobody has": run(metrics=ONE, events=[event(ranks=[999_999, 2, "x", None])]),
    "HTML in every text": run(
        metrics=[step(1, grad_norm={"method": HTML, "per_rank": [1, 2]})],
        events=[HTML_EVENT],
        scores=[{"step": 1, "scores": [{"detector": HTML, "where": HTML, "score": 1.0, "threshold": 2.0}]}],
        layers=[{"step": 1, "layers": [{"name": HTML, "norm_cv": 0.1, "mean_cosine": 0.2}]}],
        ranks={"ranks": [{"rank": n, "host": HTML, "device": HTML} for n in range(4)]},
        preflight={"items": [{"name": HTML, "group": HTML, "ok": False, "verdict": HTML, "values": [HTML]}]},
        run={"framework": HTML, "started": HTML, "block": {HTML: HTML}, "training": {HTML: 1}},
    ),
    "terminal escapes": run(events=[event(message=ESCAPES, where=ESCAPES, kind=ESCAPES + "kind")]),
    "a newer version": run(
        metrics=[step(1, entropy={"mean": 1})],
        events=[event(kind="cosmic-ray", severity="fatal", blame=[1])],
        run={"version": 9, "framework": "JAX", "block": {"new": True}},
        preflight={"version": 7, "items": {"not": "a list"}},
    ),
    "deep nesting": run(metrics=b'{"step": ' + b"[" * 100_000 + b"\n" + lines(step(2)), run=b"[" * 100_000),
    "a line without an end": run(metrics=lines(step(1)) + b'{"step": 2, "x": "' + b"x" * (17 << 20)),
    "ten thousand different faults": run(events=[event(step=n, where=f"layer {n}") for n in range(10_000)]),
    "events alone": run(events=[event(step=0), event(step=5), event(step=10**15)]),
    "scores that are none": run(
        metrics=ONE,
        scores=[
            {"step": 1, "scores": [{"detector": [], "score": "nan", "threshold": 0}, 3, {"score": 1}]},
            {"step": 2, "scores": 4},
        ],
    ),
    "a thousand detectors": run(
        metrics=ONE,
        scores=[{"step": 1, "scores": [{"detector": f"d{n}", "score": 1.0, "threshold": 0.0} for n in range(1000)]}],
    ),
    "matrices that are none": run(
        metrics=ONE, matrices=[{"step": n, "cosines": odd} for n, odd in enumerate(ODD_MATRICES)]
    ),
    "layers that are none": run(metrics=ONE, layers=[{"step": n, "layers": odd} for n, odd in enumerate(ODD_LAYERS)]),
    "the layers shown are frozen": run(
        metrics=[step(1), step(2)],
        layers=[
            {"step": s, "layers": [{"name": str(n), "norm_cv": None if n < 66 else 0.1} for n in range(70)]}
            for s in (1, 2)
        ],
    ),
    "raw values that are none": run(metrics=ONE, per_rank=b"not ours" * 100),
    "raw values, newer": run(metrics=ONE, per_rank=struct.pack("<8sII", MAGIC, 99, 0)),
    "raw values that lie": run(
        START + block(1, 4, b"\0" * 48) + block(2, 0, b"") + block(2**63 - 1, 1, b"\0\0\xc0\x7f" * 3) + b"STEP" * 99
    ),
    "a preflight of nothing": run(
        preflight={"items": [None, 3, {}, {"ok": "yes", "values": {"a": 1}}, {"ok": True, "group": 5}]}
    ),
    "places of nothing": run(
        metrics=ONE, ranks={"ranks": [None, {"rank": "x"}, {"rank": 1, "host": ""}, {"rank": 10, "host": 7}]}
    ),
}


class Elements(HTMLParser):
    """What a browser would act on."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts, self.acts = 0, []  # type: ignore[var-annotated]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        named = dict(attrs)
        self.acts += [name for name in named if name.startswith("on") or name == "style"]
        if tag in ("img", "iframe", "object", "embed", "link", "base"):
            self.acts.append(tag)
        for name in ("src", "href", "action"):
            value = named.get(name)
            if value is not None and not value.startswith(("#", "data:image/png;base64,")):
                self.acts.append(f"{name}={value}")


def write(directory: Path, name: str) -> None:
    for file, content in HOSTILE[name].items():
        (directory / file).write_bytes(content)


def test_forty_of_them() -> None:
    assert len(HOSTILE) >= 40


@pytest.mark.parametrize("name", HOSTILE)
def test_there_is_a_page_or_a_sentence(name: str, tmp_path: Path) -> None:
    write(tmp_path, name)
    path, (verdict,) = write_report([tmp_path], tmp_path / "report.html")
    page = path.read_text(encoding="utf-8")
    found = Elements()
    found.feed(page)
    assert found.scripts == 2  # the numbers, and the page's own
    assert found.acts == []
    assert verdict.sentence.endswith(".")
    assert "\n" not in verdict.sentence
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", page)
    data = page.split('id="data">')[1].split("</script>")[0]
    assert json.loads(data, parse_constant=_refuse)["axes"]
    assert "Traceback" not in page
    assert len(page) < 5_000_000


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.long
def test_a_million_events_are_all_counted(tmp_path: Path) -> None:
    line = b'{"step": %d, "kind": "outlier-rank", "severity": "error", "ranks": [%d], "message": "m"}\n'
    (tmp_path / "events.jsonl").write_bytes(b"".join(line % (n, n % 7) for n in range(1_000_000)))
    path, (verdict,) = write_report([tmp_path], tmp_path / "report.html")
    page = path.read_text(encoding="utf-8")
    assert "<dd>1,000,000 error</dd>" in page
    assert page.count('<details class="fault error"') == 7
    assert sum(int(count.replace(",", "")) for count in re.findall(r"· ([\d,]+) events", page)) == 1_000_000
    assert verdict.since == 0
    assert len(page) < 5_000_000


def test_different_faults_are_all_counted_too(tmp_path: Path) -> None:
    write(tmp_path, "ten thousand different faults")
    log = read_run(tmp_path).events
    assert sum(group.count for group in log.groups()) == 10_000
    page = write_report([tmp_path], tmp_path / "report.html")[0].read_text(encoding="utf-8")
    told = [int(count.replace(",", "")) for count in re.findall(r"([\d,]+) further events", page)]
    assert sum(told) + 300 == 10_000


@pytest.mark.parametrize("make", [lambda p: p.symlink_to(p), lambda p: p.mkdir(), lambda p: p.chmod(0)])
def test_a_file_that_cannot_be_read_is_said(make: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(lines(step(1)))
    odd = tmp_path / "events.jsonl"
    if make.__code__.co_names[0] == "chmod":
        pytest.skip("root reads everything") if os.geteuid() == 0 else odd.touch()
    make(odd)
    found = read_run(tmp_path)
    assert len(found.steps) == 1
    assert any(problem.startswith("events.jsonl cannot be read: ") for problem in found.problems)


def test_a_name_that_is_none_is_a_sentence() -> None:
    with pytest.raises(ReadingError, match="is no directory of a run"):
        read_run("a\0b")
