"""A framework's own names, for the sentences that a person reads.

    words = Words(framework="DeepSpeed", training="engine")
    f"try another {words.framework} version"

What is found and what is advised is the same for every framework; what a user has called, set and may try instead has
another name in each. A framework gives its words once; whoever makes a sentence is handed them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
    """Each completes a sentence. The defaults are those of plain torch."""

    framework: str = "torch"
    training: str = "training"  # what is observed: "this training"
    config: str = "configuration"  # what ranks must be given alike: "the same configuration"
    begin: str = "ds_silent.attach"  # what every rank must call
    step: str = "optimizer.step()"  # what must follow a backward
    another_reduction: str = "try another torch version"  # where gradients are reduced wrongly
    not_reduced: str = "Call the wrapper itself in every training forward, not its .module"  # what to do first
    not_cleared: str = "Clear the gradients with zero_grad() between a step and the next backward"  # what to do first
    nobody_named: str = ""  # what else to do where no rank can be named
    update_settings: str = "clipping and the loss scale"  # what multiplies the gradient that is applied
    batch_size: str = "the batch size"  # setting of one rank's rows per micro-batch
    accumulation: str = "the number of micro-batches"  # setting of how many make a step
    hidden_writes: str = "tensor.data"  # ways to write to a gradient that cannot be followed
    own_sampler: str = ""  # where the sampler is of a loader that the framework has made: " (...)"
    same_draws: str = "layers that are skipped"  # where ranks must draw the same random numbers


TORCH = Words()
