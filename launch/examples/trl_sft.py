"""TRL's SFT, observed: the lines with Silent in them are all there is to it.

torchrun --nproc_per_node 4 launch/examples/trl_sft.py

Under DeepSpeed none of them is needed: torchrun ... -m ds_silent, and the block in the ds_config.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from ds_silent.integrations.huggingface import SilentConsistencyCallback

MODEL = str(Path(__file__).parents[1] / "finetune" / "embedded")  # tiny


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output-dir", default="runs/trl-sft")
    arguments = parser.parse_args()

    rows = [{"prompt": f"{i} plus {j}?", "completion": f" It is {i + j}."} for i in range(16) for j in range(16)]
    trainer = SFTTrainer(
        MODEL,
        SFTConfig(
            f"{arguments.output_dir}/trainer",
            max_steps=arguments.steps,
            gradient_accumulation_steps=2,
            save_strategy="no",
            report_to=[],
            bf16=False,
            use_cpu=not torch.accelerator.is_available(),
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        callbacks=[SilentConsistencyCallback({"output_dir": arguments.output_dir})],
    )
    trainer.train()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
