"""Where a token model's labels come from: each label is the next input, or that of its own place, or another.

    places = LabelPlaces(framework.module)
    places.forward(args, kwargs)         # of each training forward
    places.begins(terms)                 # as its backward begins: the labels are in torch's cross entropy
    places.measured(step)                # between the reduction and the optimizer of a measured step
    places.code                          # this rank's number, 0 where not known

The labels that cross entropy has kept are compared with the input tokens of the same row, one place before, at, one and
two places behind. A place counts where these four inputs are four tokens, so that padding and repetitions say nothing.
If ``SHARE`` of ``PLACES`` or more agree with one of the four, that is where the labels come from. Masked language
models, classes, and whatever else agrees with none are not judged, nor is a training that goes from one to another and
back: it mixes tasks.

Ranks that differ are compared as settings are (:mod:`ds_silent.capture.settings_check`). What all ranks do alike is an
error only where the model's own contract says so: one that hides its inputs, or puts a token before them, has them for
labels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from ds_silent.capture.loss_graph import Term, target_of
from ds_silent.device import ReadLater
from ds_silent.records import Severity
from ds_silent.rules.language_models import causal_model
from ds_silent.rules.rule import Breach, Rule

logger = logging.getLogger("ds_silent")
EVERY, FIRST = 8, 4  # measured steps that are looked at: the first ones, and each 8th
LASTING = 16  # looks in a row at other labels than before that make a change
LASTS = EVERY + 4  # measured steps for which a look counts: fewer than LASTING, or ranks that change together differ
PLACES, SHARE = 64, 0.8
OFFSETS = (-1, 0, 1, 2)
WORDS = ("the input before their own place", "the input of their own place", "the next input", "the input after next")
_NO_TOKENS = ("label", "target", "mask", "position", "type")
_BEFORE, _OWN, _NEXT, _AFTER_NEXT = OFFSETS


class LabelPlaces(Rule):
    """Follow one rank's labels.

    Attributes:
        code: 1 more than the place in ``OFFSETS``; 0 while not known, and where labels agree with none of them.
    """

    def __init__(self, module: nn.Module | None):
        self.code = 0.0
        self._measured = self._judged = 0  # steps; the newest at which labels agreed with a place
        self._inputs: list[Tensor] = []  # of the forwards whose backward is to come
        self._under_way: Tensor | None = None  # counts of the backward under way
        self._step: list[Tensor] = []
        self._single = True  # no backward had another term
        self._later: list[ReadLater] = []
        self._counts = [0.0] * (1 + len(OFFSETS))
        self._usual: int | None = None
        self._alike = 0  # looks in a row: at the first labels, then at others than usual
        self._newest: int | None = None
        self._since = 0  # the step at which ``_usual`` was known
        self._mixed, self._every = False, True  # every label that counted was of the first looks' place
        # a module around the model may give it other inputs than its own
        self._contract = module is not None and causal_model(module) is getattr(module, "module", module)

    @property
    def text(self) -> str:
        """Say where the labels come from."""
        return WORDS[int(self.code) - 1] if self.code else "not known"

    @property
    def _looks(self) -> bool:
        due = self._measured < FIRST or self._measured % EVERY == 0 or self._newest != self._usual
        return due and not self._mixed

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take a training forward's tokens, int (B, T)."""
        if self._looks and len(self._inputs) < 2:  # of more than one nobody knows whose labels come
            tokens = self._safely(tokens_of, args, kwargs)
            self._inputs += [] if tokens is None else [tokens]

    def begins(self, terms: Sequence[Term]) -> None:
        """Compare them with the labels of a loss, as its backward begins."""
        inputs, self._inputs, self._under_way = self._inputs, [], None
        if len(inputs) == 1 and self._looks:
            self._under_way = self._safely(self._compared, inputs[0], terms)

    def _compared(self, tokens: Tensor, terms: Sequence[Term]) -> Tensor | None:
        found = [target for term in terms if (target := target_of(term)) is not None]
        self._single = self._single and len(terms) == 1
        return counts_of(tokens, *found[0]) if found else None

    def _safely(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call what belongs to this rule. What raises ends this rule alone."""
        try:
            return function(*arguments)
        except Exception as error:
            self._mixed, self.code = True, 0.0
            logger.warning("ds_silent: where labels come from is not checked any more: %s", error)
            return None

    def ended(self, reached: bool) -> None:
        """Take what the backward has been of; ``reached``: it trains the model."""
        if reached and self._under_way is not None:
            self._step.append(self._under_way)
        self._under_way = None

    def measured(self, step: int) -> None:
        """End a measured step: judge what has come to the host."""
        self._safely(self._end_step, step)

    def _end_step(self, step: int) -> None:
        self._measured += 1
        if self._step:
            self._later.append(ReadLater(torch.stack(self._step).sum(0).float()))
        self._step = []
        while self._later and self._later[0].ready:
            new = self._later.pop(0).values.tolist()
            self._counts = [one + more for one, more in zip(self._counts, new, strict=True)]
            if self._counts[0] >= PLACES:
                self._judge(step, *self._counts)
                self._counts = [0.0] * len(new)
        if self._measured - self._judged > LASTS:  # too few places to say what they are now
            self.code = 0.0

    def drop(self) -> None:
        """Forget the step under way."""
        self._inputs, self._step, self._under_way = [], [], None

    def _judge(self, step: int, places: float, *agree: float) -> None:
        most = max(range(len(agree)), key=agree.__getitem__)
        found = most if agree[most] >= SHARE * places else None
        self._judged = self._judged if found is None else self._measured
        if self._usual is None:
            self._mixed = found is None or (self._alike > 0 and found != self._newest)
            self._alike, self._newest = self._alike + 1, found
            if self._alike >= FIRST and not self._mixed:
                self._usual, self._alike, self._since = found, 0, step
        elif found is not None:
            self._mixed = found == self._usual != self._newest
            self._alike = 0 if found == self._usual else 1 + (self._alike if found == self._newest else 0)
            self._newest = found
            if self._alike >= LASTING:
                self._usual, self._alike, self._since = found, 0, step
        self._every = self._every and (self.code > 0.0 or agree[most] == places)
        # while labels change nothing is known: where all ranks change, some know it a few steps before the others
        settled = self._usual is not None and not self._mixed and self._newest == self._usual
        self.code = 1.0 + (self._usual or 0) if settled else 0.0

    def breaches(self) -> tuple[Breach, ...]:
        """Return what is wrong, or may be, on every rank alike."""
        offset = OFFSETS[int(self.code) - 1] if self.code else _NEXT
        if offset == _NEXT or not self._every:
            return ()
        severity: Severity = "error" if self._contract else "info"
        if offset == _AFTER_NEXT and (self._contract or not self._single):
            return ()  # of such a model the batch says so itself; heads that predict further tokens are meant
        said = _SAID[offset], _REMEDY[offset]
        return (Breach(f"labels:{offset}", "batch-suspect", severity, "labels", *said, self._since),)


def tokens_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return a forward's input tokens, int (B, T): ``decoder_input_ids``, ``input_ids``, or the first that may be."""
    named = {str(key).lower(): value for key, value in kwargs.items()}
    own = [named.get("decoder_input_ids"), named.get("input_ids"), *args]
    own += [value for key, value in named.items() if not any(word in key for word in _NO_TOKENS)]
    for one in own:
        if isinstance(one, Mapping):
            return tokens_of((), one)
        if type(one) is Tensor and one.ndim == 2 and one.dtype in (torch.int64, torch.int32):
            return one if one.shape[1] > len(OFFSETS) else None
    return None


def counts_of(tokens: Tensor, labels: Tensor, ignored: int) -> Tensor | None:
    """Count the places that say something and, for each of ``OFFSETS``, those whose label is that input.

    Args:
        tokens: (B, T).
        labels: B T of them, or B (T - 1) or B (T - 2) where the script leaves out the last places.

    Returns:
        int64 (1 + 4,); None where there are other numbers of labels.
    """
    rows, length = tokens.shape
    known = [rows * (length - left_out) for left_out in range(3)]
    if not rows or labels.numel() not in known or labels.device != tokens.device:
        return None
    own = labels.detach().reshape(rows, -1)[:, 1 : length - 2]
    near = [tokens[:, 1 + offset : length - 2 + offset] for offset in OFFSETS]
    counts = own != ignored
    for one, other in combinations(near, 2):
        counts = counts & (one != other)
    return torch.stack([counts, *(counts & (own == one) for one in near)]).sum((1, 2))


_SAID = {
    _BEFORE: "Each label is the input before its own place: a model that sees it there is trained to repeat it.",
    _OWN: "Each label is the input of its own place: a model that sees it there is trained to repeat it.",
    _AFTER_NEXT: "Each label is the input after the next: if labels are shifted twice, each token is trained to "
    "predict the token after the next.",
}
_SHIFT = "Shift the labels by one place, once, where the model is to predict the next token"
_REMEDY = {
    _BEFORE: f"{_SHIFT}.",
    _OWN: f"{_SHIFT}. Leave them where it hides or moves its inputs, or is to reproduce them.",
    _AFTER_NEXT: "Shift the labels once: in the data or in the loss.",
}
