"""``python -m ds_silent.finetune``, ``torchrun -m ds_silent.finetune``, ``deepspeed --module ds_silent.finetune``."""

from __future__ import annotations

import sys

from ds_silent.finetune.command import run

if __name__ == "__main__":
    sys.exit(run())
