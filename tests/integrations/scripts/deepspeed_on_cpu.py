"""Runs a module as it stands: ``deepspeed_on_cpu.py trl.scripts.sft --deepspeed ...`` or ``... run_clm.py ...``.

accelerate knows DeepSpeed on accelerators only: on CPUs it would call every rank the only one, unless told before.
"""

import os
import runpy
import sys

from accelerate.state import DistributedType, PartialState

os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
sys.argv = sys.argv[1:]
if sys.argv[0].endswith(".py"):
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
