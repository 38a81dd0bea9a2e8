"""A small language model on a GPU, two ranks that may share one: ``test_gpu.py`` runs it with and without observing.

    torchrun --nproc_per_node 2 tests/frameworks/gpu_training.py --framework ddp --dtype bf16 --observe

NCCL refuses two ranks on one device unless it takes them for two hosts, between which it uses the loopback network. On
the CPU, where nothing of this is needed, it trains with gloo.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ds_silent

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
VOCABULARY, LENGTH, ROWS, STEPS, STRUCK, WARM = 256, 64, 8, 40, 12, 10


class Model(nn.Module):
    """Two layers of attention with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device, self.head.weight.dtype)
        logits: Tensor = self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))
        return logits


def loader_of(fault: str) -> tuple[DataLoader[Any], DistributedSampler[Any]]:
    random = torch.Generator().manual_seed(1)
    steps = torch.randint(1, 9, (STEPS * ROWS * RANKS, LENGTH + 1), generator=random)
    rows = TensorDataset((steps.cumsum(1) * 7) % VOCABULARY)
    rank = 0 if fault == "rows" else RANK
    sampler: DistributedSampler[Any] = DistributedSampler(rows, num_replicas=RANKS, rank=rank, seed=5)
    return DataLoader(rows, ROWS, sampler=sampler, pin_memory=DEVICE.type == "cuda"), sampler


def engine_of(framework: str, dtype: str, block: dict[str, Any] | None, loader: Any) -> tuple[Any, Any, Any]:
    """What is called, its DeepSpeed engine or None, and the optimizer."""
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    if framework.startswith("zero"):
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "zero_optimization": {"stage": int(framework[-1])},
            "bf16": {"enabled": dtype == "bf16"},
            "gradient_clipping": 1.0,
            "silent_consistency": block or {"enabled": False},
        }
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        engine, *_ = ds_silent.initialize(model=model, optimizer=optimizer, config=config)
        return engine, engine, None
    if framework == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(DEVICE.type, (RANKS,))
        policy = MixedPrecisionPolicy(torch.bfloat16) if dtype == "bf16" else MixedPrecisionPolicy()
        for layer in model.layers.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        wrapped: Any = fully_shard(model, mesh=mesh, mp_policy=policy)
    else:
        wrapped = nn.parallel.DistributedDataParallel(model.to(torch.bfloat16) if dtype == "bf16" else model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), 3e-3)
    if block:
        ds_silent.attach(wrapped, block, optimizer=optimizer, loader=loader)
    return wrapped, None, optimizer


class Waits:
    """Where the package makes the host wait for the device, once replicas have been compared."""

    def __init__(self) -> None:
        self.step = 0
        self.found: list[str] = []

    def note(self, message: Any, category: Any, filename: str, line: int, *_: Any) -> None:
        package = os.path.dirname(ds_silent.__file__)
        if self.step > WARM and "synchroniz" in str(message) and filename.startswith(package):
            self.found.append(f"step {self.step}: {os.path.relpath(filename, package)}:{line}")


WAITS = Waits()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    block = {"output_dir": arguments.output_dir, "integrity": {"replica_interval": 10}} if arguments.observe else None
    loader, sampler = loader_of(arguments.fault)
    model, engine, optimizer = engine_of(arguments.framework, arguments.dtype, block, loader)
    torch.manual_seed(100 + RANK)
    casts = arguments.dtype == "autocast"
    losses = []
    sampler.set_epoch(0)
    for step, (rows,) in enumerate(loader, start=1):
        WAITS.step = step
        struck = RANK == 1 and step == STRUCK
        rows = rows.to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE.type, torch.bfloat16) if casts else nullcontext():
            logits = model(rows[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        if arguments.fault == "loss" and RANK == 1 and step >= STRUCK:
            loss = loss * 2
        if engine is not None:
            engine.backward(loss)
            engine.step()
        else:
            loss.backward()
            if arguments.fault == "reduced" and struck:
                whole_grad = model.module.head.weight.grad
                whole_grad.mul_(1.5)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if arguments.fault == "drift" and struck:
            with torch.no_grad():
                next(model.parameters())[0, 0] += 0.5
        losses.append(loss.detach())
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    WAITS.step = 0
    digest = hashlib.sha256()
    module = engine.module if engine is not None else model
    if arguments.framework != "zero3":
        for _, parameter in sorted(module.named_parameters()):
            digest.update(whole(parameter).float().cpu().numpy().tobytes())
    digest.update(torch.stack(losses).cpu().numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    if DEVICE.type == "cuda":
        digest.update(torch.cuda.get_rng_state().numpy().tobytes())
    if engine is not None:
        engine.destroy()
    return {"rank": RANK, "digest": digest.hexdigest(), "loss": float(losses[-1])}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--framework", default="ddp")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--fault", default="none")
    parser.add_argument("--observe", action="store_true")
    parser.add_argument("--output-dir", default="runs/gpu")
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    if DEVICE.type == "cuda":
        os.environ |= {"NCCL_HOSTID": f"host{RANK}", "LOCAL_RANK": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        torch.cuda.set_device(DEVICE)
        torch.cuda.set_sync_debug_mode("warn")
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    warnings.simplefilter("always")
    warnings.showwarning = WAITS.note
    result = train(arguments) | {"waits": WAITS.found}
    print("RESULT " + json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
