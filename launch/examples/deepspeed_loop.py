"""A loop with DeepSpeed, observed: the lines with silent in them are all there is to it.

deepspeed --num_gpus 4 launch/examples/deepspeed_loop.py
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import ds_silent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--output-dir", default="runs/deepspeed")
    parser.add_argument("--local_rank", type=int, default=-1, help="from the launcher")
    arguments = parser.parse_args()
    deepspeed.init_distributed()

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 32, generator=generator)
    data = TensorDataset(inputs, inputs @ torch.randn(32, 4, generator=generator))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 1},
        "silent_consistency": {"output_dir": arguments.output_dir},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, _, loader, _ = ds_silent.initialize(model=model, optimizer=optimizer, config=config, training_data=data)
    for epoch in range(arguments.epochs):
        loader.data_sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(engine(x.to(engine.device)), y.to(engine.device))
            engine.backward(loss)
            engine.step()
    if engine.global_rank == 0:
        print(f"last loss {loss.item():.4f}; records in {arguments.output_dir}")
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
