"""transformers' Trainer, observed: the lines with Silent in them are all there is to it.

torchrun --nproc_per_node 4 launch/examples/huggingface.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ds_silent.integrations.huggingface import SilentConsistencyCallback


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--output-dir", default="runs/huggingface")
    arguments = parser.parse_args()

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 64, (256, 16), generator=generator)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, bos_token_id=0, eos_token_id=0, pad_token_id=0, **sizes))
    trainer = Trainer(
        model,
        TrainingArguments(
            f"{arguments.output_dir}/trainer",
            num_train_epochs=arguments.epochs,
            gradient_accumulation_steps=2,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.accelerator.is_available(),
        ),
        train_dataset=rows,
        callbacks=[SilentConsistencyCallback({"output_dir": arguments.output_dir})],
    )
    trainer.train()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
