"""Fine-tune the embedded model in each seed scenario on 4 CPU ranks and compare what the metrics show.

python launch/demo.py            # what `make demo` runs; results in runs/demo
python launch/demo.py --verbose  # with all that the ranks say, which else goes to runs/demo/console.log
"""

from __future__ import annotations

import sys

from ds_silent.finetune.demo import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
