"""``python -m ds_silent`` around healthy scripts that do something of their own, and around mistakes in one place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.frameworks.test_auto_attach import ROOT, block, check, run
from tests.support.interpreter import interpreter

EVALUATES = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.register_buffer("scale", torch.arange(8.0))

    def forward(self, x):
        return self.layer(x * self.scale)

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(3):
    if step % 2 == 0 and dist.get_rank() == 0:  # on the first rank alone, through the wrapper, before the first step
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                model(torch.ones(4, 8))
        model.train()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"trained {sum(p.detach().double().sum() for p in model.parameters()).item().hex()}" + chr(10), end="")
dist.destroy_process_group()
"""


def trained_alike(tmp_path: Path, script: str, **variables: str) -> list[str]:
    """Run a script as it is and under ``-m ds_silent``, with equal weights at the end; return what it printed."""
    status, plain, wrong = run(tmp_path, script, "train.py")
    assert status == 0, wrong
    ours = ["-m", "ds_silent", "--silent-consistency-config", block(tmp_path), "train.py"]
    status, observed, wrong = run(tmp_path, script, *ours, **variables)
    assert (status, observed) == (0, plain), wrong
    return plain


def test_a_rank_may_evaluate_alone_before_the_first_step(tmp_path: Path) -> None:
    """DDP's forwards broadcast buffers: the other rank's first training forward is what that evaluation waits for."""
    trained_alike(tmp_path, EVALUATES, DS_SILENT_TIMEOUT="60")
    check(tmp_path / "run", 4)


ZERO_REDUNDANCY = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
torch.manual_seed(dist.get_rank())
for step in range(3):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"trained {sum(p.detach().double().sum() for p in model.parameters()).item().hex()}" + chr(10), end="")
dist.destroy_process_group()
"""
OF_A_COPY = """
import copy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
model = DistributedDataParallel(copy.deepcopy(model))
for step in range(8):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    print(f"step {step}", flush=True)
dist.destroy_process_group()
"""


def test_an_optimizer_that_deals_parameters_to_ranks_is_one(tmp_path: Path) -> None:
    """torch's ZeroRedundancyOptimizer makes one for this rank's share, which steps inside it."""
    ours = ["-m", "ds_silent", "--silent-consistency-config", block(tmp_path), "train.py"]
    status, observed, wrong = run(tmp_path, ZERO_REDUNDANCY, *ours)
    assert (status, len(observed)) == (0, 2), wrong
    assert observed[0] == observed[1]
    check(tmp_path / "run", 4)


PAST_CALL = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
if sys.argv[1:]:
    import ds_silent
    ds_silent.attach(model, optimizer=optimizer, config={"output_dir": "run", "tensorboard": False})
torch.manual_seed(dist.get_rank())
for step in range(3):
    with torch.no_grad():
        model.forward(torch.randn(4, 8))
    (model if step == 1 else model.forward)(torch.randn(4, 8)).square().mean().backward()  # DDP reduces either way
    optimizer.step()
    optimizer.zero_grad()
print(f"trained {sum(p.detach().double().sum() for p in model.parameters()).item().hex()}" + chr(10), end="")
dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_forward_that_is_called_past_the_hooks_is_observed(tmp_path: Path) -> None:
    """Barlow Twins and VICReg: once nothing was observed, and its gradients were said not to be reduced."""
    plain = trained_alike(tmp_path, PAST_CALL)
    check(tmp_path / "run", 4)
    shutil.rmtree(tmp_path / "run")
    status, observed, wrong = run(tmp_path, PAST_CALL, "train.py", "attach")
    assert (status, observed) == (0, plain), wrong
    check(tmp_path / "run", 4)


IN_A_CLOSURE = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Stepwise(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)  # torch hooks both

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
if sys.argv[1] == "lbfgs":
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-2, max_iter=3, line_search_fn=None)
else:
    optimizer = (Stepwise if sys.argv[1] == "subclass" else torch.optim.SGD)(model.parameters(), lr=1e-2)
if sys.argv[2:]:
    import ds_silent
    ds_silent.attach(model, optimizer=optimizer, config={"output_dir": "run", "tensorboard": False})
torch.manual_seed(dist.get_rank())
for step in range(int(sys.argv[3]) if sys.argv[3:] else 1 if sys.argv[1] == "lbfgs" else 3):
    rows = torch.randn(4, 8)
    def closure():
        loss = model(rows).square().mean()
        optimizer.zero_grad()  # between forward and backward, as Lightning does
        loss.backward()
        return loss
    optimizer.step(closure)
print(f"trained {sum(p.detach().double().sum() for p in model.parameters()).item().hex()}" + chr(10), end="")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("optimizer", ["sgd", "subclass", "lbfgs"])
def test_a_first_forward_within_an_optimizers_step_is_of_that_step(optimizer: str, tmp_path: Path) -> None:
    """As under Lightning: the step that was under way at the attach was not seen, and the next had two batches."""
    ours = ["-m", "ds_silent", "--silent-consistency-config", block(tmp_path), "train.py", optimizer]
    status, observed, wrong = run(tmp_path, IN_A_CLOSURE, *ours)
    assert status == 0, wrong
    records = check(tmp_path / "run", 4)
    shutil.rmtree(tmp_path / "run")
    status, attached, wrong = run(tmp_path, IN_A_CLOSURE, "train.py", optimizer, "attach")
    assert (status, observed) == (0, attached), wrong
    for record, expected in zip(records, check(tmp_path / "run", 4), strict=True):
        for part in ("loss", "grad_norm", "integrity", "coverage", "direction", "objective"):
            assert record[part] == expected[part]


def test_a_wrapper_that_is_called_within_the_first_step_is_not_said_to_be_uncalled(tmp_path: Path) -> None:
    """Where the script attaches itself, as a callback does; the optimizer's step begins before the first forward."""
    ours = ["-m", "ds_silent", "--silent-consistency-config", block(tmp_path), "train.py"]
    status, _, said = run(tmp_path, IN_A_CLOSURE, *ours, "sgd", "attach", "6")
    assert status == 0, said
    assert "observing 2 ranks" in said
    assert "never called" not in said


