"""Lightning's Trainer, observed: losses and norms as computed, the same weights, a resume, no line of a script."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="Lightning is not installed")

from ds_silent.integrations import BLOCK_FILE
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.frameworks.test_ways_in import free_port, run
from tests.integrations.lightning_training import LightningCase, LightningTrace, Scalars, train
from tests.support.distributed import run_distributed
from tests.support.interpreter import interpreter

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "launch" / "examples" / "lightning_trainer.py"
CASES = {
    "ddp": LightningCase(named={"gradient_clip_val": 0.5}),
    "ddp, accumulation": LightningCase(accumulation=3, block="environment"),
    "ddp, steps by hand": LightningCase(manual=True),
    "ddp, static graph, steps by hand": LightningCase(manual=True, options={"static_graph": True}),
    "ddp, static graph": LightningCase(options={"static_graph": True}),
    "ddp, unused allowed, steps by hand": LightningCase(manual=True, options={"find_unused_parameters": True}),
    "ddp, views, steps by hand": LightningCase(manual=True, options={"gradient_as_bucket_view": True}),
    "ddp, two optimizers": LightningCase(adversaries="frozen", options={"find_unused_parameters": True}),
    "ddp, two optimizers, nothing frozen": LightningCase(adversaries="free", options={"find_unused_parameters": True}),
    "fsdp2": LightningCase(strategy="fsdp2", accumulation=2),
    "deepspeed, the ds_config's block": LightningCase(strategy="deepspeed", block="ds_config"),
    "deepspeed, accumulation": LightningCase(strategy="deepspeed", stage=2, accumulation=2),
}


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A folder for ``sys.path`` with the entry points as ``pip install`` writes them, from pyproject.toml."""
    folder = tmp_path_factory.mktemp("installed")
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    groups = re.findall(r'\[project\.entry-points\."([^"]+)"\]\n((?:\w+ = "[^"]+"\n)+)', text)
    assert {name for name, _ in groups} == {
        "lightning.pytorch.callbacks_factory",
        "pytorch_lightning.callbacks_factory",
    }
    info = folder / "ds_silent_entries-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ds_silent_entries\nVersion: 0\n")
    lines = [f"[{name}]\n{body}" for name, body in groups]
    (info / "entry_points.txt").write_text("\n".join(lines).replace('"', ""))
    return str(folder)


def all_of_it(directory: str, entries: str) -> dict[str, list[LightningTrace]]:
    """On every rank: each case observed and not, a resume, and what a logger is given."""
    sys.path.insert(0, entries)
    found = {}
    for place, (name, case) in enumerate(CASES.items()):
        folder = Path(directory, str(place))
        found[name] = [train(case, folder / "on", True), train(case, folder / "off", False)]
    for strategy in ("ddp", "deepspeed"):
        folder, case = Path(directory, f"resume-{strategy}"), LightningCase(strategy=strategy)
        kept = str(folder / "kept" / "end.ckpt")
        found[f"resume, {strategy}"] = [
            train(case, folder, True, keep=True),
            train(replace(case, epochs=2), folder, True, checkpoint=kept),
            train(replace(case, epochs=2), folder / "plain", False),
        ]
    logger = Scalars()
    logged = train(LightningCase(named={"logger": logger, "log_every_n_steps": 2}), Path(directory, "logged"), True)
    found["logged"] = [replace(logged, events=tuple(sorted(logger.seen.items())))]  # type: ignore[arg-type]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, entries: str) -> list[dict[str, list[LightningTrace]]]:
    return run_distributed(all_of_it, 2, (str(tmp_path_factory.mktemp("lightning")), entries), timeout=280)


def steps_of(values: tuple[float, ...], accumulation: int, epoch: int = 8) -> list[float]:
    """Means over the micro-batches of each step; an epoch's end ends a step."""
    starts = range(0, len(values), accumulation)
    assert len(values) <= epoch or epoch % accumulation == 0
    return [sum(values[i : i + accumulation]) / len(values[i : i + accumulation]) for i in starts]


@pytest.mark.parametrize("name", CASES)
def test_losses_norms_and_weights(name: str, found: list[dict[str, list[LightningTrace]]]) -> None:
    case, ranks = CASES[name], [rank[name] for rank in found]
    for observed, plain in ranks:
        assert (observed.weights, observed.losses) == (plain.weights, plain.losses)
    records = ranks[0][0].records
    expected = [steps_of(rank[0].losses, case.accumulation) for rank in ranks]
    if case.accumulation == 3:  # 8 micro-batches: Lightning divides the last two by 3, too; shares would be 2/3
        assert len(expected[0]) == 3
    assert [record["step"] for record in records] == list(range(1, len(expected[0]) + 1))
    for place, record in enumerate(records):
        assert record["loss"]["per_rank"] == pytest.approx([rank[place] for rank in expected], rel=1e-5)
        if case.accumulation == 1 and case.strategy != "fsdp2":
            assert record["grad_norm"]["per_rank"] == pytest.approx([rank[0].norms[place] for rank in ranks], rel=1e-4)
        if case.adversaries == "free" and place:  # the other one's gradient stays, and is of before
            assert (record["integrity"]["relative_error"], record["grad_norm"]["aggregated"]) == (None, None)
        else:
            assert record["integrity"]["relative_error"] <= record["integrity"]["rounding_bound"]
    assert records[-1]["samples"] == 64
    twice = case.strategy == "deepspeed" and case.accumulation > 1  # Lightning divides, and DeepSpeed does
    found_at = [(event["kind"], event["severity"], event["step"]) for event in ranks[0][0].events]
    assert found_at == ([("objective-mismatch", "warning", 1)] if twice else [])


