"""The last import of the fork server: from here on no garbage collector looks at what it has imported.

A rank's first full collection would else visit, and so copy, every object that it shares with the fork server: 0.3 s of
CPU and 100 MB.
"""

import gc

gc.collect()
gc.freeze()
