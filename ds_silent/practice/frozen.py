"""Keep the garbage collector from what the fork server has imported; it imports this last.

A rank's first full collection would else visit, and so copy, every object that it shares with the fork server: 0.3 s of
CPU and 100 MB.
"""

import gc

gc.collect()
gc.freeze()