WRAPPED_ANEW = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
torch.manual_seed(dist.get_rank())
for trains in (False, True):  # a second stage trains all layers
    module[0].requires_grad_(trains)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)
    for step in range(3):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print(f"trained {sum(p.detach().double().sum() for p in module.parameters()).item().hex()}" + chr(10), end="")
dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_module_that_is_wrapped_anew_is_another_training(tmp_path: Path) -> None:
    """Once the first stage's observer went on beside the second one's, with the norm of its own parameters alone."""
    trained_alike(tmp_path, WRAPPED_ANEW)
    for directory in (tmp_path / "run", tmp_path / "run" / "run-2"):
        check(directory, 4)


def test_an_optimizer_of_a_copy_is_told_while_it_steps(tmp_path: Path) -> None:
    status, _, wrong = run(tmp_path, OF_A_COPY, "-m", "ds_silent", "train.py")
    assert status == 0, wrong
    said = [line for line in wrong.splitlines() if "no optimizer of its parameters was made" in line]
    assert len(said) == 2  # once in the training, of one rank, and at its end
    assert "not of one that was copied" in said[0]


RAISES_ALONE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.one(x), self.other(x)

dist.init_process_group("gloo")
model = DistributedDataParallel(Heads())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    one, other = model(torch.randn(3, 4))  # raises on rank 1 at its second call; rank 0 waits in its first backward
    (one.square().mean() + (0 if dist.get_rank() else other.square().mean())).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_rank_that_raises_alone_ends_while_the_others_wait_for_it(tmp_path: Path) -> None:
    """Its observer waited for what they never send: the launcher saw no end, and the job stood still."""
    ours = ["-m", "ds_silent", "--silent-consistency-config", block(tmp_path), "train.py"]
    status, _, said = run(tmp_path, RAISES_ALONE, *ours)
    assert status != 0
    assert "Expected to have finished reduction in the prior iteration" in said
    assert "the others have sent nothing for 5 s" in said


def test_a_wrapper_that_is_never_called_is_said_soon_and_not_after_days(tmp_path: Path) -> None:
    """As a loss of sentence-transformers 6.2.0 calls the model inside: the ranks train apart from the first step on."""
    script = OF_A_COPY.replace(
        "model = DistributedDataParallel(copy.deepcopy(model))", "ddp = DistributedDataParallel(model)"
    )
    script = script.replace('print(f"step {step}", flush=True)', 'print(f"step {step}", file=sys.stderr, flush=True)')
    ours = ["-m", "ds_silent", "--silent-consistency-config", block(tmp_path), "train.py"]
    status, _, said = run(tmp_path, f"import sys{script}", *ours, ranks=1)
    assert status == 0, said
    assert said.index("was made, but it was never called in training") < said.index("step 5")


def test_a_rank_says_it_whose_file_alone_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_text(json.dumps({"intervall": 5}))
    (tmp_path / "train.py").write_text("raise SystemExit('it has begun')")
    command = [interpreter(), "-m", "ds_silent", "--silent-consistency-config", "wrong.json", "train.py"]
    kept = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "1", "WORLD_SIZE": "2"}
    done = subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    [sentence] = [line for line in done.stderr.splitlines() if line]
    assert sentence.startswith("ds_silent: on rank 1: ")
    assert "intervall" in sentence
