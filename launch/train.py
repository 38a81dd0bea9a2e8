"""Full fine-tune of a causal language model on Alpaca rows, every rank watched.

    deepspeed launch/train.py                                          # the embedded model and data
    deepspeed launch/train.py --model /models/openPangu-Embedded-1B --data tatsu-lab/alpaca
    DS_ACCELERATOR=cpu torchrun --standalone --nproc_per_node 4 launch/train.py --scenario s1-3

Options and exit codes: :mod:`finetune.command`.
"""

from __future__ import annotations

import sys

from finetune.command import app, run

__all__ = ["app", "run"]

if __name__ == "__main__":
    sys.exit(run())
