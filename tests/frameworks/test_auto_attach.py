"""``python -m ds_silent`` around scripts that nobody edits and that know nothing of it: DDP, FSDP2, Megatron-core."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_silent import __main__ as way_in
from ds_silent.patches import Patches
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.interpreter import interpreter

ROOT = Path(__file__).parents[2]
STEPS, ROWS = 3, 4

TORCH = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
if sys.argv[1] == "fsdp2":
    from torch.distributed.fsdp import fully_shard
    fully_shard(model)
else:
    model = DistributedDataParallel(model)
other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # of nothing in the model
data = TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
optimizer = None if sys.argv[1] == "by hand" else torch.optim.AdamW(model.parameters(), lr=1e-2)
with torch.no_grad():
    model(data[:2][0])  # no training
called = model.module if sys.argv[1] == "module" else model
if sys.argv[1].startswith("compiled"):
    called = torch.compile(model if sys.argv[1] == "compiled" else lambda x: model(x), backend="eager")
for x, y in loader:
    loss = (called(x) - y).square().mean()
    loss.backward()
    if optimizer is None:
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    else:
        optimizer.step()
    model.zero_grad()
total = sum(p.detach().double().sum() for p in model.state_dict().values() if sys.argv[1] != "fsdp2") + loss.double()
print(f"trained {float(total.detach()).hex()}" + chr(10), end="")  # in one write
del model, called, optimizer, loss  # the group ends with the last that holds it; its threads may abort a process's end
dist.destroy_process_group()
"""

BLOCKS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        x = self.blocks[0](x)
        x = checkpoint(self.blocks[1], x.tanh(), use_reentrant=False)  # called again in the backward
        return self.head(x)

dist.init_process_group("gloo")
torch.manual_seed(0)
model = Model()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(dist.get_rank() + 1)
for micro_batch in range(6):
    last = micro_batch % 2 == 1
    model.set_requires_gradient_sync(last)
    (model(torch.randn(4, 8)).square().mean() / 2).backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
print(f"trained {sum(p.to_local().double().sum() for p in model.parameters()).item().hex()}" + chr(10), end="")
dist.destroy_process_group()
"""

MEGATRON = """
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

LENGTH, ROWS, VOCABULARY, PIPELINE = 8, 4, 64, {pipeline}

def model_provider():
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0,
        use_cpu_initialization=True, pipeline_dtype=torch.float32, pipeline_model_parallel_size=PIPELINE,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False, bias_activation_fusion=False,
        bias_dropout_fusion=False, batch_p2p_comm=False, finalize_model_grads_func=finalize_model_grads,
    )
    return GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
    )

def forward_step_func(data_iterator, model):
    tokens = next(data_iterator)
    places = torch.arange(LENGTH).expand(ROWS, LENGTH)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    output = model(tokens, places, mask, labels=tokens.roll(-1, 1))
    return output, lambda losses: (losses.mean(), {{"lm loss": losses.mean().detach()}})

def train():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    parallel_state.initialize_model_parallel(1, PIPELINE)
    model = model_provider()
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True)
    model = DistributedDataParallel(config=model.config, ddp_config=ddp_config, module=model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, use_distributed_optimizer=True, clip_grad=1.0), [model])
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    data = iter([torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(6)])
    for _ in range(3):
        get_forward_backward_func()(
            forward_step_func=forward_step_func, data_iterator=data, model=model, num_microbatches=2,
            seq_length=LENGTH, micro_batch_size=ROWS, forward_only=False,
        )
        optimizer.step()
        model.zero_grad_buffer()
    total = sum(float(p.detach().double().sum()) for p in model.parameters())
    print(f"trained {{total.hex()}}" + chr(10), end="")
    dist.destroy_process_group()

if __name__ == "__main__":
    train()
