"""A plain DeepSpeed training that knows nothing of ds_silent: where do two releases of DeepSpeed part?

    make compare-versions GOOD=0.18.3 BAD=0.19.8
    ds-silent bisect deepspeed --good 0.18.3 --bad 0.19.8 -- torchrun --nproc_per_node 2 -m ds_silent \
        benchmarks/compare_versions.py

Two parameter groups, a schedule of DeepSpeed's own, clipping, two micro-batches per step, ZeRO stage 2.
"""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

STEPS, ROWS, MICRO_BATCHES = 12, 4, 2
CONFIG = {
    "train_micro_batch_size_per_gpu": ROWS,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 20, "warmup_num_steps": 3, "warmup_type": "linear", "cos_min_ratio": 0.1},
    },
}


def main() -> None:
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4))
    decayed = [{"params": model[0].parameters(), "weight_decay": 0.1}, {"params": model[2].parameters(), "lr": 2e-3}]
    optimizer = torch.optim.AdamW(decayed, lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    rows = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS * MICRO_BATCHES):
        x = torch.randn(ROWS, 32, generator=rows)
        engine.backward(nn.functional.mse_loss(engine(x), x[:, :4]))
        engine.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
