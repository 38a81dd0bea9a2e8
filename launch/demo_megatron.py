"""A small GPT of Megatron-core's own layers on 4 CPU ranks, healthy and with faults of public issues: what is told?

python launch/demo_megatron.py   # what `make demo-megatron` runs; records in runs/demo-megatron
"""

from __future__ import annotations

import sys

from ds_silent.practice.megatron_demo import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
