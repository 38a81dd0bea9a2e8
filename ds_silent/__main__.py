"""``python -m ds_silent train.py ...``: run an unchanged script with the ``silent_consistency`` block honoured.

The script's own ``deepspeed.initialize`` becomes :func:`ds_silent.initialize`; nothing else changes. With the
launcher: ``deepspeed --module ds_silent train.py ...``.
"""

from __future__ import annotations

import os
import runpy
import sys

import deepspeed

from ds_silent.attach import initialize


def main() -> None:
    if len(sys.argv) < 2 or not os.path.isfile(sys.argv[1]):
        given = sys.argv[1] if len(sys.argv) > 1 else "nothing"
        sys.exit(f"ds_silent: give the training script to run, got {given}; usage: python -m ds_silent train.py [args]")
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    deepspeed.initialize = initialize
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
