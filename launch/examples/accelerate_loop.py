"""A loop with accelerate, observed: the lines with ds_silent or observer in them are all there is to it.

accelerate launch --num_processes 4 launch/examples/accelerate_loop.py
torchrun --nproc_per_node 4 launch/examples/accelerate_loop.py    # without GPUs, where accelerate starts one process
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ds_silent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--output-dir", default="runs/accelerate")
    arguments = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 32, generator=generator)
    data = TensorDataset(inputs, inputs @ torch.randn(32, 4, generator=generator))
    loader = DataLoader(data, batch_size=8, shuffle=True)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    config = {"output_dir": arguments.output_dir}
    observer = ds_silent.attach(model, config, optimizer=optimizer, loader=loader)
    accelerator.register_for_checkpointing(observer)
    for _ in range(arguments.epochs):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    observer.close()
    accelerator.print(f"last loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
