"""DistributedDataParallel, observed: the three lines with ds_silent in them are all there is to it.

torchrun --nproc_per_node 4 launch/examples/ddp.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ds_silent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--output-dir", default="runs/ddp")
    arguments = parser.parse_args()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    dist.init_process_group("gloo" if device.type == "cpu" else None)
    if device.type != "cpu":
        torch.accelerator.set_device_index(dist.get_rank() % torch.accelerator.device_count())

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 32, generator=generator)
    data = TensorDataset(inputs, inputs @ torch.randn(32, 4, generator=generator))
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"output_dir": arguments.output_dir}
    with ds_silent.observe(model, optimizer, config=config, loader=loader):
        for epoch in range(arguments.epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"last loss {loss.item():.4f}; records in {arguments.output_dir}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
