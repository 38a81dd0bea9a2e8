"""Megatron-core, observed: the three lines with ds_silent in them are all there is to it.

torchrun --nproc_per_node 4 launch/examples/megatron.py --tensor-parallel 2
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

import ds_silent

VOCABULARY, LENGTH, ROWS, MICRO_BATCHES = 256, 64, 4, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--output-dir", default="runs/megatron")
    arguments = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    parallel_state.initialize_model_parallel(arguments.tensor_parallel)
    tensor_parallel.model_parallel_cuda_manual_seed(0)

    config = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        tensor_model_parallel_size=arguments.tensor_parallel,
        finalize_model_grads_func=finalize_model_grads,
    )
    gpt = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH).cuda()
    reduction = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(config, reduction, gpt)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, use_distributed_optimizer=True), [model])
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())

    def forward_step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
        tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator).cuda()
        places = torch.arange(LENGTH, device="cuda").expand(ROWS, LENGTH)
        mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device="cuda"), 1)
        output = model(tokens, places, mask, labels=tokens.roll(-1, 1))
        return output, lambda output: (output.mean(), {"loss": output.mean().detach()})

    block = {"output_dir": arguments.output_dir}
    with ds_silent.observe(model, optimizer, config=block, accumulation=MICRO_BATCHES):
        for _ in range(arguments.steps):
            losses = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=None,
                model=[model],
                num_microbatches=MICRO_BATCHES,
                seq_length=LENGTH,
                micro_batch_size=ROWS,
                forward_only=False,
            )
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad_buffer()
    if dist.get_rank() == 0:
        print(f"last loss {losses[-1]['loss'].item():.4f}; records in {arguments.output_dir}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
