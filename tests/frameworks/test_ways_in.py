"""The ways in: an unchanged script under the real launchers is what it is under plain Python, and is observed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_silent.__main__ import _target_of, main
from tests.support.interpreter import interpreter

ROOT = Path(__file__).parents[2]

NEIGHBOUR = "WORD = 'found'\n"
# What a script can see of the way in which it was started, and what it defines for its workers.
SCRIPT = """
import argparse, json, os, sys
import neighbour
import torch
from torch.utils.data import DataLoader, Dataset
from deepspeed import initialize  # by its own name, before anything else

class Rows(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return Row(index)

class Row:
    def __init__(self, index):
        self.index = index

def collate(rows):
    return torch.tensor([[float(row.index), 1.0] for row in rows])

def main():
    rank = int(os.environ.get("RANK", "0"))
    told = {
        "argv": sys.argv, "file": __file__, "name": __name__, "path": sys.path[0], "word": neighbour.WORD,
        "main": sys.modules["__main__"].Rows is Rows, "package": __package__,
        "spec": getattr(__spec__, "name", None), "annotation": str(annotated.__annotations__["x"]),
    }
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out")
    parser.add_argument("--train", action="store_true")
    arguments, told["others"] = parser.parse_known_args()
    told["local_rank"] = arguments.local_rank
    if arguments.train:
        told["seen"] = train(arguments.out)
    with open(os.path.join(arguments.out, f"told_{rank}.json"), "w") as file:
        json.dump(told, file)

def annotated(x: int): ...

def train(out):
    model = torch.nn.Linear(2, 1)
    config = {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 1}, "silent_consistency": {"output_dir": out, "tensorboard": False},
    }
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    loader = DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="spawn", collate_fn=collate)
    seen = []
    for batch in loader:
        engine.backward(engine(batch).square().mean())
        engine.step()
        seen += batch[:, 0].tolist()
    torch.distributed.destroy_process_group()  # gloo's threads of torch 2.13 end a process that ends beside them
    return seen

if __name__ == "__main__":
    main()
"""


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    paths = f"{ROOT}{os.pathsep}{kept.get('PYTHONPATH', '')}"
    return {**kept, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def start(command: list[str], cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 240) -> str:
    """What it has said; with all it started it is gone afterwards."""
    try:
        said, _ = process.communicate(timeout=seconds)
        return said
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def run(command: list[str], cwd: Path) -> tuple[int, str]:
    process = start(command, cwd)
    said = finish(process)
    return process.returncode, said


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def deepspeed(*arguments: str) -> list[str]:
    return [interpreter(), "-m", "deepspeed.launcher.runner", "--master_port", free_port(), *arguments]


LIKE_FLAGS = ["--num_gpus", "5", "--module", "ds_silent", "-m", "../code/train.py", "--", "code", "a b"]
"""Arguments of the script that look like paths and like the launchers' own."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(SCRIPT)
    (tmp_path / "code" / "neighbour.py").write_text(NEIGHBOUR)
    return tmp_path


def told(project: Path, name: str, command: list[str], ranks: int, *options: str) -> list[dict[str, Any]]:
    """What the script says of itself on each rank, when ``command`` starts it."""
    out = project / name
    out.mkdir()
    status, said = run([*command, "--out", name, *options, *LIKE_FLAGS], project)
    assert status == 0, said
    return [json.loads((out / f"told_{rank}.json").read_text()) for rank in range(ranks)]


