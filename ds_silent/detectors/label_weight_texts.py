"""What the messages about the sum of the label weights say, see :mod:`ds_silent.detectors.label_weights`."""

from __future__ import annotations

FIRST_LABELS = {
    1: " It is one label more for each row, or for some: the count holds a row's first label too, which a causal "
    "language model drops as it shifts the labels. Before release 5 transformers' Trainer counts so by itself; the "
    "script is not at fault.",
    -1: " It is one label less for each row: the count leaves a row's first label out, and it is trained, as behind "
    "the tokens that peft puts before a row (prompt tuning). Then the script is not at fault.",
}
OF_TRANSFORMERS = (
    "If compute_loss is your own, divide the labels' summed loss by num_items_in_batch there, and multiply it by the "
    "ranks if that is the number of all ranks' labels. For a loss that is a mean, set loss_is_scaled_for_ga = False in "
    "your Trainer, where transformers has it: then the Trainer divides by the micro-batches. If the model itself makes "
    "a mean of its loss (transformers' BERT, Whisper and Segformer do), set model.accepts_loss_kwargs = False before "
    "the Trainer is made."
)
ONLY_BY_ITEMS = (
    "Divide the labels' summed loss by num_items_in_batch alone: leave out your own division by the micro-batches, and "
    "loss_is_scaled_for_ga = False, by which transformers' Trainer divides. "
)


def divided_again(total: float, number: float) -> str:
    """Say that a sum over labels is divided by their number and by the micro-batches."""
    return (
        f"The step's gradient is {total:.4g} times that of the mean of its losses, on all ranks alike: the labels' sum "
        f"is divided by the number of labels of the whole step, and by {number:.4g} micro-batches once more."
    )


def micro_batches_of(count: int) -> str:
    """Return "1 micro-batch", "4 micro-batches"."""
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"


def sentence_of(total: float, multiple: tuple[int, int], count: int, ranks: int) -> str:
    """Say how many times too long the gradient is, and why; ``multiple``: powers of ``count`` and of ``ranks``."""
    causes = {
        (1, 0): f"the losses of {count} micro-batches are added up and not divided",
        (-1, 0): f"they are divided by the {count} micro-batches twice",
        (0, 1): f"they are multiplied by the {ranks} ranks, over which the reduction takes the mean",
        (0, -1): f"they are divided by the {ranks} ranks, over which the reduction takes the mean already",
    }
    parts = [(multiple[0], 0), (0, multiple[1])]
    why = ", and ".join(causes[part] for part in parts if any(part))
    return f"The step's gradient is {total:.4g} times that of the mean of its losses, on all ranks alike: {why}."


def remedy_of(total: float) -> str:
    """Return the remedy where the labels of a step weigh ``total`` together."""
    if total < 0.0:
        return "Look for a minus in what the wrapper does to the loss: every update goes uphill."
    return (
        "Normalise the loss once: leave out the number that is one too many, or put in the one that is missing. "
        f"Then the gradient is {1.0 / total:.4g} times as long: learning rate and clipping mean something else."
    )
