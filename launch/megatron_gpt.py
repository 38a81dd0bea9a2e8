"""Train a small GPT of Megatron-core's own layers with Megatron's own schedules, on the CPU.

with parallel(tensor=2):    # of ds_silent.drill.megatron_on_cpu
    models, config = gpt_models(GptShape(tensor=2), vocabulary=64, length=12)
    take_step(chunks, optimizer, batches, micro_batches=2, size=(3, 12))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


@dataclass(frozen=True)
class GptShape:
    """Say how a model is spread over ranks."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    sequence: bool = False  # parallelism
    experts: int | None = None  # in each layer, one on each rank


def gpt_models(shape: GptShape, vocabulary: int, length: int, per_token: bool = False) -> tuple[list[Any], Any]:
    """Return (this rank's stages, Megatron's configuration) with tied embeddings; inside ``parallel``."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    routed: dict[str, Any] = {}
    if shape.experts:
        from megatron.core.transformer.moe import moe_utils

        if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 asks for it where Transformer Engine is not installed
            moe_utils.te_general_gemm = None
        routed = {"num_moe_experts": shape.experts, "expert_model_parallel_size": shape.experts}
        routed |= {"moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none"}
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=shape.tensor,
        pipeline_model_parallel_size=shape.pipeline,
        virtual_pipeline_model_parallel_size=shape.virtual,
        sequence_parallel=shape.sequence,
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=per_token,
        use_cpu_initialization=True,
        batch_p2p_comm=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        add_bias_linear=not (shape.experts and shape.tensor > 1),  # Megatron refuses biases of experts in parts
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        **routed,
    )
    config.finalize_model_grads_func = finalize_model_grads
    stages = [None] if shape.virtual is None else list(range(shape.virtual))
    with patch.object(WrappedTorchNorm, "__new__", _norm) if shape.sequence else nullcontext():
        models = [
            GPTModel(
                config,
                get_gpt_layer_local_spec(num_experts=shape.experts),
                vocab_size=vocabulary,
                max_sequence_length=length,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                share_embeddings_and_output_weights=True,
                vp_stage=stage,
            )
            for stage in stages
        ]
    return models, config


def _norm(cls: Any, config: Any, hidden_size: int, *args: Any, **kwargs: Any) -> torch.nn.LayerNorm:
    """Megatron's own, without Transformer Engine and Apex, refuses sequence parallelism."""
    norm = torch.nn.LayerNorm(hidden_size, eps=config.layernorm_epsilon)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True  # type: ignore[attr-defined]
    return norm


def take_step(
    chunks: list[Any],
    optimizer: Any,
    batches: Iterator[Tensor],
    micro_batches: int,
    size: tuple[int, int],
    per_token: bool = False,
    hear: Callable[[Tensor], object] = lambda loss: None,
) -> Any:
    """Take one step over token ids (rows, length) = ``size``; return what ``optimizer.step`` returns.

    ``hear`` is told the mean loss of each micro-batch, on the ranks that compute one.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    rows, length = size

    def loss_function(output: Tensor) -> tuple[Any, ...]:
        hear(output.mean())
        tokens = torch.tensor(output.numel(), dtype=torch.int)
        return (output.sum(), tokens, {}) if per_token else (output.mean(), {})

    def forward_step(data: Any, model: Any) -> tuple[Any, Any]:
        tokens = next(batches)
        places = torch.arange(length).expand(rows, length)
        mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
        return model(tokens, places, mask, labels=tokens.roll(-1, 1)), loss_function

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[None] * len(chunks) if len(chunks) > 1 else None,
        model=chunks,
        num_microbatches=micro_batches,
        seq_length=length,
        micro_batch_size=rows,
        forward_only=False,
    )
    result = optimizer.step()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    return result
