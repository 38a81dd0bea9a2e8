"""A small training whose number of ranks may change from start to start: ``nodes_elastic.py DIRECTORY STEPS``.

Goes on from the checkpoint that it finds in the directory. ZeRO stage 0: DeepSpeed loads that with any number of ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ds_silent

ROWS, BATCH = 4096, 4


class Rows(Dataset[dict[str, Tensor]]):
    """Noise around a line."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self._x = torch.randn(ROWS, 16, generator=generator)
        self._y = self._x.sum(1, keepdim=True) + torch.randn(ROWS, 1, generator=generator)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self._x[index], "y": self._y[index]}


class Model(nn.Module):
    """A few hundred parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = (self.layers(x) - y).square().mean()
        return loss


def train(directory: Path, steps: int) -> None:
    """To optimizer step ``steps``, with a checkpoint at the end."""
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    torch.manual_seed(1)
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "silent_consistency": {
            "output_dir": str(directory / "silent"),
            "tensorboard": False,
            "integrity": {"replica_interval": 2},
        },
    }
    rows = Rows()
    sampler: Any = DistributedSampler(rows, seed=3)
    engine, *_ = ds_silent.initialize(
        model=model, model_parameters=list(model.parameters()), config=config, sampler=sampler
    )
    observer = ds_silent.observer_of(engine)
    assert observer is not None
    checkpoints = directory / "checkpoints"
    begun = 0
    if (checkpoints / "latest").exists():
        _, state = engine.load_checkpoint(str(checkpoints))
        observer.load_state_dict(state["observer"])
        begun = engine.global_steps
    sampler.set_epoch(begun)  # every start deals the rows anew
    loader = DataLoader(rows, BATCH, sampler=sampler)
    for batch in loader:
        engine.backward(engine(**batch))
        engine.step()
        if engine.global_steps == steps:
            break
    engine.save_checkpoint(str(checkpoints), client_state={"observer": observer.state_dict()})
    observer.close()
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
