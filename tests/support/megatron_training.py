"""The same small training under Megatron-core, as scripts that write their own loop do it; on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ds_silent
from benchmarks.probe import DTYPES, LENGTH, ROWS, VOCABULARY, Probe
from ds_silent.drill.megatron_on_cpu import parallel
from megatron_gpt import GptShape, gpt_models, take_step
from tests.support.training import Case, Trace, batches_of, oracle_step, trace_of


@dataclass(frozen=True)
class MegatronCase(Case):
    """One cell: ``Case`` without what is DeepSpeed's."""

    distributed: bool = False  # optimizer
    overlap: bool = False
    average: bool = False  # in the collective
    per_token: bool = False
    reduce_in_own: bool = False  # bf16 gradients are reduced in bf16

    @property
    def sums_exactly(self) -> bool:
        return self.dtype != "fp32" and not self.reduce_in_own

    @property
    def unscaled_wrongly(self) -> bool:
        return False


def wrap(modules: list[Any], case: MegatronCase, **config: Any) -> tuple[list[Any], Any]:
    """(chunks, optimizer)."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    transformer = config.pop("transformer", None) or TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, calculate_per_token_loss=case.per_token
    )
    reduction = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not case.reduce_in_own,
        overlap_grad_reduce=case.overlap,
        use_distributed_optimizer=case.distributed,
        average_in_collective=case.average,
        bucket_size=2500,  # several, where the reduction is overlapped
    )
    chunks = [DistributedDataParallel(transformer, reduction, module) for module in modules]
    for chunk in chunks:
        chunk.broadcast_params()
    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        weight_decay=0.01,
        bf16=case.dtype == "bf16",
        fp16=case.dtype == "fp16",
        initial_loss_scale=2.0**8,
        clip_grad=case.clipping,
        use_distributed_optimizer=case.distributed,
    )
    return chunks, get_megatron_optimizer(options, chunks)


def build(case: MegatronCase) -> tuple[Any, Any]:
    torch.manual_seed(1234)
    [chunk], optimizer = wrap([Probe(case.checkpointing).to(DTYPES[case.dtype])], case)
    return chunk, optimizer


def train_megatron(case: MegatronCase, output_dir: Path, steps: int, enabled: bool, oracle: bool = False) -> Trace:
    with parallel():
        return _train(case, output_dir, steps, enabled, oracle)


def _train(case: MegatronCase, output_dir: Path, steps: int, enabled: bool, oracle: bool) -> Trace:
    chunk, optimizer = build(case)
    copy = Probe(None)
    observer = None
    if enabled:
        block = case.block(output_dir)
        observer = ds_silent.attach([chunk], block, optimizer=optimizer, accumulation=case.accumulation)
        assert observer is not None
    generator = torch.Generator().manual_seed(99 + dist.get_rank())
    losses, expected = [], []
    for step in range(steps):
        batches = batches_of(case, generator)
        if oracle:
            scale = float(optimizer.get_loss_scale())
            weights = [parameter.detach().clone() for parameter in chunk.module.parameters()]
            expected.append(oracle_step(weights, copy, batches, case, step + 1, scale))
        for micro, (tokens, skip) in enumerate(batches):
            with chunk.no_sync() if micro < case.accumulation - 1 else nullcontext():
                loss = chunk(tokens, skip)
                losses.append(float(loss.detach()))
                optimizer.scale_loss(loss / case.accumulation).backward()
        chunk.finish_grad_sync()
        optimizer.step()
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
    if observer is not None:
        observer.close()
    states = [state for each in optimizer.chained_optimizers for state in each.optimizer.state.values()]
    output = output_dir if enabled else None
    return trace_of(case, output, chunk.module.parameters(), states, losses, expected)


def build_gpt(
    tensor: int, pipeline: int, virtual: int | None, case: MegatronCase, sequence: bool = False
) -> tuple[list[Any], Any, Any]:
    """(chunks, optimizer, Megatron's configuration) of a small GPT with tied embeddings, of Megatron's own layers."""
    torch.manual_seed(1)
    shape = GptShape(tensor, pipeline, virtual, sequence)
    models, config = gpt_models(shape, VOCABULARY + 3, LENGTH, case.per_token)
    return *wrap(models, case, transformer=config), config


def step_gpt(chunks: list[Any], optimizer: Any, case: MegatronCase, generator: torch.Generator) -> Any:
    """One step of Megatron's own schedule; what ``optimizer.step`` returns."""
    rows = (torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in iter(int, 1))
    return take_step(chunks, optimizer, rows, case.accumulation, (ROWS, LENGTH), case.per_token)