"""
ON_CPU = "import contextlib\nfrom ds_silent.drill.megatron_on_cpu import on_cpu\n_stack = contextlib.ExitStack()\n"
ON_CPU += "_stack.enter_context(on_cpu())\n"


def run(tmp_path: Path, script: str, *ours: str, ranks: int = 2, **variables: str) -> tuple[int, list[str], str]:
    """(status, what the script printed, standard error) of a script under torchrun; ``ours``: before it."""
    (tmp_path / "train.py").write_text(script)
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    kept["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}{os.pathsep}{kept.get('PYTHONPATH', '')}"
    launcher = [interpreter(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    done = subprocess.run(
        [*launcher, *ours],
        cwd=tmp_path,
        env={**kept, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, sorted(line for line in done.stdout.splitlines() if line.startswith("trained")), done.stderr


def block(tmp_path: Path) -> str:
    """Its file."""
    (tmp_path / "block.json").write_text(json.dumps({"output_dir": "run", "tensorboard": False}))
    return "block.json"


def check(run_directory: Path, rows: int) -> list[dict[str, Any]]:
    records = list(read_metrics(run_directory / "metrics.jsonl"))
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert record["world_size"] == 2
        assert record["samples"] == record["step"] * 2 * rows
        assert 0.0 < record["integrity"]["relative_error"] < record["integrity"]["rounding_bound"]
        losses = record["loss"]["per_rank"]
        assert all(0.0 < loss < 9.0 for loss in losses)  # in each stage's record those of the last
    assert [event for event in read_events(run_directory / "events.jsonl") if event["severity"] != "info"] == []
    return records


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", "compiled"])
def test_a_script_of_torch_is_observed_from_its_first_step(wrapper: str, tmp_path: Path) -> None:
    status, plain, wrong = run(tmp_path, TORCH, "train.py", wrapper)
    assert status == 0, wrong
    ours = ["-m", "ds_silent", "--silent-consistency-config", block(tmp_path), "train.py", wrapper]
    status, observed, wrong = run(tmp_path, TORCH, *ours)
    assert status == 0, wrong
    assert observed == plain
    assert len(plain) == 2
    assert "nothing was observed" not in wrong
    records = check(tmp_path / "run", ROWS)
    assert [record["epoch"] for record in records] == [8 / 24, 16 / 24, 1.0]  # of the loader, which nobody named
    before = json.loads((tmp_path / "run" / "preflight.json").read_text())
    assert before["data"] == {"dealt": "random", "by": "DistributedSampler, shuffled"}  # of its first batch's loader


def test_blocks_under_fully_shard_are_of_one_training_and_its_micro_batches_of_one_step(tmp_path: Path) -> None:
    ours = ["-m", "ds_silent", "--silent-consistency-config", block(tmp_path), "train.py"]
    status, observed, wrong = run(tmp_path, BLOCKS, *ours)
    assert (status, len(observed)) == (0, 2), wrong
    assert wrong.count("ds_silent: observing 2 ranks") == 1
    check(tmp_path / "run", 2 * ROWS)


def test_what_cannot_be_found_is_said_at_the_end(tmp_path: Path) -> None:
    status, [_], wrong = run(tmp_path, TORCH, "-m", "ds_silent", "train.py", "by hand", ranks=1)
    assert status == 0, wrong
    assert "ds_silent: nothing was observed: the script trains a DistributedDataParallel, but no optimizer" in wrong


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (
            "module",
            "a DistributedDataParallel was made, but it was never called in training, so it reduces no gradient: call "
            "ddp(x), not ddp.module(x)",
        ),
        (
            "compiled function",
            "no call of a DistributedDataParallel in training was seen: where torch.compile hides it, call "
            "ds_silent.attach in the script; where there is none, its gradients are not reduced: call ddp(x), not "
            "ddp.module(x)",
        ),
    ],
)
@pytest.mark.long
def test_a_wrapper_whose_call_was_not_seen_is_said_soon_and_at_the_end(how: str, sentence: str, tmp_path: Path) -> None:
    status, trained, wrong = run(tmp_path, TORCH, "-m", "ds_silent", "train.py", how, ranks=1)
    assert (status, len(trained)) == (0, 1), wrong
    said = [line for line in wrong.splitlines() if "ds_silent: " in line]
    assert said == [f"ds_silent: {sentence}", f"ds_silent: nothing was observed: {sentence}"]


@pytest.mark.parametrize(
    ("script", "code", "sentence"),
    [
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("import sys; sys.exit('mine')", 1, "mine"),
        ("import ds_silent; ds_silent.attach(3)", 1, "ds_silent.attach takes"),
        ("import sys; sys.exit(0)", 0, "nothing was observed"),
    ],
)
@pytest.mark.long
def test_what_ended_with_its_own_sentence_has_no_second_one(
    script: str, code: int, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [interpreter(), "-m", "ds_silent", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, sentence in done.stderr) == (code, True), done.stderr
    assert ("nothing was observed" in done.stderr) == (code == 0)


def test_a_file_that_is_no_block_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "block.json").write_text('{"intervall": 3}')
    status, said, wrong = run(
        tmp_path, TORCH, "-m", "ds_silent", "train.py", ranks=1, SILENT_CONSISTENCY_CONFIG="block.json"
    )
    assert (status, said) == (1, [])
    assert 'ds_silent: silent_consistency has no key "intervall"; did you mean "interval"?' in wrong
    assert "Traceback" not in wrong.split("ChildFailedError")[0].split("ds_silent: ")[1].splitlines()[0]


@pytest.mark.parametrize("by", ["--silent-consistency-config", "SILENT_CONSISTENCY_CONFIG"])
def test_a_file_that_cannot_be_read_is_called_what_its_user_called_it(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "block.json"
    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.delenv("SILENT_CONSISTENCY_CONFIG", raising=False)
    option = by.startswith("--")
    monkeypatch.setattr(sys, "argv", ["ds_silent", *([by, str(path)] if option else []), str(script)])
    if not option:
        monkeypatch.setenv(by, str(path))

    def said() -> str:
        with pytest.raises(SystemExit) as ended:
            way_in.main()
        return str(ended.value.code)

    assert said() == f'ds_silent: there is no {by} file "{path}"; check the path'
    path.write_text("[1]")
    assert said() == f'ds_silent: the {by} file "{path}" must hold one object in braces, got [1]; put braces around it'
    path.write_text('{"silent_consistency": {}, "silent_consistancy": {}}')
    assert said().startswith(f'ds_silent: the {by} file "{path}" has a key "silent_consistancy", which nothing reads')


@pytest.mark.long
def test_a_script_of_megatron_is_observed_from_its_first_step(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    (tmp_path / "sitecustomize.py").write_text(ON_CPU)
    script = MEGATRON.format(pipeline=1)
    status, plain, wrong = run(tmp_path, script, "train.py")
    assert status == 0, wrong
    variable = {"SILENT_CONSISTENCY_CONFIG": block(tmp_path)}
    status, observed, wrong = run(tmp_path, script, "-m", "ds_silent", "train.py", **variable)
    assert status == 0, wrong
    assert observed == plain
    assert len(plain) == 2
    check(tmp_path / "run", 2 * ROWS)


@pytest.mark.matrix
def test_a_pipeline_of_megatron_starts_stage_by_stage(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    (tmp_path / "sitecustomize.py").write_text(ON_CPU)
    variable = {"SILENT_CONSISTENCY_CONFIG": block(tmp_path)}
    status, _, wrong = run(tmp_path, MEGATRON.format(pipeline=2), "-m", "ds_silent", "train.py", ranks=4, **variable)
    assert status == 0, wrong
    for stage in range(2):
        check(tmp_path / "run" / f"pp{stage}", 2 * ROWS)


def test_a_module_tells_when_it_has_run_and_not_when_it_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "told_of.py").write_text("WORD = 'run'\n")
    monkeypatch.syspath_prepend(tmp_path)
    patches, heard = Patches(), []
    finders = list(sys.meta_path)
    patches.after_import("told_of", lambda module: heard.append(module.WORD))
    assert importlib.util.find_spec("told_of") is not None
    assert heard == []
    module = importlib.import_module("told_of")
    assert heard == ["run"]
    assert importlib.reload(module) is module
    patches.after_import("told_of", lambda module: heard.append("there"))
    assert heard[-1] == "there"
    patches.undo()
    assert sys.meta_path == finders
