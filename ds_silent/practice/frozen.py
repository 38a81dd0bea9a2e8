"""Keep the garbage collector from what the fork server has imported; it imports this last.

A rank's first full collection would else visit, and so copy, every object that it shares with the fork server: 0.3 s of
CPU and 100 MB.
"""

import gc

from ds_silent.capture import untrained
from ds_silent.extras import installed

if installed("deepspeed"):
    from ds_silent.frameworks.deepspeed.state import load_operator

    load_operator()  # it asks ninja and the compiler first: 0.1 s of CPU
gc.collect()
gc.freeze()
untrained.frozen_at_start = gc.get_freeze_count()  # what is frozen here is of no training
