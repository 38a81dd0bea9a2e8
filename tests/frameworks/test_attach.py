"""Whatever is handed over: recognised, or refused with one sentence that says what it got, the same on every rank."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ds_silent
from ds_silent.frameworks.fsdp2 import attach_fsdp2
from ds_silent.observing.observer import IdleObserver, Observer
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.ddp_training import DDPCase, FSDP2Case, build, build_fsdp2
from tests.support.distributed import run_on_kept_ranks
from tests.support.interpreter import interpreter


@pytest.mark.parametrize("given", [nn.Linear(2, 2), [], "model", None])
def test_what_is_not_known_is_a_sentence(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # a module that one process trains alone is no mistake
    with pytest.raises(ds_silent.ConfigError, match=f"got {type(given).__name__}; give it what the framework has made"):
        ds_silent.attach(given)


@pytest.mark.parametrize("attach", [ds_silent.attach, ds_silent.attach_ddp, attach_fsdp2, ds_silent.attach_megatron])
def test_one_process_gets_an_observer_that_does_nothing(
    attach: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ds_silent.frameworks.megatron.megatron_framework.needs", lambda *names: None)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    observer = attach(model, config={"output_dir": str(tmp_path / "run")}, optimizer=optimizer)
    assert caplog.messages == [
        "ds_silent: one process trains this model, so there is nothing to compare and nothing is observed; start it "
        "with your launcher with two processes or more"
    ]
    observer.observe_batch([1, 2])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    observer.load_state_dict(observer.state_dict())
    observer.flush()
    assert (observer.last_record, observer.scalars, observer.measures(1), observer.closed) == (None, {}, False, False)
    observer.close()
    assert observer.closed
    assert not (tmp_path / "run").exists()
    assert attach(model, config={"enabled": False}, optimizer=optimizer) is None
    with pytest.raises(ds_silent.ConfigError, match='has no key "intervall"'):
        attach(model, config={"intervall": 2}, optimizer=optimizer)


def test_nothing_of_an_observer_works_where_there_is_nothing_to_observe() -> None:
    public = {name for name in vars(Observer) if not name.startswith("_")} - {"scalars"}  # of the last record
    public -= {"connect", "place", "forked", "stand_down"}  # what starts an observer calls them, no script
    assert public <= set(vars(IdleObserver))


def test_fully_shard_before_it_was_public_is_a_sentence_with_both_versions() -> None:
    early = type("FSDPModule", (nn.Module,), {"__module__": "torch.distributed._composable.fsdp.fully_shard"})
    with pytest.raises(ds_silent.ConfigError, match=rf"from torch 2\.6 on, and this is torch {torch.__version__[:4]}"):
        ds_silent.attach(early())


def refused(directory: str) -> list[str]:
    """The sentence of each attempt, on every rank."""
    said = []

    def attempt(model: Any, optimizer: Any, block: dict[str, Any]) -> None:
        try:
            ds_silent.attach(model, {"output_dir": directory, "preflight": False, **block}, optimizer=optimizer)
        except ds_silent.ConfigError as error:
            said.append(str(error))

    model, optimizer = build(DDPCase())
    attempt(model, None, {})
    attempt(model, "AdamW", {})
    attempt(model, optimizer, {"reduction": "ordered"})
    attempt(model, optimizer, {"respond": {"on_aggregation_error": "retry"}})
    attempt(model, optimizer, {"interval": 1 + dist.get_rank()})
    attempt(model, optimizer, {"interval": 0} if dist.get_rank() == 1 else {})
    sharded, own = build_fsdp2(FSDP2Case())
    attempt(sharded, own, {"respond": {"on_replica_drift": "mean"}})
    observer = ds_silent.attach(model, {"output_dir": directory, "preflight": False}, optimizer=optimizer)
    attempt(model, optimizer, {})
    assert observer is not None
    assert ds_silent.observer_of(model) is observer
    observer.close()
    assert ds_silent.observer_of(model) is None
    return said


def test_what_cannot_be_is_refused_on_every_rank_alike(tmp_path: Path) -> None:
    first, second = run_on_kept_ranks(refused, 2, (str(tmp_path),))
    assert first == second
    expected = [
        "needs the torch optimizer that steps this DistributedDataParallel model, got NoneType",
        "needs the torch optimizer that steps this DistributedDataParallel model, got str",
        'silent_consistency.reduction "ordered" is for DeepSpeed',
        'silent_consistency.respond.on_aggregation_error "retry" is for DeepSpeed',
        "silent_consistency.interval",
        "interval must be",
        "need whole replicas, and fully_shard shards them",
        "is already observed",
    ]
    assert len(first) == len(expected), first
    for sentence, part in zip(first, expected, strict=True):
        assert part in sentence
        assert "\n" not in sentence


def closes(directory: str) -> tuple[list[str], bool]:
    """The with statement closes on an error's way out too; nothing is left on the training."""
    model, optimizer = build(DDPCase())
    backward, scale = torch.autograd.backward, torch.amp.GradScaler.scale
    try:
        with ds_silent.observe(model, optimizer, config={"output_dir": directory, "preflight": False}):
            raise RuntimeError("the script's own")
    except RuntimeError as error:
        said = [str(error)]
    hooks = [model._forward_pre_hooks, model.module._forward_pre_hooks, model.module._forward_hooks]
    hooks += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    hooks += [p._backward_hooks or {} for p in model.parameters()]
    clean = torch.autograd.backward is backward and torch.amp.GradScaler.scale is scale and not any(map(len, hooks))
    return said, clean


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    for said, clean in run_on_kept_ranks(closes, 2, (str(tmp_path),)):
        assert said == ["the script's own"]
        assert clean