@pytest.mark.parametrize("strategy", ["ddp", "deepspeed"])
def test_a_checkpoint_goes_on(strategy: str, found: list[dict[str, list[LightningTrace]]]) -> None:
    first, second, plain = found[0][f"resume, {strategy}"]
    assert [record["step"] for record in first.records] == list(range(1, 9))
    assert [record["step"] for record in second.records] == list(range(1, 17))
    assert [record["samples"] for record in second.records] == [8 * step for step in range(1, 17)]
    assert [record["loss"]["per_rank"][0] for record in second.records] == pytest.approx(plain.losses, rel=1e-6)
    assert second.weights == plain.weights
    assert second.events == ()


def test_the_numbers_go_to_the_trainers_loggers(found: list[dict[str, list[LightningTrace]]]) -> None:
    seen = found[0]["logged"][0]
    values = dict(seen.events)  # type: ignore[arg-type]
    ours = {step: one for step, one in values.items() if "silent/loss/std" in one}
    assert list(ours) == [1, 3, 5, 7]  # a record comes one step later
    for step, one in ours.items():
        assert one["silent/loss/std"] == pytest.approx(seen.records[step - 1]["loss"]["std"])


SCRIPT = """
import sys
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

torch.manual_seed(0)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **quiet)
trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4))
sys.stdout.flush()  # two processes write into one pipe, whose writes of a line are whole
print(f"imported {sorted(name for name in sys.modules if name.startswith('ds_silent'))}", flush=True)
"""


@pytest.mark.long
def test_an_unchanged_script_by_its_environment(tmp_path: Path, entries: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by Lightning itself, which starts the other process; without the variable nothing is loaded or said."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "silent.json").write_text(json.dumps({"output_dir": str(tmp_path / "run"), "tensorboard": False}))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), entries]))
    monkeypatch.setenv("MASTER_PORT", free_port())
    status, said = run([interpreter(), "train.py"], tmp_path)
    assert status == 0, said
    rooms = ("", ".extras", ".integrations", ".integrations.lightning_entry", ".patches")
    loaded = [f"ds_silent{room}" for room in rooms]
    assert f"imported {loaded}" in said
    assert "ds_silent:" not in said
    monkeypatch.setenv(BLOCK_FILE, "silent.json")
    status, said = run([interpreter(), "train.py"], tmp_path)
    assert status == 0, said
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    assert "ds_silent: observing 2 ranks" in said


@pytest.mark.long
@pytest.mark.parametrize("ways", ["launcher", "launcher and callback"])
def test_what_the_trainer_promises_is_known_without_a_line(ways: str, tmp_path: Path) -> None:
    """A loss that is divided by the accumulation twice is told as with the callback, and once."""
    more = "accumulate_grad_batches=2, max_epochs=1"
    script = SCRIPT.replace("square().mean()", "square().mean() / 2")
    if ways != "launcher":
        more += ", callbacks=[SilentConsistencyCallback('silent.json')]"
        script = f"import lightning\nfrom ds_silent.integrations.lightning import SilentConsistencyCallback\n{script}"
    script = script.replace("max_epochs=1", more)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "silent.json").write_text(json.dumps({"output_dir": str(tmp_path / "run"), "tensorboard": False}))
    command = [interpreter(), "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port()]
    ours = ["-m", "ds_silent", "--silent-consistency-config", "silent.json", "train.py"]
    status, said = run([*command, *ours], tmp_path)
    assert status == 0, said
    events = [
        event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "objective-mismatch"
    ]
    assert [(event["severity"], event["step"]) for event in events] == [("warning", 1)]
    assert "Lightning's Trainer promises the mean" in events[0]["message"]
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


@pytest.mark.long
def test_an_interrupted_training_is_recorded_as_one(
    tmp_path: Path, entries: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = "        return self.net(batch[0])"
    (tmp_path / "train.py").write_text(SCRIPT.replace(step, f"        if index == 2: raise KeyboardInterrupt\n{step}"))
    (tmp_path / "silent.json").write_text(json.dumps({"output_dir": str(tmp_path / "run"), "tensorboard": False}))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), entries]))
    monkeypatch.setenv("MASTER_PORT", free_port())
    monkeypatch.setenv(BLOCK_FILE, "silent.json")
    status, said = run([interpreter(), "train.py"], tmp_path)
    assert status in (1, -9), said  # -9: Lightning's own watcher came first
    ended = json.loads((tmp_path / "run" / "run.json").read_text())["ended"]
    assert (ended["step"], ended["error"], ended["interrupted"]) == (2, None, True)
    assert "verdict: The training was interrupted after step 2; until then no fault was seen" in said


@pytest.mark.long
def test_the_example_under_torchrun(tmp_path: Path) -> None:
    command = [interpreter(), "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port()]
    status, said = run([*command, str(EXAMPLE), "--epochs", "1", "--output-dir", str(tmp_path / "out")], tmp_path)
    assert status == 0, said
    records = list(read_metrics(tmp_path / "out" / "metrics.jsonl"))
    assert [record["step"] for record in records] == list(range(1, 17))
    assert records[-1]["loss"]["mean"] < records[0]["loss"]["mean"]
    events = read_events(tmp_path / "out" / "events.jsonl")
    assert [event for event in events if event["severity"] != "info"] == []
