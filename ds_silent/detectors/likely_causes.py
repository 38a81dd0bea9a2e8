"""What makes one rank differ: causes ranked by how well they fit the numbers. Pure.

    causes = likely_causes(Symptoms(loss=193.0, norm=190.0, cosine=0.11, peers_cosine=0.10, label_tokens=189.0))
    causes[0].name, causes[0].text          # "loss-summed", "193 is about its number of label tokens (189): the loss …"
    in_words(symptoms), causes_in_words(causes)

Three questions decide. Is the loss off, is the norm off, does the gradient point where the others' do?

* loss and norm off by one factor, direction right: the loss itself is multiplied. That is code: sum instead of mean, a
  division that is missing. Which one, the factor tells: the number of label tokens, rows, micro-batches or ranks.
* norm off, loss plain, direction right: the gradient is multiplied behind the loss: a second backward, a scaling or a
  clipping of its own.
* direction off, loss high: other labels or other rows. They may raise loss and norm by nearly one factor, but a factor
  on the loss does not turn the gradient: where the direction is off by more than its noise, the data come first. Where
  it is not known, as the others' own cosines are noise, a simple ratio (2, 1/3, the number of ranks) is code.
* loss far off, norm not by as much: whatever it is, no factor on the loss.
* norm cut to one value, the same at every step: the rank clips its gradient before the reduction.
* direction opposite: a sign; data where the loss is higher: a wrong sign negates it or, behind it, leaves it.
* direction off, loss plain: the gradient was changed behind the loss: memory, a stale buffer, hardware.
* inputs of another size: whatever follows from it, they come first. Own rows may differ; not by 3 times, and suddenly.
* another number of rows or label tokens changes how large and how noisy a healthy gradient is.

Only what multiplies nothing in particular, or turns a gradient behind a plain loss, is what broken hardware looks like.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ds_silent.text import TORCH, Words

SAME_FACTOR = 1.35  # loss and norm, each against other rows' loss and norm, agree on one factor no better than that
NEAR = 1.075  # a factor further from a count than this is another, however noisy it is
NEAR_LARGEST = 1.25  # likewise above LARGEST: that is a multiplication, and scripts multiply by few such numbers
PLAIN = 1.15  # a ratio this near to 1 says nothing, where the noise is not known
LARGE = 3.0  # a factor that other rows or other labels do not make
LARGEST = 20.0  # a factor of loss and norm that not even wrong labels make
SIMPLE, SIMPLE_LOSS, SIMPLE_NORM = (2.0, 3.0, 4.0), (0.03, 0.1), (0.1, 0.3)  # and how near in logarithms: least, most
SURE = 4.0  # standard deviations of a healthy rank's cosine: further off is no noise
LEANING = 2.0  # standard errors of a loss that is higher beside a gradient that is off: data, before anything else
TOWARDS, AWAY = 2 / 3, -0.5  # of the others' own cosine: pointing where they do, pointing back
FAINT = 0.02  # below it, the others' own cosine is too near to 0 for anybody to point elsewhere
SHOWN = 3


Direction = Literal["right", "off", "opposite"]


@dataclass(frozen=True)
class Symptoms:
    """One rank against the others; None: not known. Ratios are to the others' median, medians over the fault's steps.

    ``cosine``: of its gradient with another rank's; ``peers_cosine``: of two other ranks' gradients; ``past_cosine``,
    ``past_peers_cosine``: the same before the fault. Counts are of one step of this rank. ``inputs``: ratio of their
    root mean square, where it was another before the fault. ``loss_noise``, ``norm_noise``: how far a healthy rank's
    log ratio is from 0; ``cosine_noise``: its cosine from the others'; 0: not known. ``norm_constant``: its norm is
    nearly the same at every step, and the others' are not. ``spread``: the ratios are those of the larger to the
    smaller, whichever is the rank's.
    """

    loss: float | None = None
    norm: float | None = None
    cosine: float | None = None
    peers_cosine: float | None = None
    past_cosine: float | None = None
    past_peers_cosine: float | None = None
    rows: float | None = None
    peers_rows: float | None = None
    label_tokens: float | None = None
    peers_label_tokens: float | None = None
    micro_batches: float | None = None
    peers_micro_batches: float | None = None
    inputs: float | None = None
    ranks: int = 0
    loss_noise: float = 0.0
    norm_noise: float = 0.0
    cosine_noise: float = 0.0
    norm_constant: bool = False
    spread: bool = False

    def each(self, count: float | None) -> float | None:
        """Of one micro-batch."""
        return None if count is None else count / max(self.micro_batches or 1.0, 1.0)

    @property
    def usual_cosine(self) -> float | None:
        """What its cosine would be without the fault: the others', and as far from it as its own was before.

        None: not known, or too near to 0 for anybody to point elsewhere.
        """
        before, theirs_before = self.past_cosine, self.past_peers_cosine
        usual = before if self.peers_cosine is None else self.peers_cosine
        if self.peers_cosine is not None and before is not None and theirs_before is not None:
            usual = self.peers_cosine + min(before - theirs_before, 0.0)  # a shard of its own may lie apart, healthily
        return usual if usual is not None and usual > FAINT else None

    @property
    def direction(self) -> Direction | None:
        """Where its gradient points, measured by how well the others agree; None where noise may have turned it."""
        if self.cosine is None or self.usual_cosine is None:
            return None
        share = self.cosine / self.usual_cosine
        if share >= TOWARDS:
            return "right"
        if not self.usual_cosine - self.cosine > SURE * self.cosine_noise > 0.0:
            return None
        return "opposite" if share <= AWAY else "off"


@dataclass(frozen=True)
class LikelyCause:
    """One cause: its name, a half sentence, and what to look at."""

    name: str
    text: str
    look_at: str


def likely_causes(seen: Symptoms, words: Words = TORCH) -> tuple[LikelyCause, ...]:
    """The likelier first; at least one."""
    if seen.spread:
        return (_OUT_OF_PHASE,)
    loss, norm = _off(seen.loss, seen.loss_noise), _off(seen.norm, seen.norm_noise)
    one_factor = loss * norm > 0.0 and abs(loss - norm) <= math.log(SAME_FACTOR) + seen.loss_noise + seen.norm_noise
    apart = loss * norm < 0.0 and abs(norm) <= math.log(SAME_FACTOR)  # no factor does that
    causes = _of_counts(seen, loss, norm, words)
    if seen.direction == "opposite":
        causes = [*([_OTHER_DATA] if loss > 0 else []), _NEGATED, *causes, _CORRUPTED]
    elif seen.norm_constant and norm < 0:
        causes = [_CUT, *causes, _SCALED]
    elif one_factor:
        multiplied, data = _of_one_factor(seen, loss, words), [_OTHER_DATA if loss > 0 else _EASIER]
        doubtful = seen.direction is None and loss > 0 and abs(loss) < math.log(LARGEST) and not _simple(seen)
        if seen.direction == "off" or doubtful:
            causes = [*data, *multiplied, *causes]
        else:
            causes = [*multiplied, *causes, *(data if abs(loss) < math.log(LARGE) else [])]
    elif seen.direction == "off":
        higher = _off(seen.loss, seen.loss_noise, LEANING) > 0.0  # what is changed behind a loss leaves it as it is
        since_start = seen.past_cosine is None  # rows may be wrong from the first step on; hardware breaks later
        rows = _EASIER if loss < 0 else _OTHER_DATA
        causes += [rows, _CORRUPTED] if loss or higher or since_start else [_CORRUPTED, rows]
    elif norm and not apart and abs(norm) > 2.0 * abs(loss):
        causes += _of_the_norm(seen, norm, words)
    elif loss > 0:
        causes += _of_the_loss(seen, loss, norm)
    elif loss < 0:
        causes += [_EASIER, _ADDED, _MULTIPLIED]
    else:
        causes += [_OTHER_DATA, _CORRUPTED]
    if _log(seen.inputs) > math.log(LARGE) and seen.inputs is not None:
        causes = [_of_inputs(seen.inputs), *causes]
    unique = {cause.name: cause for cause in causes}
    return tuple(list(unique.values())[:SHOWN])


def in_words(seen: Symptoms, other: str | None = None) -> str:
    """The numbers, in one line; ``other``: the name of the only other rank, where there is one."""
    theirs, them = ("theirs", "them") if other is None else (f"that of {other}", "it")
    told, either = [], " or as many times less" if seen.spread else ""
    if seen.loss is not None:
        told.append(f"loss {_number(seen.loss)} times {theirs}{either}")
    if seen.norm is not None:
        told.append(f"gradient norm {_number(seen.norm)} times {theirs}{either}")
    if seen.cosine is not None:
        others = "" if seen.peers_cosine is None else f" (theirs with each other {seen.peers_cosine:.2g})"
        told.append(f"cosine with {them} {seen.cosine:.2g}{others}")
    if seen.inputs is not None and _log(seen.inputs) > math.log(LARGE):
        told.append(f"inputs {_number(seen.inputs)} times {theirs} (root mean square)")
    whose = "theirs" if other is None else other
    for name, own, others_have in (
        ("rows", seen.rows, seen.peers_rows),
        ("label tokens", seen.label_tokens, seen.peers_label_tokens),
        ("micro-batches", seen.micro_batches, seen.peers_micro_batches),
    ):
        if own is not None and others_have is not None and (name == "label tokens" or own != others_have):
            told.append(f"{own:g} {name} ({whose} {others_have:g})")
    return ", ".join(told)


def causes_in_words(causes: tuple[LikelyCause, ...]) -> str:
    """``Most likely A. Else B; C.``"""
    first, *others = (cause.text for cause in causes)
    return f"Most likely: {first}." + (f" Else: {'; '.join(others)}." if others else "")


def either_in_words(causes: Mapping[int, tuple[LikelyCause, ...]]) -> str:
    """What is likely if the one is wrong, or the other: of two ranks, by number, nobody can say which it is."""
    first = {rank: own[0].text for rank, own in causes.items()}
    if len(set(first.values())) == 1:
        return f"Most likely, on whichever is wrong: {next(iter(first.values()))}."
    return f"Most likely, {'; '.join(f'if rank {rank} is wrong: {text}' for rank, text in first.items())}."


def _of_counts(seen: Symptoms, loss: float, norm: float, words: Words) -> list[LikelyCause]:
    """Other numbers of rows, micro-batches or label tokens, where they go the way that the norm goes."""
    found = []
    rows = _ratio(seen.rows, seen.peers_rows)
    tokens = _ratio(seen.label_tokens, seen.peers_label_tokens)
    steps = _ratio(seen.micro_batches, seen.peers_micro_batches)
    if steps and abs(steps) > math.log(PLAIN):
        text = f"it takes {seen.micro_batches:g} micro-batches per step, the others {seen.peers_micro_batches:g}"
        found.append(LikelyCause("accumulation-differs", text, f"{words.accumulation} of this rank"))
    if rows and abs(rows) > math.log(PLAIN):
        text = f"it takes {seen.rows:g} rows per step, the others {seen.peers_rows:g}"
        found.append(LikelyCause("batch-size-differs", text, "the batch size of this rank's loader"))
    if tokens and abs(tokens) > math.log(1.5) and tokens * norm <= 0.0 and abs(loss) <= math.log(LARGE):
        over = "fewer is noisier and longer" if tokens < 0 else "more is shorter"
        text = f"its rows hold {math.exp(tokens):.2g} times the label tokens of the others', and a mean over {over}"
        look = "this rank's rows and its masking of labels; weigh the loss by the label tokens of all ranks"
        found.append(LikelyCause("label-tokens-differ", text, look))
    return found


def _of_one_factor(seen: Symptoms, factor: float, words: Words) -> list[LikelyCause]:
    """The loss is multiplied: by what? Its own ratio says so best: a norm depends more on the rows."""
    shown = _number(math.exp(factor))
    near = math.log(NEAR_LARGEST) if abs(factor) > math.log(LARGEST) else _near(seen.loss_noise)
    found = []
    each = " per micro-batch" if (seen.micro_batches or 1.0) > 1.0 else ""
    summed = "the loss is summed over them, not averaged"
    undivided = f"the loss is not divided by {words.accumulation}, or divided twice by the others"
    candidates = (
        ("loss-summed", seen.each(seen.label_tokens), f"label tokens{each}", summed),
        ("loss-summed-over-rows", seen.each(seen.rows), f"rows{each}", summed),
        ("loss-not-divided", seen.micro_batches, "micro-batches per step", undivided),
        ("loss-times-ranks", float(seen.ranks) or None, "ranks", "the loss is multiplied by the world size"),
    )
    look = "reduction='sum' or 'mean', and divisions of the loss, in this rank's code"
    for name, count, what, meaning in candidates:
        if count is not None and count > 1.0 and abs(abs(factor) - math.log(count)) <= near:
            whose = "the number of ranks" if what == "ranks" else f"its number of {what}"
            if factor > 0:
                text = f"{shown} is about {whose} ({count:g}): {meaning}"
            else:
                text = f"1/{_number(math.exp(-factor))}, and {count:g} is {whose}: the loss is divided by it once more"
            found.append((abs(abs(factor) - math.log(count)), LikelyCause(name, text, look)))
    tokens = _ratio(seen.label_tokens, seen.peers_label_tokens)
    if tokens and abs(tokens) > math.log(1.5) and abs(factor - tokens) <= near:
        text = f"{shown} is about how many more label tokens it has: the loss is weighed by the tokens on one side only"
        found.append((abs(factor - tokens), LikelyCause("token-weighting", text, look)))
    return [*(cause for _, cause in sorted(found, key=lambda pair: pair[0])), _MULTIPLIED]


def _near(noise: float) -> float:
    """Return how far, in logarithms, a factor may lie from a count: three of its standard errors, where it has some."""
    return min(max(3.0 * noise, SIMPLE_LOSS[0]), math.log(NEAR)) if noise > 0.0 else math.log(NEAR)


def _simple(seen: Symptoms) -> bool:
    """Whether loss and norm are both multiplied by a number that scripts multiply by, within their standard errors."""
    counts = (*SIMPLE, seen.ranks, seen.micro_batches, seen.each(seen.rows), seen.each(seen.label_tokens))
    sides = ((seen.loss, seen.loss_noise, *SIMPLE_LOSS), (seen.norm, seen.norm_noise, *SIMPLE_NORM))
    near = [(_log(ratio), min(max(3.0 * noise, least), most)) for ratio, noise, least, most in sides]
    known = [math.log(count) for count in counts if count is not None and count > 1.0]
    return any(all(abs(factor - count) <= apart for factor, apart in near) for count in known)


def _of_the_loss(seen: Symptoms, loss: float, norm: float) -> list[LikelyCause]:
    """The loss is higher, and the norm not by the same factor."""
    if loss < math.log(LARGE):
        return [_OTHER_DATA, _ADDED, _MULTIPLIED]
    if seen.norm is None or (norm > 0.0 and seen.direction == "right"):
        return [_MULTIPLIED, _ADDED, _OTHER_DATA]
    longer = norm > 0.0 or (seen.direction is None and seen.norm > PLAIN)
    return [_OTHER_DATA, _ADDED, _MULTIPLIED] if longer else [_ADDED, _OTHER_DATA, _MULTIPLIED]


def _of_the_norm(seen: Symptoms, norm: float, words: Words) -> list[LikelyCause]:
    """The gradient is multiplied behind a plain loss."""
    factor, near = math.exp(norm), _near(seen.norm_noise)
    counts = (
        (2.0, "backward runs twice"),
        (seen.micro_batches, f"the gradient is not divided by {words.accumulation}"),
        (float(seen.ranks) or None, "the gradient is multiplied by the world size"),
        (seen.each(seen.rows), "the gradient is summed over the rows"),
        (seen.each(seen.label_tokens), "the gradient is summed over the label tokens"),
    )
    found = [
        (abs(norm - math.log(count)), f"{_number(factor)} is about {count:g}: {meaning}")
        for count, meaning in counts
        if count is not None and count > 1.0 and abs(norm - math.log(count)) <= near
    ]
    causes = [LikelyCause("gradient-counted", text, _SCALED.look_at) for _, text in sorted(found)[:1]]
    causes += [_CLIPPED, _SCALED] if norm < 0 else [_SCALED]
    return [*causes, _OTHER_DATA, _CORRUPTED] if abs(norm) < math.log(LARGE) else [*causes, _CORRUPTED]


def _of_inputs(times: float) -> LikelyCause:
    how = f"{_number(times)} times as large as" if times > 1.0 else f"1/{_number(1.0 / times)} of"
    text = f"its inputs are {how} the others' (root mean square): they are not normalised as the others' are"
    return LikelyCause("inputs-scaled", text, "what normalises this rank's inputs: mean, standard deviation, units")


_NEGATED = LikelyCause(
    "sign",
    "its gradient points the other way: a sign is wrong in its loss, in a hook or in an optimizer's maximize",
    "the sign of this rank's loss",
)
_MULTIPLIED = LikelyCause(
    "loss-multiplied",
    "its loss is multiplied by what the others' is not (sum instead of mean, a weight, a division that is missing)",
    "the reduction, the weight and the divisions of the loss in this rank's code",
)
_SCALED = LikelyCause(
    "gradient-scaled",
    "its gradient is multiplied behind the loss (a second backward, a hook, a loss scale that is not taken back)",
    "code between this rank's loss and the reduction: backward, hooks, loss scale, clipping",
)
_CLIPPED = LikelyCause(
    "clipped-before-reduction",
    "its gradient is clipped or scaled down before the reduction",
    "clipping and hooks that run before the reduction on this rank",
)
_OUT_OF_PHASE = LikelyCause(
    "out-of-phase",
    "it takes another task, source or order of rows than the others at each step (a task out of phase), or its loss is "
    "scaled by what changes from step to step",
    "which rows this rank takes at which step, and factors of its loss that change",
)
_CUT = LikelyCause(
    "clipped-before-reduction",
    "its gradient norm is cut to one value, the same at every step: this rank clips before the reduction",
    _CLIPPED.look_at,
)
_OTHER_DATA = LikelyCause(
    "other-data",
    "its rows or labels are of another kind (labels shifted or shuffled, tokenization, another source of data)",
    "this rank's rows: labels, tokenization, source of data",
)
_EASIER = LikelyCause(
    "easier-data",
    "its rows are easier or known already, or it trains without dropout (evaluation mode)",
    "this rank's rows, and model.training on it",
)
_ADDED = LikelyCause(
    "loss-term",
    "something without a gradient is added to its loss, or the loss that it reports is not the one it trains on",
    "what this rank returns as its loss",
)
_CORRUPTED = LikelyCause(
    "corrupted-gradient",
    "its gradient is changed behind the loss (a stale buffer, a hook, silent data corruption)",
    "hooks and buffers of this rank, then the hardware diagnostics of its host: swap the device if they fail",
)


def _log(ratio: float | None) -> float:
    """Size of the logarithm; infinite where nothing is known."""
    return abs(math.log(ratio)) if ratio is not None and 0.0 < ratio < math.inf else math.inf


def _off(ratio: float | None, noise: float, errors: float = 4.0) -> float:
    """log ratio, or 0.0 where it is not known, or plain: within that many standard errors."""
    if ratio is None or not 0.0 < ratio < math.inf:
        return 0.0
    plain = min(max(errors * noise, 0.02), math.log(LARGE)) if noise > 0.0 else math.log(PLAIN)
    return math.log(ratio) if abs(math.log(ratio)) > plain else 0.0


def _ratio(own: float | None, theirs: float | None) -> float | None:
    """log of own over theirs; None where one of them is not known or is 0."""
    return math.log(own / theirs) if own and theirs else None


def _number(value: float) -> str:
    """Three digits, and thousands with a comma."""
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"
