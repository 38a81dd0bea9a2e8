"""DeepSpeed with ``mesh_param``: ranks that share a row (Ulysses) hold different weights after the first step.

    python benchmarks/mesh_param_drift.py                 # 4 ranks: 2 rows at a time, 2 ranks to each
    python benchmarks/mesh_param_drift.py --ranks 2

Needs torch and deepspeed, nothing else; CPU, gloo. The same model, weights and tokens are trained twice with plain SGD:
with ``deepspeed.initialize(mpu=parallel_state_sp)`` and with ``deepspeed.initialize(mesh_param=(rows, 2))``, which
should be two ways of saying the same. Printed are, after each step, the largest difference between the weights of ranks
that share a row and of ranks that do not, and how far what rank 0 applied is from the training with the mpu.

With the mpu, gradients are averaged over all ranks (``groups._get_sequence_data_parallel_group``). With a mesh that
function falls back to ``_get_data_parallel_group``, which is the mesh's "data_parallel" dimension alone: nobody reduces
over "sequence_parallel". So each of the ranks that share a row applies the gradient of its own tokens, times their
number. The exit status is 1 where the weights drift apart, 0 where they do not.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn

SHARING, STEPS, RATE = 2, 3, 0.1  # ranks to a row, steps, learning rate
ROWS, LENGTH, WIDTH, CLASSES = 2, 6, 8, 5  # LENGTH: tokens of a row on each rank


class Model(nn.Module):
    """Each rank has its part of every row; what the parts exchange is the mean over the whole row."""

    def __init__(self, sharing: Any):
        super().__init__()
        self.embedding, self.inner = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.sharing = nn.Linear(WIDTH, CLASSES), sharing

    def forward(self, tokens: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_reduce

        hidden = torch.tanh(self.inner(self.embedding(tokens)))
        hidden = hidden + all_reduce(hidden.sum(1, keepdim=True), group=self.sharing) / (SHARING * LENGTH)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.roll(-1, 1).flatten())


def train(way: str, sharing: Any) -> tuple[list[Tensor], list[tuple[float, float]]]:
    """One training: (what each step applied here, flat; the largest differences of weights after each step)."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    rank, rows_at_once = dist.get_rank(), dist.get_world_size() // SHARING
    torch.manual_seed(1)
    model = Model(sharing)
    given: dict[str, Any] = {"mpu": parallel_state_sp} if way == "mpu" else {"mesh_param": (rows_at_once, SHARING)}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        config={
            "train_micro_batch_size_per_gpu": ROWS,
            "train_batch_size": ROWS * rows_at_once,
            "steps_per_print": 10**9,
        },
        **given,
    )
    tokens = torch.Generator().manual_seed(rank)
    applied, apart = [], []
    for _ in range(STEPS):
        before = weights(engine)
        engine.backward(engine(torch.randint(0, CLASSES, (ROWS, LENGTH), generator=tokens)))
        engine.step()
        after = weights(engine)
        applied.append((before - after) / RATE)
        apart.append(differences(after))
    return applied, apart


def weights(engine: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in engine.module.parameters()])


def differences(own: Tensor) -> tuple[float, float]:
    """Largest difference of a weight between ranks that share a row, and between those that hold the same part."""
    all_weights = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(all_weights, own)
    together = torch.stack(all_weights).unflatten(0, (-1, SHARING))  # (rows, sharing, D)
    return spread(together, 1), spread(together, 0)


def spread(values: Tensor, dimension: int) -> float:
    return float((values.amax(dimension) - values.amin(dimension)).max())


def work(rank: int, ranks: int, port: int, answer: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    parallel_state_sp.initialize_sequence_parallel(SHARING)
    found = {way: train_alone(way) for way in ("mpu", "mesh_param")}
    right, _ = found["mpu"]
    if rank == 0:
        print(
            f"DeepSpeed {deepspeed.__version__}, torch {torch.__version__}, {ranks} ranks, {SHARING} to a row, ZeRO 0"
        )
        print(f"{'':<12}{'step':>5}  {'weights apart, same row':>24}  {'same part':>10}  {'applied / mpu - 1':>18}")
        for way, (applied, apart) in found.items():
            for step, (same_row, same_part) in enumerate(apart):
                off = float((applied[step] - right[step]).norm() / right[step].norm())
                print(f"{way:<12}{step + 1:>5}  {same_row:>24.2e}  {same_part:>10.2e}  {off:>18.2e}")
        answer.value = int(any(max(pair) > 0.0 for _, apart in found.values() for pair in apart))
    dist.destroy_process_group()


def train_alone(way: str) -> tuple[list[Tensor], list[tuple[float, float]]]:
    """Without what the training before has left in DeepSpeed's module of groups."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups

    groups.mpu = groups.mesh_device = None
    return train(way, parallel_state_sp.get_sequence_parallel_group())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, choices=(2, 4, 8), help="2 of them share each row (default 4)")
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answer = processes.get_context("spawn").Value("i", 0)
    processes.spawn(work, (arguments.ranks, port, answer), arguments.ranks)
    print("ranks that share a row hold different weights" if answer.value else "all ranks hold the same weights")
    return int(answer.value)


if __name__ == "__main__":
    sys.exit(main())