def compiled(directory: str) -> list[list[tuple[float, float]]]:
    """Loss and gradient norm of each step: of a plain module, of one compiled behind and one compiled before attach."""
    numbers = []
    data = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
    for name in ("plain", "compiled behind", "compiled before"):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(4, 1))
        called = model if name == "plain" else torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(data, 8, sampler=DistributedSampler(data))
        given = called if name == "compiled before" else model
        with ds_silent.observe(given, optimizer, {"output_dir": str(Path(directory, name))}, loader=loader):
            for epoch in range(3):
                loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
                for (rows,) in loader:
                    called(rows).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        if dist.get_rank() == 0:
            records = read_metrics(Path(directory, name, "metrics.jsonl"))
            numbers.append([(record["loss"]["mean"], record["grad_norm"]["mean"]) for record in records])
            assert [
                one for one in read_events(Path(directory, name, "events.jsonl")) if one["severity"] != "info"
            ] == []
    return numbers


def test_what_torch_compile_returns_is_observed_as_its_module(tmp_path: Path) -> None:
    """Traced, a hook became a part of the compiled module: its own numbers were constants, and it broke at step 5."""
    plain, behind, before = run_on_kept_ranks(compiled, 2, (str(tmp_path),))[0]
    assert len(plain) == 12
    assert behind == plain
    assert before == plain


IMPORTS = """
import pkgutil, random, sys
import numpy as np
import torch
random.seed(0), np.random.seed(0), torch.manual_seed(0)
before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
roads = "attach", "attach_ddp", "observe", "observer_of", "compare", "fingerprint", "Observer", "SinkError"
moved = []
for road in (*roads, "everything"):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("rich", "ds_silent")]:
        del sys.modules[name]
    import ds_silent
    if road == "everything":
        others = ("deepspeed", "megatron", "drill", "practice", "integrations", "__main__")
        names = [one.name for one in pkgutil.walk_packages(ds_silent.__path__, "ds_silent.")]
        names = [name for name in names if not any(other in name for other in others)]
        assert len(names) > 150
        for name in names:
            __import__(name)
        assert "rich.style" in sys.modules
    else:
        getattr(ds_silent, road)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    moved += [] if after == before else [road]
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
print(moved)
"""


@pytest.mark.long
def test_no_import_draws_a_number_of_the_scripts_generators() -> None:
    """rich draws one as it is imported: what a script shuffled behind attach came in another order than without it."""
    done = subprocess.run([interpreter(), "-c", IMPORTS], capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr


BREAKS_OFF = """
import sys, torch, torch.distributed as dist, ds_silent
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with ds_silent.observe(model, optimizer, {"output_dir": sys.argv[1], "tensorboard": False}):
    for step in range(20):
        if step == 5 and dist.get_rank() == 1:
            END
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("end", ["raise ValueError('a mistake of its own')", "sys.exit('a mistake of its own')"])
@pytest.mark.long
def test_a_rank_that_breaks_off_ends_the_training_at_once(end: str, tmp_path: Path) -> None:
    """Its goodbye waits for the other rank, which waits in its backward: nobody may wait for that as Python ends."""
    script = tmp_path / "train.py"
    script.write_text(BREAKS_OFF.replace("END", end))
    command = [interpreter(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, str(script), str(tmp_path / "run")], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    assert "a mistake of its own" in done.stderr
