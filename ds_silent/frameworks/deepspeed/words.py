"""What DeepSpeed's users know things by."""

from __future__ import annotations

from dataclasses import replace

from ds_silent.text import Words

WORDS = Words(
    framework="DeepSpeed",
    training="engine",
    config="ds_config",
    begin="ds_silent.initialize or ds_silent.attach",
    step="engine.step()",
    another_reduction="try another DeepSpeed version, overlap_comm false, or another communication_data_type",
    not_reduced="",
    not_cleared="",
    update_settings="gradient_clipping, the loss scale and gradient_accumulation_steps",
    batch_size="train_micro_batch_size_per_gpu",
    accumulation="gradient_accumulation_steps",
    hidden_writes="tensor.data or safe_set_full_grad",
    own_sampler=" (engine.training_dataloader.data_sampler of a loader that DeepSpeed has made)",
    same_draws="layers that are skipped under ZeRO-3",
)
OF_A_MESH = replace(
    WORDS,
    another_reduction="give initialize an mpu (deepspeed.runtime.sequence_parallel.parallel_state_sp) instead of "
    "mesh_param, with which DeepSpeed 0.19.8 does not reduce over the ranks that share a row",
)
