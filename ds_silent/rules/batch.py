"""Check what a micro-batch says of itself, where a causal language model of transformers computes the loss.

Its contract is documented: the model shifts the labels itself; a label of -100 does not count; a mask of 0 is padding;
a mask that is given hides from it that positions start again. What breaks it is told; what may be meant is not.

A micro-batch counts when the loss that the model itself has made of its labels gets a gradient: an evaluation is not
looked at, and of a script that makes its own loss from the logits the mask and the ends of rows alone. Of each, a few
counts are taken on the device (:class:`Counts`). They are added up over ``LOOKED_AT`` measured steps, from the first
and from every ``EVERY``-th on, and judged as they come; a check that has too little to go by leaves its verdict.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ds_silent.device import ReadLater
from ds_silent.framework import Framework
from ds_silent.patches import Patches
from ds_silent.records import Severity
from ds_silent.rules.language_models import causal_model, inputs_of
from ds_silent.rules.rule import Breach, Rule

IGNORED_LABEL = -100  # transformers' and torch.nn.CrossEntropyLoss's
EVERY, LOOKED_AT = 64, 4  # measured steps
_ROWS, _FEW_ROWS, _TOKENS, _PLACES = 8, 4, 64, 16  # that a verdict needs
_UNLABELLED_ROWS = 32
_PADDING_RUN = 4  # tokens at the beginning of a row
_COLLATED = 8  # batches


class Counts(NamedTuple):
    """Count, of some micro-batches, what the checks compare; -100 in the labels is "ignored"."""

    rows: float
    labels: float  # that count: not ignored, from the second place on
    pairs: float  # places with a label that is not ignored and a next input
    same: float  # of these, where the label is the input of its own place
    ahead: float  # of these, where it is the input of the next place
    doubled: float  # rows whose first two tokens begin a sequence
    ends: float  # labels that count and end a sequence
    ends_ignored: float  # ends of a sequence whose label is ignored, behind one that is not
    padding: float  # masked places at the ends of a row, behind another one
    padding_trained: float  # of these, with a label that is not ignored
    restarts: float  # places where positions start again, between two tokens that a mask calls attended
    led_by_padding: float  # rows that begin with padding tokens which the mask calls attended
    empty: float  # rows of which the mask calls no token attended
    ended: float  # rows whose last attended token ends a sequence
    ended_twice: float  # of these, where just the one before it is the same


_NOTHING = Counts(*[0.0] * len(Counts._fields))


@dataclass(frozen=True)
class SpecialTokens:
    """Hold the ids of one model's configuration, where they tell something: no token is two of them."""

    begin: int | None
    ends: tuple[int, ...]
    padding: int | None

    @classmethod
    def of(cls, model: nn.Module) -> SpecialTokens:
        """Read what ``config`` and ``generation_config`` say."""
        places = [getattr(model, name, None) for name in ("config", "generation_config")]
        begin, ends, padding = (_ids(places, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id"))
        return cls(_only(begin, ends + padding), ends, _only(padding, begin + ends))


def _ids(places: list[Any], name: str) -> tuple[int, ...]:
    values = [getattr(place, name, None) for place in places]
    listed = [one for value in values for one in (value if isinstance(value, (list, tuple)) else [value])]
    return tuple(dict.fromkeys(one for one in listed if isinstance(one, int)))


def _only(ids: tuple[int, ...], others: tuple[int, ...]) -> int | None:
    return ids[0] if len(ids) == 1 and ids[0] not in others else None


def counts_of(inputs: dict[str, Any], tokens: SpecialTokens, hides_restarts: bool) -> Tensor | None:
    """Return :class:`Counts` of a forward's inputs, fp32 on their device; None where these are not rows of tokens.

    ``hides_restarts``: a mask keeps the model from seeing that positions start again.
    """
    ids, labels, mask = inputs.get("input_ids"), inputs.get("labels"), inputs.get("attention_mask")
    if not (_of_tokens(ids) and _of_tokens(labels) and ids.shape == labels.shape and ids.shape[1] > 2):
        return None
    if inputs.get("shift_labels") is not None or not (mask is None or (_is_plain(mask) and mask.shape == ids.shape)):
        return None
    rows = torch.ones_like(ids[:, 0], dtype=torch.bool)
    attended = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.ne(0)
    counts = labels != IGNORED_LABEL
    nothing = torch.zeros_like(rows)
    columns = torch.arange(ids.shape[1], device=ids.device)

    first = attended.to(torch.int8).argmax(1, keepdim=True)
    beginning = ids.gather(1, torch.cat((first, first + 1), 1).clamp(max=ids.shape[1] - 1))
    doubled = nothing if tokens.begin is None else (beginning == tokens.begin).all(1)

    ends = _any_of(labels, tokens.ends)
    shown = _any_of(ids, tokens.ends) & attended
    alone = ~torch.nn.functional.pad(shown[:, 2:], (0, 1))  # several in a row are padding
    ends_ignored = shown[:, 1:] & alone & ~counts[:, 1:] & counts[:, :-1]

    last = _last(attended)
    outside = ((columns < first) | (columns > last)) & attended.any(1, keepdim=True)
    padding = outside[:, 1:] & outside[:, :-1]

    positions, restarts = inputs.get("position_ids"), nothing
    if hides_restarts and mask is not None and _of_tokens(positions) and positions.shape[1] == ids.shape[1]:
        restarts = (positions[:, 1:] == 0) & (positions[:, :-1] > 0) & attended[:, 1:] & attended[:, :-1]

    led = nothing
    if tokens.padding is not None:
        begins = (ids[:, :_PADDING_RUN] == tokens.padding) & attended[:, :_PADDING_RUN]
        led = begins.all(1) & (ids[:, -1] != tokens.padding)

    pairs, labelled = counts[:, :-1], labels[:, :-1]
    taken = {
        "rows": rows,
        "labels": counts[:, 1:],
        "pairs": pairs,
        "same": pairs & (labelled == ids[:, :-1]),
        "ahead": pairs & (labelled == ids[:, 1:]),
        "doubled": doubled,
        "ends": ends[:, 1:],
        "ends_ignored": ends_ignored,
        "padding": padding,
        "padding_trained": padding & counts[:, 1:],
        "restarts": restarts,
        "led_by_padding": led,
        **_ends_of_rows(ids, attended, last, tokens),
    }
    return torch.stack([taken[name].sum() for name in Counts._fields]).float()


def counts_without_labels(inputs: dict[str, Any], tokens: SpecialTokens) -> Tensor | None:
    """Return :class:`Counts` of a forward without labels: what its mask says, by itself and of the tokens."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not _is_plain(mask) or not mask.numel():
        return None
    attended = mask.ne(0)
    taken = {"empty": ~attended.any(1)}
    if _of_tokens(ids) and ids.shape == mask.shape and ids.shape[1] > 2:
        taken = _ends_of_rows(ids, attended, _last(attended), tokens)
    nothing = torch.zeros_like(attended[:, 0])
    return torch.stack([taken.get(name, nothing).sum() for name in Counts._fields]).float()


def _last(attended: Tensor) -> Tensor:
    """Return the place of each row's last attended token, int64 (rows, 1); the row's end where there is none."""
    return attended.shape[1] - 1 - attended.flip(1).to(torch.int8).argmax(1, keepdim=True)


def _ends_of_rows(ids: Tensor, attended: Tensor, last: Tensor, tokens: SpecialTokens) -> dict[str, Tensor]:
    empty = ~attended.any(1)
    third, second, end = (ids.gather(1, (last - back).clamp(min=0))[:, 0] for back in (2, 1, 0))
    ended = _any_of(end, tokens.ends) & ~empty
    return {"empty": empty, "ended": ended, "ended_twice": ended & (second == end) & (third != end)}


def _any_of(values: Tensor, tokens: tuple[int, ...]) -> Tensor:
    found = torch.zeros_like(values, dtype=torch.bool)
    for token in tokens:
        found |= values == token
    return found


def _is_plain(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.ndim == 2


def _of_tokens(value: Any) -> TypeGuard[Tensor]:
    return _is_plain(value) and value.dtype in (torch.int64, torch.int32)


class BatchContents(Rule):
    """Look at the micro-batches of some steps."""

    def __init__(self, framework: Framework):
        self._framework = framework
        self._steps = 0  # measured
        self._trained: list[Tensor] = []  # counts of the step's micro-batches
        self._later: list[tuple[int, int, ReadLater]] = []  # measured step, the framework's own
        self._added = _NOTHING
        self._unlabelled = 0.0  # rows, since the last label that counts
        self._broken: dict[str, Breach] = {}

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Hook the model whose contract is known."""
        model = causal_model(self._framework.module)
        if model is None or not type(model).forward.__module__.startswith("transformers."):
            return
        self._tokens = SpecialTokens.of(model)
        self._hides_restarts = getattr(model.config, "_attn_implementation", "") in ("sdpa", "eager")
        patches.hook(model.register_forward_hook, partial(safely, self._forwarded, safely), with_kwargs=True)

    def _forwarded(self, safely: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        looks = self._steps % EVERY < LOOKED_AT or self._unlabelled > 0
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not looks:
            return
        loss, inputs = getattr(output, "loss", None), inputs_of(model, args, kwargs)
        own = isinstance(loss, Tensor) and loss.requires_grad
        trained = loss if own else getattr(output, "logits", None)
        if not isinstance(trained, Tensor) or not trained.requires_grad:
            return
        with torch.no_grad():
            if own:
                counts = counts_of(inputs, self._tokens, self._hides_restarts)
            else:
                counts = counts_without_labels(inputs, self._tokens)
        if counts is not None:
            trained.register_hook(partial(safely, self._backward, counts))  # type: ignore[no-untyped-call]

    def _backward(self, counts: Tensor, gradient: Tensor) -> None:
        """Take the micro-batch: it is trained. A hook that returns a tensor would replace the gradient."""
        self._trained.append(counts)

    def breaches(self) -> tuple[Breach, ...]:
        """Return what is broken by now."""
        if self._trained:
            counts = ReadLater(torch.stack(self._trained).sum(0))
            self._later.append((self._steps, self._framework.step, counts))
            self._trained = []
        self._steps += 1
        while self._later and self._later[0][2].ready:
            measured, step, later = self._later.pop(0)
            self._judge(measured, step, Counts(*later.values.tolist()))
        return tuple(self._broken.values())

    def _judge(self, measured: int, step: int, new: Counts) -> None:
        if measured % EVERY == 0:
            self._added = _NOTHING
        self._added = Counts(*map(sum, zip(self._added, new, strict=True)))
        self._unlabelled = 0.0 if new.labels else self._unlabelled + new.rows
        for check, broken in _verdicts(self._added, self._unlabelled).items():
            if broken is False:
                self._broken.pop(check, None)
            elif broken and check not in self._broken:
                severity, where, message, remedy = _WORDS[check]
                key = f"batch:{check}"
                self._broken[check] = Breach(key, "batch-suspect", severity, where, message, remedy, step)


def _verdicts(c: Counts, unlabelled: float) -> dict[str, bool | None]:
    """Return whether each check is broken; None where that is not known yet."""

    def judged(enough: bool, broken: bool) -> bool | None:
        return broken if enough else None

    return {
        "ignored": judged(unlabelled == 0 or unlabelled >= _UNLABELLED_ROWS, unlabelled > 0),
        "shifted": judged(c.pairs >= _TOKENS, c.ahead >= 0.8 * c.pairs and c.same <= 0.5 * c.pairs),
        "doubled": judged(c.rows >= _ROWS, c.doubled == c.rows),
        "ended twice": judged(c.ended >= _ROWS, c.ended_twice == c.ended),
        "ends": judged(c.ends > 0 or c.ends_ignored >= _ROWS, c.ends == 0),
        "padding": judged(c.padding >= _PLACES, c.padding_trained >= 0.9 * c.padding),
        "positions": judged(c.rows >= _FEW_ROWS, c.restarts >= _FEW_ROWS),
        "empty": c.empty >= _FEW_ROWS,
        "padded": judged(c.rows >= _FEW_ROWS, c.led_by_padding >= _FEW_ROWS),
    }


_WORDS: dict[str, tuple[Severity, str, str, str]] = {
    "ignored": (
        "error",
        "labels",
        f"Not one label counts in {_UNLABELLED_ROWS} rows or more, one after another: all are {IGNORED_LABEL}, so the "
        "model learns nothing from them.",
        "Decode a row and its labels: the template that finds the answer does not match, or the answer is cut off.",
    ),
    "shifted": (
        "error",
        "labels",
        "The labels are the inputs, shifted by one already, and the model shifts them once more: each token is trained "
        "to predict the token after the next.",
        "Give the model labels that are the inputs themselves, or shift_labels where they are shifted.",
    ),
    "doubled": (
        "warning",
        "input_ids",
        "Every row begins with two tokens that begin a sequence (bos_token_id): the template adds one, and the "
        "tokenizer another.",
        "Tokenize what a chat template has made with add_special_tokens=False.",
    ),
    "ended twice": (
        "warning",
        "input_ids",
        "Every row that ends does so with two equal tokens that end a sequence (eos_token_id): the template adds one, "
        "and the trainer or the tokenizer another.",
        "Leave one of them out: of the template, or of what is appended to its text.",
    ),
    "ends": (
        "warning",
        "labels",
        "No row trains its end: tokens that end a sequence (eos_token_id) follow tokens that are trained, and their "
        f"own labels are {IGNORED_LABEL} in all rows. The model does not learn to stop.",
        "Use a padding token that is not the end token, or take the labels' padding from the mask and not from the id.",
    ),
    "padding": (
        "warning",
        "labels",
        "Padding is trained: places that attention_mask calls padding have labels that count, so the model learns to "
        "predict padding, and the loss is divided by it, too.",
        f"Set labels to {IGNORED_LABEL} where attention_mask is 0.",
    ),
    "positions": (
        "warning",
        "position_ids",
        "Positions start again inside rows, as where several documents are packed, and attention_mask calls all of "
        "them attended: with a mask the model does not look at the positions, and a document attends to those before.",
        "Leave attention_mask out of packed batches and set use_cache to false, or give a mask by documents.",
    ),
    "empty": (
        "warning",
        "attention_mask",
        "Rows come of which attention_mask calls no token attended: the model computes with nothing, and the row is "
        "trained.",
        "Look at how rows are cut to their greatest length: what is kept may be the padding.",
    ),
    "padded": (
        "warning",
        "attention_mask",
        "Rows begin with padding (pad_token_id) that attention_mask calls attended, or there is no mask: the model "
        "computes with it as with text.",
        "Give the model the tokenizer's attention_mask.",
    ),
}


class OverwrittenLabels(Rule):
    """Look whether transformers' collator for language models makes labels anew where the data set's leave some out.

    ``DataCollatorForLanguageModeling`` takes the inputs for labels. A data set whose labels are -100 at the prompts
    then trains the prompts. The first batches are looked at, where the collator runs in the training's process.
    """

    def __init__(self, framework: Framework):
        self._framework = framework
        self._left = _COLLATED
        self._found: tuple[Breach, ...] = ()

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Stand around the collator's work, if the script has imported it."""
        kind = getattr(sys.modules.get("transformers.data.data_collator"), "DataCollatorForLanguageModeling", None)

        def collate(original: Callable[..., Any], own: Any, examples: Any, *args: Any, **kwargs: Any) -> Any:
            given = safely(self._given, examples)  # before: padding may take them out
            result = original(own, examples, *args, **kwargs)
            safely(self._look, given, result)
            return result

        if kind is not None:
            patches.wrap_method(kind, "torch_call", collate)

    def _given(self, examples: Any) -> tuple[int, int] | None:
        """Count the labels that the data set gives, and those of them that it leaves out."""
        if not self._left or not all(isinstance(one, Mapping) and "labels" in one for one in examples):
            return None
        self._left -= 1
        labels = [label for one in examples for label in torch.as_tensor(one["labels"]).flatten().tolist()]
        return len(labels), labels.count(IGNORED_LABEL)

    def _look(self, given: tuple[int, int] | None, result: Any) -> None:
        if given is None or not given[1]:
            return
        trained = int((result["labels"] != IGNORED_LABEL).sum())
        if trained > given[0] - given[1]:
            message = (
                "DataCollatorForLanguageModeling makes the labels anew from the inputs: of the data set's labels "
                f"{given[1]} in {given[0]} of one batch are -100, and {trained} are trained behind it."
            )
            remedy = (
                "Use DataCollatorForSeq2Seq or default_data_collator, which keep the data set's labels; or drop that "
                "column if all tokens are to be trained."
            )
            where, step = "labels", self._framework.step
            self._found = (Breach("overwritten", "batch-suspect", "warning", where, message, remedy, step),)
            self._left = 0

    def breaches(self) -> tuple[Breach, ...]:
        return self._found
