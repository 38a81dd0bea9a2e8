"""By which factor FSDP2's gradient differs from the mean over the ranks: 2 with torch 2.8.0 on gloo, without ds_silent.

torchrun --standalone --nproc_per_node 2 benchmarks/fsdp2_factor.py
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4, bias=False)
    weight = layer.weight.detach().clone().requires_grad_()
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    (inputs @ weight.T).square().mean().backward()
    assert weight.grad is not None
    dist.all_reduce(weight.grad)
    fully_shard(layer)
    layer(inputs).square().mean().backward()
    whole = layer.weight.grad.full_tensor()  # type: ignore[union-attr]
    if rank == 0:
        factor = float(whole.norm() / (weight.grad / ranks).norm())
        print(f"torch {torch.__version__}, gloo, {ranks} ranks: FSDP2's gradient is {factor:.6g} times the mean")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
