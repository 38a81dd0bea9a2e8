"""Lightning's Trainer, observed: the lines with Silent in them are all there is to it.

torchrun --nproc_per_node 4 launch/examples/lightning_trainer.py

Without them: SILENT_CONSISTENCY_CONFIG=FILE in the environment, where FILE holds the block.
"""

from __future__ import annotations

import argparse
import os

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ds_silent.integrations.lightning import SilentConsistencyCallback


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        rows, targets = batch
        return nn.functional.mse_loss(self.net(rows), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--output-dir", default="runs/lightning")
    arguments = parser.parse_args()

    lightning.seed_everything(0)
    rows = torch.randn(256, 16)
    trainer = lightning.Trainer(
        strategy="ddp",
        devices=int(os.environ.get("WORLD_SIZE", "2")),
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
        callbacks=[SilentConsistencyCallback({"output_dir": arguments.output_dir})],
    )
    trainer.fit(Model(), DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=8, shuffle=True))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
