"""Small trainings by Lightning's Trainer on CPU, and what their losses and gradients are by plain computation."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ds_silent.drill.training import hash_of
from ds_silent.integrations import BLOCK_FILE
from ds_silent.sinks.jsonl import read_events, read_metrics

ROWS, WIDTH, BATCH = 64, 8, 4


class Model(lightning.LightningModule):
    """Its training step calls its own forward; ``manual``: it takes its steps itself."""

    def __init__(self, manual: bool = False, sharded: bool = False):
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 1))
        self.automatic_optimization = not manual
        self.sharded = sharded
        self.losses: list[float] = []
        self.norms: list[float] = []

    def configure_model(self) -> None:
        if self.sharded and not isinstance(self.net, torch.distributed.fsdp.FSDPModule):
            torch.distributed.fsdp.fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def forward(self, rows: Tensor) -> Tensor:
        return self.net(rows)

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        rows, targets = batch
        loss = nn.functional.mse_loss(self(rows), targets)
        self.losses.append(float(loss.detach()))
        if not self.sharded:
            self.norms.append(self.plain_norm(rows, targets))
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None
        return {"loss": loss}

    def plain_norm(self, rows: Tensor, targets: Tensor) -> float:
        """Of this micro-batch's own gradient."""
        held = {name: p.detach().double().requires_grad_() for name, p in self.net.named_parameters()}
        out = torch.func.functional_call(self.net, held, rows.double())
        grads = torch.autograd.grad(nn.functional.mse_loss(out, targets.double()), list(held.values()))
        return float(sum(g.square().sum() for g in grads).sqrt())

    def validation_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Adversaries(Model):
    """One training step takes a step of each of two optimizers; the first one's gradient is clipped.

    ``freezes``: what is not the optimizer's own needs no gradient meanwhile.
    """

    def __init__(self, freezes: bool) -> None:
        super().__init__(manual=True)
        self.freezes = freezes
        self.judge = nn.Sequential(nn.Linear(1, 16), nn.GELU(), nn.Linear(16, 1))

    def training_step(self, batch: list[Tensor], index: int) -> None:
        rows, targets = batch
        made, judged = self.optimizers()
        out = self(rows)

        def of_made() -> Tensor:
            return nn.functional.mse_loss(out, targets) - 0.1 * self.judge(out).mean()

        self.take_step(made, of_made, clip=0.1)
        self.take_step(judged, lambda: (self.judge(out.detach()).mean() - 1.0).square(), clip=None)

    def take_step(self, optimizer: Any, loss_of: Callable[[], Tensor], clip: float | None) -> None:
        if self.freezes:
            self.toggle_optimizer(optimizer)
        loss = loss_of()
        self.losses.append(float(loss.detach()))
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        self.norms.append(float(sum(g.double().square().sum() for g in grads if g is not None).sqrt()))
        optimizer.zero_grad()
        self.manual_backward(loss)
        if clip is not None:
            self.clip_gradients(optimizer, clip, "norm")
        optimizer.step()
        if self.freezes:
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.net, self.judge)]


class CPUDeepSpeedStrategy(DeepSpeedStrategy):
    """Lightning's own refuses whatever is not CUDA, and wants a device that has a number."""

    strategy_name = "deepspeed_cpu"

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)


@dataclass(frozen=True)
class LightningCase:
    """One training by Lightning's Trainer."""

    accumulation: int = 1
    strategy: str = "ddp"  # or "deepspeed", "fsdp2"
    stage: int = 1
    manual: bool = False
    adversaries: str = ""  # or "frozen", "free"
    block: str = "callback"  # or "ds_config", "environment"
    epochs: int = 1
    steps: int = -1
    options: dict[str, Any] = field(default_factory=dict)  # of DistributedDataParallel
    named: dict[str, Any] = field(default_factory=dict)  # more of the Trainer's arguments


@dataclass(frozen=True)
class LightningTrace:
    """What one rank saw."""

    weights: str
    losses: tuple[float, ...]  # of micro-batches
    norms: tuple[float, ...]
    records: tuple[dict[str, Any], ...] = ()
    events: tuple[dict[str, Any], ...] = ()


def as_launched() -> None:
    """What torchrun sets and the spawner does not."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, GROUP_RANK="0")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29512")
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"


def strategy_of(case: LightningCase, block: dict[str, Any] | None) -> Strategy:
    if case.strategy == "ddp":
        return DDPStrategy(**case.options)
    if case.strategy == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    ds_config: dict[str, Any] = {
        "zero_optimization": {"stage": case.stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    return CPUDeepSpeedStrategy(config=ds_config if block is None else {**ds_config, "silent_consistency": block})


def trainer_of(case: LightningCase, directory: Path, callbacks: Sequence[Any], block: dict[str, Any] | None) -> Any:
    named: dict[str, Any] = {
        "accumulate_grad_batches": case.accumulation,
        "max_epochs": case.epochs,
        "max_steps": case.steps,
        "logger": False,
        "enable_checkpointing": any(isinstance(one, ModelCheckpoint) for one in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(directory),
    }
    return lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy_of(case, block),
        callbacks=list(callbacks),
        **{**named, **case.named},
    )


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(ROWS, WIDTH, generator=generator)
    return torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True) + 1)


class Scalars(Logger):
    """What a logger is given."""

    name, version = "scalars", 0

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.seen.setdefault(int(step or 0), {}).update(metrics)

    def log_hyperparams(self, *args: Any, **named: Any) -> None:
        pass


def train(
    case: LightningCase, directory: Path, observed: bool, checkpoint: str | None = None, keep: bool = False
) -> LightningTrace:
    """On every rank; ``keep``: with a checkpoint at the end of each epoch."""
    from ds_silent.integrations.lightning import SilentConsistencyCallback

    as_launched()
    block = {"output_dir": str(directory / "silent"), "tensorboard": False}
    callbacks: list[Any] = []
    if observed and case.block == "callback":
        callbacks = [SilentConsistencyCallback(block, log="logger" in case.named)]
    os.environ.pop(BLOCK_FILE, None)
    if observed and case.block == "environment":
        file = directory / f"block-{dist.get_rank()}.json"
        directory.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(block))
        os.environ[BLOCK_FILE] = str(file)
    if keep:
        callbacks += [ModelCheckpoint(dirpath=directory / "kept", filename="end", save_on_train_epoch_end=True)]
    trainer = trainer_of(case, directory, callbacks, block if observed and case.block == "ds_config" else None)
    model = (
        Adversaries(case.adversaries == "frozen") if case.adversaries else Model(case.manual, case.strategy == "fsdp2")
    )
    trainer.fit(model, DataLoader(data(), batch_size=BATCH, shuffle=True), ckpt_path=checkpoint)
    os.environ.pop(BLOCK_FILE, None)
    for callback in trainer.callbacks:
        assert getattr(callback, "observer", None) is None, "an observer is open behind the training's end"
    held = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
    records: tuple[dict[str, Any], ...] = ()
    events: tuple[dict[str, Any], ...] = ()
    silent = directory / "silent"
    if observed and dist.get_rank() == 0 and silent.exists():
        records = tuple(read_metrics(silent / "metrics.jsonl"))
        events = tuple(event for event in read_events(silent / "events.jsonl") if event["severity"] != "info")
    return LightningTrace(hash_of(held), tuple(model.losses), tuple(model.norms), records, events)
