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
from pathlib import Path
from typing import Annotated, Any

import typer

from ds_silent.extras import MissingExtra, needs
from finetune.lost import lost_peers
from finetune.settings import (
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    SamplerMode,
    Scenario,
    Settings,
    Template,
    UserError,
    checked,
)

USAGE_ERROR: Any = typer.BadParameter.__bases__[0]  # click's UsageError, of which newer versions of typer have a copy
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)

DATA, BATCH, SCHEDULE, SCENARIO, KEEP = "Model and data", "Batch", "Schedule", "Scenario", "Saving and showing"


@app.command()
def main(
    model: Annotated[
        str, typer.Option(help="'embedded', a directory, a GGUF file or a hub id.", rich_help_panel=DATA)
    ] = "embedded",
    revision: Annotated[str | None, typer.Option(help="Commit or tag of a hub model.", rich_help_panel=DATA)] = None,
    data: Annotated[
        str, typer.Option(help="'embedded', a .json, .jsonl or .parquet file, or a hub id.", rich_help_panel=DATA)
    ] = "embedded",
    template: Annotated[
        Template, typer.Option(help="'alpaca-with-input' shows an empty input too.", rich_help_panel=DATA)
    ] = "alpaca",
    append_eos: Annotated[
        bool, typer.Option(help="End each response with the eos token.", rich_help_panel=DATA)
    ] = True,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens per row; 1024, or what the model holds.", rich_help_panel=DATA)
    ] = None,
    scenario: Annotated[
        Scenario,
        typer.Option(help="Seeds: all the same, rank 0 another, each its own.", rich_help_panel=SCENARIO),
    ] = "s1-1",
    sampler: Annotated[
        SamplerMode,
        typer.Option(help="'replicated' forgets to share the rows out, on purpose.", rich_help_panel=SCENARIO),
    ] = "sharded",
    seed: Annotated[int, typer.Option(help="Of data order and generators.", rich_help_panel=SCENARIO)] = 42,
    deepspeed_config: Annotated[
        str | None,
        typer.Option(
            "--deepspeed",
            "--deepspeed_config",
            "--deepspeed-config",
            help="DeepSpeed JSON; by default the one of configs/ for this accelerator.",
            rich_help_panel=BATCH,
        ),
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help='Rows per rank and pass, where the JSON says "auto"; 2.', rich_help_panel=BATCH)
    ] = None,
    accumulation: Annotated[
        int | None, typer.Option(help='Passes per step, where the JSON says "auto"; 4.', rich_help_panel=BATCH)
    ] = None,
    drop_last: Annotated[
        bool, typer.Option(help="Leave out an epoch's incomplete last batch, or complete it.", rich_help_panel=BATCH)
    ] = True,
    activation_checkpointing: Annotated[
        bool, typer.Option(help="Less memory for a second forward pass.", rich_help_panel=BATCH)
    ] = False,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate; 5e-5.", rich_help_panel=SCHEDULE)] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Of matrices; 0.01.", rich_help_panel=SCHEDULE)] = None,
    warmup_ratio: Annotated[float, typer.Option(help="Share of the steps.", rich_help_panel=SCHEDULE)] = 0.0,
    epochs: Annotated[int, typer.Option(help="Passes over the rows.", rich_help_panel=SCHEDULE)] = 1,
    max_steps: Annotated[int | None, typer.Option(help="Steps, instead of epochs.", rich_help_panel=SCHEDULE)] = None,
    eval_rows: Annotated[int, typer.Option(help="Rows to hold out.", rich_help_panel=SCHEDULE)] = 0,
    eval_every: Annotated[int, typer.Option(help="Steps; 0: after the last.", rich_help_panel=SCHEDULE)] = 0,
    output: Annotated[Path, typer.Option(help="Where everything is written.", rich_help_panel=KEEP)] = Path(
        "runs/finetune"
    ),
    save_every: Annotated[
        int, typer.Option(help="Steps between checkpoints; 0: on a signal only.", rich_help_panel=KEEP)
    ] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the output's checkpoint.", rich_help_panel=KEEP)
    ] = False,
    save_model: Annotated[bool, typer.Option(help="Write the trained model at the end.", rich_help_panel=KEEP)] = True,
    log_every: Annotated[int, typer.Option(help="Steps between lines.", rich_help_panel=KEEP)] = 10,
    progress: Annotated[
        bool, typer.Option(help="A progress bar on rank 0, on a terminal.", rich_help_panel=KEEP)
    ] = True,
    local_rank: Annotated[
        int, typer.Option("--local_rank", "--local-rank", hidden=True, help="Given by some launchers; not needed.")
    ] = -1,
) -> int:
    """Full fine-tune of a causal language model on Alpaca rows, every rank watched by ds_silent.

    Start it with [bold]deepspeed[/] or [bold]torchrun[/]; one process alone works too.
    """
    settings = checked(
        Settings(
            model=model,
            revision=revision,
            data=data,
            template=template,
            append_eos=append_eos,
            max_length=max_length,
            scenario=scenario,
            sampler=sampler,
            seed=seed,
            drop_last=drop_last,
            deepspeed_config=deepspeed_config,
            output=output,
            micro_batch=micro_batch,
            accumulation=accumulation,
            learning_rate=lr,
            weight_decay=weight_decay,
            warmup_ratio=warmup_ratio,
            epochs=epochs,
            max_steps=max_steps,
            activation_checkpointing=activation_checkpointing,
            eval_rows=eval_rows,
            eval_every=eval_every,
            save_every=save_every,
            resume=resume,
            save_model=save_model,
            log_every=log_every,
            progress=progress,
        )
    )
    try:
        needs("the fine-tune", "finetune")
    except MissingExtra as error:
        raise UserError(str(error)) from None
    # only now, because these take seconds to import and a mistake above needs none of them
    import torch.distributed as dist

    from finetune.ranks import join
    from finetune.trainer import train

    outcome = train(settings, join())
    dist.destroy_process_group()
    return EXIT_STOPPED if outcome.stopped else 0


def run() -> int:
    """The process's exit code. A mistake in the options is the same on every rank, so rank 0 alone says it; that others
    are gone, each rank that is left."""
    try:
        return int(app(standalone_mode=False) or 0)
    except USAGE_ERROR as error:
        sentence = str(error.format_message())
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