def same(plain: list[dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    """Everything but the name of the output directory."""
    assert len(plain) == len(ours) > 0
    for one, other in zip(plain, ours, strict=True):
        assert {**one, "argv": ["ours" if a == "plain" else a for a in one["argv"]]} == other


def observed(out: Path) -> tuple[int, int]:
    """Steps and ranks in the records."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return len(records), records[-1]["world_size"]


@pytest.mark.long
def test_deepspeed_runs_a_script_as_without_us_and_observes_it(project: Path) -> None:
    """Workers that are spawned find what the script defines; the launcher's --local_rank arrives where it would."""
    plain = told(project, "plain", deepspeed("--num_gpus", "2", "code/train.py"), 2, "--train")
    ours = told(project, "ours", deepspeed("--num_gpus", "2", "--module", "ds_silent", "code/train.py"), 2, "--train")
    same(plain, ours)
    assert [one["local_rank"] for one in ours] == [0, 1]
    assert [one["argv"][1] for one in ours] == ["--local_rank=0", "--local_rank=1"]
    assert ours[0]["seen"] == list(range(8))
    assert observed(project / "ours") == (4, 2)
    assert not (project / "plain" / "metrics.jsonl").exists()


@pytest.mark.long
def test_two_nodes_of_a_hostfile(project: Path) -> None:
    """What the launcher runs on each node: deepspeed.launcher.launch with the world's layout, here without ssh."""
    (project / "hostfile").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    (project / "out").mkdir()
    port, processes = free_port(), []
    for node in range(2):
        command = [interpreter(), "-m", "deepspeed.launcher.runner", "--hostfile", "hostfile", "--no_ssh"]
        command += ["--node_rank", str(node), "--master_addr", "127.0.0.1", "--master_port", port]
        command += ["--module", "ds_silent", "code/train.py", "--out", "out", "--train"]
        processes.append(start(command, project))
    said = [finish(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert observed(project / "out") == (4, 2)
    assert json.loads((project / "out" / "told_1.json").read_text())["argv"][:2] == ["code/train.py", "--local_rank=0"]


@pytest.mark.parametrize("way", ["no local rank", "no python", "no python, a shell script", "torchrun"])
@pytest.mark.long
def test_other_ways_of_the_launchers(project: Path, way: str) -> None:
    (project / "start.sh").write_text(f'#!/bin/sh\nexec {interpreter()} -m ds_silent "$@"\n')
    (project / "start.sh").chmod(0o755)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1"]
    torchrun += ["--master_addr", "127.0.0.1", "--master_port", free_port()]
    without = ("--num_gpus", "1", "--no_local_rank")
    command, local_rank = {
        "no local rank": ([sys.executable, *deepspeed(*without, "--module", "ds_silent", "code/train.py")[1:]], False),
        "no python": (
            deepspeed(*without, "--no_python", interpreter(), "-m", "ds_silent", "code/train.py"),
            False,
        ),
        "no python, a shell script": (deepspeed("--num_gpus", "1", "--no_python", "./start.sh", "code/train.py"), True),
        "torchrun": ([*torchrun, "-m", "ds_silent", "code/train.py"], False),
    }[way]
    for rank, one in enumerate(told(project, "ours", command, 1)):
        own = [f"--local_rank={rank}"] * local_rank
        assert one["argv"] == ["code/train.py", *own, "--out", "ours", *LIKE_FLAGS]


def test_a_script_is_what_python_makes_of_it(project: Path) -> None:
    """Through a symbolic link: its neighbours are those of the file itself."""
    (project / "link.py").symlink_to(Path("code", "train.py"))
    plain = told(project, "plain", [interpreter(), "link.py"], 1)
    ours = told(project, "ours", [interpreter(), "-m", "ds_silent", "link.py"], 1)
    same(plain, ours)
    assert ours[0]["word"] == "found"
    assert ours[0]["name"] == "__main__"


@pytest.mark.parametrize("name", ["package.train", "package"])
@pytest.mark.long
def test_a_module_is_what_python_makes_of_it(project: Path, name: str) -> None:
    package = project / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / ("train.py" if "." in name else "__main__.py")).write_text(SCRIPT)
    (project / "neighbour.py").write_text(NEIGHBOUR)
    plain = told(project, "plain", [interpreter(), "-m", name], 1)
    ours = told(project, "ours", [interpreter(), "-m", "ds_silent", "-m", name], 1)
    same(plain, ours)
    assert ours[0]["spec"] == ("package.train" if "." in name else "package.__main__")


@pytest.mark.long
def test_a_module_under_the_launcher_is_observed(project: Path) -> None:
    (project / "package").mkdir()
    (project / "package" / "train.py").write_text(SCRIPT)
    (project / "neighbour.py").write_text(NEIGHBOUR)
    command = deepspeed("--num_gpus", "2", "--module", "ds_silent", "-m", "package.train")
    ours = told(project, "ours", command, 2, "--train")
    assert [one["local_rank"] for one in ours] == [0, 1]
    assert ours[0]["seen"] == list(range(8))
    assert observed(project / "ours") == (4, 2)


@pytest.mark.parametrize(
    ("imports", "after", "sentences"),
    [
        ("import ds_silent", "", 1),
        ("import deepspeed, ds_silent", "", 1),
        ("import ds_silent", "ds_silent.attach(engine).close", 0),
        ("", "", 0),  # nobody is there who could say it
    ],
)
@pytest.mark.long
def test_a_block_that_nobody_reads_is_said_by_an_import(
    imports: str, after: str, sentences: int, project: Path
) -> None:
    script = SCRIPT.replace("from deepspeed import initialize  # by its own name, before anything else", "")
    script = script.replace("import argparse", f"{imports}\nimport argparse").replace("= initialize(", "= made_by()(")
    script = script.replace("    loader =", f"    {after}\n    loader =")
    made_by = "def made_by():\n    import deepspeed\n    return deepspeed.initialize\n\n"
    script = script.replace("def collate", f"{made_by}def collate")
    (project / "code" / "plain.py").write_text(script)
    out = project / "plain"
    out.mkdir()
    launcher = [interpreter(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    status, said = run([*launcher, "code/plain.py", "--train", "--out", "plain"], project)
    assert status == 0, said
    assert said.count("nothing observes its engine, because DeepSpeed does not read the block") == sentences
    assert (out / "metrics.jsonl").exists() == ("attach" in after)


def test_a_script_in_which_nothing_is_observed_says_so_at_its_end(project: Path) -> None:
    (project / "empty.py").write_text("print('done')\n")
    status, said = run([interpreter(), "-m", "ds_silent", "empty.py"], project)
    assert status == 0
    assert said.index("done") < said.index("ds_silent: nothing was observed")
    assert said.count("nothing was observed") == 1


@pytest.mark.parametrize("group", [True, False])
def test_ranks_that_train_alone_are_told_while_they_do(group: bool, project: Path) -> None:
    script = (
        "import torch\n"
        f"{'torch.distributed.init_process_group()' if group else ''}\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(25):\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()\n"
        "raise ValueError('mine')\n"
    )
    (project / "alone.py").write_text(script)
    launcher = [interpreter(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    status, said = run([*launcher, "-m", "ds_silent", "alone.py"], project)
    assert status == 1
    told = (
        "nothing is observed so far, after 20 optimizer steps: no DeepSpeed engine"
        if group
        else "several processes were"
    )
    assert said.count(f"ds_silent: {told}") == 1
    assert ("each process trains alone" if group else "no process group so far: each trains alone") in said


def test_what_a_script_breaks_on_is_its_own_traceback(project: Path) -> None:
    (project / "broken.py").write_text("import nowhere_to_be_found\n")
    status, said = run([interpreter(), "-m", "ds_silent", "broken.py"], project)
    assert status == 1
    assert 'broken.py", line 1' in said
    assert "ModuleNotFoundError" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "nothing"),
        (["--local_rank=0"], "nothing"),
        (["--local_rank", "0"], "nothing"),
        (["missing.py"], "missing.py, which is no file"),
        (["--local_rank=1", "."], "., which is a directory"),
        (["--deepspeed", "train.py"], "--deepspeed before the script"),
        (["-m"], "-m without a module"),
    ],
)
def test_a_mistake_is_one_sentence(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        _target_of(given)
    assert str(refused.value.code).startswith(f"ds_silent: give the training script to run, got {said}")
    assert "\n" not in str(refused.value.code)
    assert capsys.readouterr().out == ""


def test_a_mistake_ends_the_launcher(project: Path) -> None:
    status, said = run(deepspeed("--num_gpus", "2", "--module", "ds_silent", "missing.py"), project)
    assert status == 1
    assert "got missing.py, which is no file" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("name", ["nowhere", "nowhere.train", "email", "code.missing"])
def test_a_module_that_cannot_be_run_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ds_silent", "-m", name])
    monkeypatch.setattr("deepspeed.initialize", None)  # put back afterwards
    with pytest.raises(SystemExit, match=rf"got -m {name}, which is no module that can be run"):
        main()


SPAWNS = """
import sys
import torch, torch.distributed as dist, torch.multiprocessing
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

def train(rank, ranks):
    dist.init_process_group("gloo", f"file://{sys.argv[1]}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
    torch.manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()

if __name__ == "__main__":
    spawn(train, (2,), 2)
"""


@pytest.mark.long
def test_ranks_that_a_script_starts_itself_are_observed(tmp_path: Path) -> None:
    """Nothing was said of them, and nothing recorded: rank 1 has twice the learning rate."""
    (tmp_path / "train.py").write_text(SPAWNS)
    (tmp_path / "block.json").write_text('{"output_dir": "records", "tensorboard": false}')
    command = [
        interpreter(),
        "-m",
        "ds_silent",
        "--silent-consistency-config",
        "block.json",
        "train.py",
        str(tmp_path / "r"),
    ]
    status, said = run(command, tmp_path)
    assert status == 0, said
    assert len((tmp_path / "records" / "metrics.jsonl").read_text().splitlines()) == 3
    first = json.loads((tmp_path / "records" / "events.jsonl").read_text().splitlines()[0])
    assert [first[name] for name in ("step", "kind", "where")] == [0, "config-mismatch", "learning rate"]
    assert "nothing was observed" not in said
