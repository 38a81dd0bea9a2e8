"""How things are said to people: text from outside on one line, ranks, sizes, and each framework's own terms."""

from __future__ import annotations

import importlib
import json
import random
import sys
from dataclasses import dataclass


def _import_what_draws() -> None:
    """Import what draws a number of Python's generator, once per process, and give the script its generator back."""
    state = random.getstate()
    importlib.import_module("rich.style")
    random.setstate(state)


_import_what_draws()  # here, because whatever prints tables imports this module first


def one_line(text: str) -> str:
    """``text`` with a blank for whatever could begin a line or a header, or move a terminal's cursor."""
    return "".join(character if character.isprintable() else " " for character in text)


def printable(text: str) -> str:
    """Return ``text`` in characters that the output has: an ASCII terminal is no reason to stop."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, errors="replace").decode(encoding)


def mistake(sentence: object) -> int:
    """Print on standard error what is wrong with what was typed; return the exit status of every command for it."""
    print(f"ds-silent: {sentence}", file=sys.stderr)
    return 2


def unwritten(error: OSError) -> int:
    """Print what could not be written and why, as :func:`mistake` does; a full disk names no file."""
    what = "the output" if error.filename is None else ascii(error.filename)
    return mistake(f"{what} cannot be written ({error.strerror or error}); choose another path")


def shown(value: object, longest: int = 80) -> str:
    """Return ``value`` as JSON writes it, on one line and short enough for a sentence, whatever it holds."""
    try:
        text = json.dumps(value)  # ASCII only, so control characters of a hostile text stay escaped
    except (TypeError, ValueError, RecursionError):
        text = ascii(f"a {type(value).__name__}")
    return shortened(text, longest)


def shortened(text: str, longest: int) -> str:
    """Return ``text``, and where it is longer than ``longest`` characters its beginning and three dots."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def named(ranks: tuple[int, ...], world_size: int | None = None) -> str:
    """``rank 3``, ``ranks 0 and 2``, ``ranks 0, 1 and 2``, ``both ranks``, ``all 4 ranks``."""
    if world_size is not None and len(ranks) == world_size > 1:
        return everybody(world_size)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    first_ranks = ranks if len(ranks) <= 8 else ranks[:7]
    last = str(first_ranks[-1]) if len(ranks) <= 8 else f"{len(ranks) - 7} more"
    first = first_ranks[:-1] if len(ranks) <= 8 else first_ranks
    return f"ranks {', '.join(map(str, first))} and {last}"


def everybody(ranks: int) -> str:
    """``both ranks``, ``all 4 ranks``; of two at least."""
    return "both ranks" if ranks == 2 else f"all {ranks} ranks"


def size_text(number: float) -> str:
    """Bytes, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.4g} {unit}"


@dataclass(frozen=True)
class Words:
    """A framework's own names, each of which completes a sentence. The defaults are those of plain torch.

    What is found and what is advised is the same for every framework; what a user has called, set and may try instead
    has another name in each.
    """

    framework: str = "torch"
    training: str = "training"  # what is observed: "this training"
    config: str = "configuration"  # what ranks must be given alike: "the same configuration"
    begin: str = "ds_silent.attach"  # what every rank must call
    step: str = "optimizer.step()"  # what must follow a backward
    another_reduction: str = "try another torch version"  # where gradients are reduced wrongly
    not_reduced: str = (  # what to do first
        "Call the wrapper itself in every training forward, not its .module; where layers were frozen behind it wrap "
        "the module anew, or with find_unused_parameters=True; with static_graph=True call no autograd.grad before it"
    )
    not_synchronised: str = (
        "Run the last backward of each step, and of a short last window, outside of no_sync(), and behind a forward of "
        "the wrapper itself, not of its .module; where the script "
        'averages weights instead of gradients, set "integrity": {"aggregation": false, "replica_interval": 0}'
    )
    not_cleared: str = "Clear the gradients with zero_grad() between a step and the next backward"  # what to do first
    stale: str = ""  # what to do first where an aggregate of the step before comes again
    update_settings: str = "clipping and the loss scale"  # what multiplies the gradient that is applied
    batch_size: str = "the batch size"  # setting of one rank's rows per micro-batch
    accumulation: str = "the number of micro-batches"  # setting of how many make a step
    hidden_writes: str = "tensor.data"  # ways to write to a gradient that cannot be followed
    own_sampler: str = ""  # where the sampler is of a loader that the framework has made: " (...)"
    same_draws: str = "layers that are skipped"  # where ranks must draw the same random numbers


TORCH = Words()

NOTHING_CAME_BY = (
    'no DeepSpeed engine with an optimizer and an enabled "silent_consistency" block, no DistributedDataParallel, '
    "fully_shard or Megatron-core model with an optimizer came by: if nothing wraps the model each process trains "
    "alone; add the block to the ds_config, or name a file that holds it by --silent-consistency-config, or call "
    "ds_silent.attach in the script; a loop that reduces its gradients itself needs an adapter (docs/ways-in.md)"
)
"""Why a script of several processes has no observer, if nothing else is known."""
