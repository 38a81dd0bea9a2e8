"""Full fine-tune of a causal language model on Alpaca rows, every rank watched.

    python launch/train.py                                       # the embedded model and data, one process
    deepspeed launch/train.py --model /models/openPangu-Embedded-1B --data tatsu-lab/alpaca
    DS_ACCELERATOR=cpu torchrun --standalone --nproc_per_node 4 launch/train.py --scenario s1-3

Exit codes: 0 done; 2 a mistake that one sentence on stderr names; 75 stopped by SIGTERM or SIGINT after saving a
checkpoint, from which the same command with --resume goes on; 1 other ranks are gone or cannot be heard, said in one
sentence, or an error with a traceback, as is anything else.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from dataclasses import fields
from inspect import Parameter, Signature
from typing import Annotated, Any, get_type_hints

import typer

from ds_silent.extras import MissingExtra, needs
from finetune.lost import lost_peers
from finetune.settings import EXIT_STOPPED, EXIT_USER_ERROR, Settings, UserError, checked

USAGE_ERROR: Any = typer.BadParameter.__bases__[0]  # click's UsageError, of which newer versions of typer have a copy
LOCAL_RANK = typer.Option("--local_rank", "--local-rank", hidden=True, help="Given by some launchers; not needed.")
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


def main(local_rank: int, **options: Any) -> int:
    """Full fine-tune of a causal language model on Alpaca rows, every rank watched by ds_silent.

    Start it with [bold]deepspeed[/] or [bold]torchrun[/]; one process alone works too.
    """
    settings = checked(Settings(**options))
    try:
        needs("the fine-tune", "finetune")
    except MissingExtra as error:
        raise UserError(str(error)) from None
    # DeepSpeed's calls of what newer versions of torch have renamed: a user can do nothing about them
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # only now, because these take seconds to import and a mistake above needs none of them
    import torch.distributed as dist

    from finetune.ranks import join
    from finetune.trainer import train

    outcome = train(settings, join())
    dist.destroy_process_group()
    return EXIT_STOPPED if outcome.stopped else 0


main.__annotations__ = {
    **get_type_hints(Settings, include_extras=True),
    "local_rank": Annotated[int, LOCAL_RANK],
    "return": int,
}
main.__signature__ = Signature(  # type: ignore[attr-defined]  # typer makes the options of it
    [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=main.__annotations__[name])
        for name, default in [*((field.name, field.default) for field in fields(Settings)), ("local_rank", -1)]
    ]
)
app.command()(main)


def run() -> int:
    """Return the process's exit code. A mistake in the options is the same on every rank, so rank 0 alone says it; that
    others are gone, each rank that is left."""
    try:
        return int(app(standalone_mode=False) or 0)
    except USAGE_ERROR as error:
        sentence = str(error.format_message()).replace("Value error, ", "")  # newer versions of typer add it
    except UserError as error:
        sentence = str(error)
    except RuntimeError as error:
        lost = lost_peers(error)
        if lost is None:
            raise
        rank = os.environ.get("RANK", "0")
        remedy = "the same command with --resume goes on from the last checkpoint"
        print(f"error: rank {rank} cannot go on, {lost}: {remedy}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)  # records and log are closed; an ordinary end waits minutes for collectives that nobody answers
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {sentence}", file=sys.stderr, flush=True)
    else:
        time.sleep(5)  # a launcher ends the others when one leaves: rank 0 is to speak first
    return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(run())
