"""The fine-tune in real processes: two ranks that run many cases after one start, and one rank by the command line.

The file is its own worker: torchrun starts it with a directory, and what happened is left there as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.interpreter import interpreter

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "bf16": {"enabled": False},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "silent_consistency": {"direction": {"sketch_size": 256}},
}
SUBSET = ROOT.parent / "shared" / "data" / "alpaca_subset.json"
STEPS, HALF = 10, 5
ENVIRONMENT = {
    **os.environ,
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'launch'}",
    "HF_HUB_OFFLINE": "1",
}


# ---- the worker: every rank runs this ------------------------------------------------------------------------------


def _worker(directory: Path) -> None:
    from finetune import scenarios, trainer
    from finetune.ranks import Ranks, join, reduce_int32
    from finetune.settings import Settings, UserError, checked

    ranks: Ranks = join()
    found: dict[str, Any] = {}
    usual = Settings(
        deepspeed_config=str(directory / "config.json"),
        micro_batch=2,
        accumulation=2,
        learning_rate=1e-3,
        max_steps=STEPS,
        max_length=256,
        scenario="s1-3",
        log_every=1,
        progress=False,
        save_model=False,
    )

    def attempt(name: str, **options: Any) -> None:
        """One run; its exit code, or how it ended."""
        print(f"<{name}>", file=sys.stderr, flush=True)
        settings = checked(dataclasses.replace(usual, **{"output": directory / name, **options}))
        try:
            outcome = trainer.train(settings, ranks)
            found[name] = {"steps": outcome.steps, "stopped": outcome.stopped}
        except SystemExit as ended:
            found[name] = {"code": ended.code}
        reduce_int32(ranks, [0])  # both ranks got here, whatever happened
        print(f"</{name}>", file=sys.stderr, flush=True)

    bad_row = str(directory / "bad.jsonl")
    attempt("model", model=str(directory / "no-model"))
    attempt("row", data=bad_row)
    attempt("config", deepspeed_config=str(directory / "wrong.json"))
    attempt("deepspeed", deepspeed_config=str(directory / "refused.json"))
    attempt("one-rank", data=bad_row if ranks.rank == 1 else "embedded")
    attempt("option", save_every=2 if ranks.rank == 1 else 0)
    attempt("rate", learning_rate=1e-3 if ranks.rank == 1 else 2e-3)
    attempt("no-checkpoint", resume=True)
    attempt("sink", deepspeed_config=str(directory / "unwritable.json"))

    told = trainer.rank_seed
    trainer.rank_seed = lambda scenario, seed, rank: scenarios.rank_seed(scenario, seed, 0)  # as if every rank were 0
    attempt("seeds")
    trainer.rank_seed = told

    attempt("whole", eval_rows=10, eval_every=HALF, save_every=HALF, save_model=True)

    step = trainer.FineTune.training_step

    def signalled(run: Any, *given: Any) -> Any:
        if ranks.rank == 1 and run.state.global_step == HALF - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(run, *given)

    trainer.FineTune.training_step = signalled
    attempt("parts", eval_rows=10, eval_every=HALF)
    trainer.FineTune.training_step = step
    if ranks.is_first:
        shutil.copytree(directory / "parts", directory / "damaged")
        damaged = max((directory / f"damaged/checkpoints/checkpoint-{HALF}").rglob("*optim_states.pt"))
        damaged.write_bytes(damaged.read_bytes()[:-100])
    reduce_int32(ranks, [0])
    attempt("damaged", resume=True, eval_rows=10)
    attempt("other-seed", output=directory / "parts", resume=True, eval_rows=10, seed=43)
    attempt("other-rows", output=directory / "parts", resume=True, eval_rows=10, append_eos=False)

    def breaks(run: Any, *given: Any) -> Any:
        if run.state.global_step == 2:
            raise UserError("broken off")
        return step(run, *given)

    trainer.FineTune.training_step = breaks
    attempt("broken")
    trainer.FineTune.training_step = step
    attempt("resumed", output=directory / "parts", resume=True, eval_rows=10, eval_every=HALF, save_model=True)
    attempt("nothing-left", output=directory / "whole", resume=True, eval_rows=10, save_model=False)
    if SUBSET.is_file():
        short = {"max_steps": 12, "max_length": 128, "accumulation": 1, "micro_batch": 4}
        attempt("alpaca", data=str(SUBSET), activation_checkpointing=True, **short)
    if ranks.is_first:
        (directory / "found.json").write_text(json.dumps(found))


# ---- the tests: pytest runs these ----------------------------------------------------------------------------------


class Cases:
    """What the two ranks left behind."""

    def __init__(self, directory: Path, said: str) -> None:
        self.directory = directory
        self.found: dict[str, Any] = json.loads((directory / "found.json").read_text())
        self._said = said

    def errors(self, name: str) -> list[str]:
        """The sentences of one case, over both ranks."""
        part = re.search(rf"<{name}>\n(.*)</{name}>", self._said, re.DOTALL)
        assert part is not None
        assert "Traceback" not in part[1]
        return [line for line in part[1].splitlines() if line.startswith("error: ")]

    def lines(self, name: str) -> list[dict[str, Any]]:
        """``train.jsonl`` without what a clock says."""
        text = (self.directory / name / "train.jsonl").read_text()
        return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in text.splitlines()]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    directory = tmp_path_factory.mktemp("two-ranks")
    row = {"instruction": "a", "input": "", "output": "b"}
    (directory / "bad.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "output": 3}) + "\n")
    (directory / "file").write_text("not a directory")
    for name, change in {
        "config": {},
        "wrong": {"silent_consistency": {"intervall": 1}},
        "refused": {"zero_optimization": {"stage": 1, "overlap_com": True}},
        "unwritable": {"silent_consistency": {"output_dir": str(directory / "file")}},
    }.items():
        (directory / f"{name}.json").write_text(json.dumps({**CONFIG, **change}))
    command = [interpreter(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
    done = subprocess.run(
        [*command, str(directory)], env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return Cases(directory, done.stderr)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model", "no-model"),
        ("row", "row 1 (counted from 0) of"),
        ("config", 'did you mean "interval"'),
        ("deepspeed", "overlap_com"),
        ("one-rank", "text in column 'output', got int 3"),
        ("no-checkpoint", "--resume found no checkpoint"),
        ("sink", "output_dir"),
        ("seeds", "scenario s1-3 with the sharded sampler wants rank 1 to have seed 43, but its generators hold 42"),
        ("damaged", "is damaged"),
        ("other-seed", "was made with seed 42, this run has 43"),
        ("other-rows", "was made with rows whose tokens have the check sum"),
        ("rate", "--lr is 0.001 on rank 1, and another value on rank 0"),
        ("option", "--save-every is 2 on rank 1, and another value on rank 0: give every rank the same options"),
    ],
)
@pytest.mark.long
def test_a_mistake_ends_all_ranks_with_one_sentence(cases: Cases, name: str, said: str) -> None:
    assert cases.found[name] == {"code": 2}
    sentences = cases.errors(name)
    assert len(set(sentences)) == 1
    assert said in sentences[0]


@pytest.mark.long
def test_what_broke_a_run_off_is_in_its_records(cases: Cases) -> None:
    assert cases.found["broken"] == {"code": 2}
    [facts] = [json.loads(path.read_text()) for path in (cases.directory / "broken").rglob("run.json")]
    assert facts["ended"]["error"], facts["ended"]
    [of_whole] = (cases.directory / "whole").rglob("run.json")  # and no checkpoint calls a file so
    assert json.loads(of_whole.read_text())["ended"]["error"] is None


@pytest.mark.long
def test_a_signal_on_one_rank_saves_and_stops_all_at_the_same_step(cases: Cases) -> None:
    assert cases.found["parts"] == {"steps": HALF, "stopped": True}
    assert not list((cases.directory / "parts").glob(f"checkpoints/checkpoint-[!{HALF}]"))


@pytest.mark.long
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(cases: Cases) -> None:
    assert cases.found["whole"] == cases.found["resumed"] == {"steps": STEPS, "stopped": False}
    assert cases.lines("parts") == cases.lines("whole")
    whole, parts = (cases.directory / name / "model" / "model.safetensors" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()


@pytest.mark.long
def test_the_records_of_a_resumed_run_are_continuous(cases: Cases) -> None:
    whole, parts = (
        [json.loads(line) for line in (cases.directory / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    for record in whole + parts:
        del record["seconds"]
    assert [record["step"] for record in whole] == list(range(1, STEPS + 1))
    assert parts == whole


@pytest.mark.long
def test_the_log_has_every_step_and_the_linear_decay(cases: Cases) -> None:
    lines = [line for line in cases.lines("whole") if "lr" in line]
    assert [line["lr"] for line in lines] == pytest.approx([1e-3 * (1 - step / STEPS) for step in range(STEPS)])
    assert [line["step"] for line in cases.lines("whole") if "eval_loss" in line] == [HALF, STEPS]


@pytest.mark.long
def test_the_observer_and_the_trainer_agree_on_the_loss(cases: Cases) -> None:
    records = [json.loads(line) for line in (cases.directory / "whole" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in cases.lines("whole") if "loss" in line]
    assert [record["loss"]["mean"] for record in records] == pytest.approx(losses, rel=1e-5)
    assert records[-1]["epoch"] == pytest.approx(STEPS * 8 / (4096 - 10))


@pytest.mark.long
def test_the_preflight_knows_the_sampler_that_the_script_makes(cases: Cases) -> None:
    found = json.loads((cases.directory / "whole" / "preflight.json").read_text())
    items = {item["name"]: item for item in found["items"] if item["group"] == "sampler"}
    assert items["sampler: a share for each rank"]["ok"]
    assert items["sampler's rows"]["values"] == ["4086"]
    assert items["sampler's seed"]["values"] == ["42", "43"]  # scenario s1-3
    assert not items["sampler's permutation"]["ok"]
    events = [json.loads(line) for line in (cases.directory / "whole" / "events.jsonl").read_text().splitlines()]
    assert ("data-order-mismatch", 0) in {(event["kind"], event["step"]) for event in events}


@pytest.mark.long
def test_a_finished_run_has_nothing_left(cases: Cases) -> None:
    assert cases.found["nothing-left"] == {"steps": STEPS, "stopped": False}


@pytest.mark.long
def test_the_saved_model_is_loaded_by_transformers(cases: Cases) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from finetune.models import EMBEDDED

    model = AutoModelForCausalLM.from_pretrained(cases.directory / "whole" / "model")
    start = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    tokenizer = AutoTokenizer.from_pretrained(cases.directory / "whole" / "model")
    assert tokenizer("a")["input_ids"]
    changed = [bool((a != b).any()) for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert all(changed)


@pytest.mark.long
@pytest.mark.skipif(not SUBSET.is_file(), reason="the shared Alpaca rows are not here")
def test_the_loss_on_alpaca_falls(cases: Cases) -> None:
    losses = [line["loss"] for line in cases.lines("alpaca") if "loss" in line]
    assert len(losses) == 12
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


@pytest.mark.long
def test_the_command_line_stops_with_its_own_exit_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arguments = ["--local_rank=0", "--deepspeed_config", str(tmp_path / "config.json"), "--max-steps", "100000"]
    arguments += ["--output", str(tmp_path / "out"), "--micro-batch", "1", "--accumulation", "1", "--no-progress"]
    with subprocess.Popen(
        [interpreter(), str(ROOT / "launch" / "train.py"), *arguments],
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
    ) as process:
        log = tmp_path / "out" / "train.jsonl"
        while process.poll() is None and not (log.is_file() and log.stat().st_size):
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert "--resume goes on" in said
    assert (tmp_path / "out" / "checkpoints" / "latest").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scenario", "s9"], "Invalid value for '--scenario': 's9' is not one of 's1-1', 's1-2', 's1-3'"),
        (["--no-such-option"], "No such option"),
        (["--eval-every", "3"], "--eval-every 3 needs rows to evaluate on"),
    ],
)
def test_a_wrong_option_gets_one_sentence(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import train

    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    assert train.run() == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert shown.count("\n") == 1
    assert said in shown


if __name__ == "__main__":
    _worker(Path(sys.argv[1]))
