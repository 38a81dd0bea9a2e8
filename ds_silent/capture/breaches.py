"""What this rank's rules find, and how all ranks learn of it.

    check = BreachCheck(rules, framework, guard)
    check.connect(patches)
    check.code(step)                             # of this rank's breaches, 0 for none: one number of an observation
    check.agree(arrived)                         # on all ranks alike, once per gathered observation

While the ranks' numbers stay as they are, nothing is exchanged. Where one is new, all ranks have read so, and those
that found the same let their first rank speak: its breaches travel as JSON text. That is a collective of two calls,
``MOST_QUESTIONS`` times per run at most.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ds_silent.capture.untrained import Unlike
from ds_silent.distributed.guard import CollectiveGuard
from ds_silent.distributed.parts import outvoted, parts_of_numbers, ranks_of
from ds_silent.exchange.collectives import Arrived, gather_on_host
from ds_silent.framework import Framework
from ds_silent.maths.fingerprint import short_hash
from ds_silent.patches import Patches
from ds_silent.preflight.comparison import EveryRank
from ds_silent.rules.rule import Breach, Rule
from ds_silent.text import named

logger = logging.getLogger("ds_silent")
MOST_QUESTIONS = 64  # per run
SPEAKERS, TEXT_BYTES = 4, 8192  # of one question
_ARTICLES = ("A", "An", "Each", "Every", "No", "The")
KEY = "rule:"
"""How the keys of what rules find begin."""
_REMEMBERED = 4  # measured steps; an observation is read one or two steps later


class BreachCheck:
    """Hold this rank's rules, and what all ranks know of each other's breaches."""

    def __init__(self, rules: Sequence[Rule], framework: Framework, guard: CollectiveGuard):
        self._rules, self._framework, self._guard = list(rules), framework, guard
        self._found: dict[int, tuple[Breach, ...]] = {}  # by step
        self._asked: tuple[float, ...] = ()
        self._answer: tuple[Unlike, ...] = ()
        self._questions = 0

    def connect(self, patches: Patches) -> None:
        """Let each rule register its hooks."""
        for rule in list(self._rules):
            self._safely(rule, rule.connect, patches, partial(self._safely, rule))

    def code(self, step: int) -> float:
        """Return a short hash of this rank's breaches at ``step``; 0 where there are none."""
        broken = [self._safely(rule, rule.breaches) or () for rule in list(self._rules)]
        self._found.pop(step, None)  # a step that is taken again is the newest
        self._found[step] = found = tuple(breach for breaches in broken for breach in breaches)
        while len(self._found) > _REMEMBERED:
            del self._found[next(iter(self._found))]
        return _code_of(found)

    def _safely(self, rule: Rule, function: Any, *arguments: Any, **keywords: Any) -> Any:
        """Run a part of a rule; one that raises is no rule any more."""
        try:
            if rule in self._rules:
                return function(*arguments, **keywords)
        except Exception as error:
            self._rules.remove(rule)
            kind = type(rule).__name__
            logger.warning("ds_silent: the rule %s is not checked any more: %s: %s", kind, type(error).__name__, error)
        return None

    def agree(self, arrived: Arrived) -> tuple[Unlike, ...]:
        """Return what rules have found, with the ranks that found it.

        Every rank calls it with the same observations, at the same step: where the ranks' numbers are others than
        before, it is a collective that waits.
        """
        codes = self._guard.agreed(lambda: self._news(arrived))
        if codes is not None:
            self._asked, self._questions = codes, self._questions + any(codes)
            self._answer = ()
            if any(codes) and self._questions <= MOST_QUESTIONS:
                self._answer = self._ask(arrived.step)
        return self._answer

    def _news(self, arrived: Arrived) -> tuple[float, ...] | None:
        codes = tuple(arrived.known.code.breaches.tolist())
        return None if codes == self._asked else codes

    def _ask(self, step: int) -> tuple[Unlike, ...]:
        guard, group, device = self._guard, self._framework.group, self._framework.device
        own = guard.local(self._found.get, step) or ()
        mine = torch.tensor([int(guard.local(_code_of, own) or 0.0)], dtype=torch.int32).to(device)
        codes = gather_on_host(mine, group, guard.collective).reshape(-1).long()
        parts = [part for part in parts_of_numbers(codes.numpy()) if codes[part[0]] != 0][:SPEAKERS]
        if not parts:
            return ()
        text = guard.local(text_of, own) or "[]"
        everybody, speakers = EveryRank(group, device, guard.collective), [part[0] for part in parts]
        spoken = everybody.texts([text] * len(parts), speakers, TEXT_BYTES)
        return guard.local(unlike_of, spoken, parts, len(codes)) or ()

    def unasked(self, arrived: Arrived) -> tuple[Unlike, ...]:
        """Return what this rank knows by itself, where the ranks come together no more; nothing that is told."""
        codes, group = self._news(arrived), self._framework.group
        ranks = () if codes is None or len(set(codes)) == 1 else (dist.get_rank(group),)
        own = self._found.get(arrived.step, ()) if codes else ()
        return tuple(_one(breach, ranks, dist.get_world_size(group)) for breach in own if not breach.unlike)


def _code_of(breaches: Sequence[Breach]) -> float:
    return short_hash(sorted(breach.key for breach in breaches)) if breaches else 0.0


def text_of(breaches: Sequence[Breach]) -> str:
    """Write as many of the breaches as there is room for."""
    kept = [
        {**asdict(one), "where": one.where[:100], "message": one.message[:800], "remedy": one.remedy[:400]}
        for one in breaches
    ]
    while len(text := json.dumps(kept)) > TEXT_BYTES:
        kept.pop()
    return text


def unlike_of(spoken: Sequence[str], parts: Sequence[tuple[int, ...]], world_size: int) -> tuple[Unlike, ...]:
    """Word what the first rank of each part has said of it."""
    found: dict[str, tuple[Breach, set[int]]] = {}
    for text, part in zip(spoken, parts, strict=True):
        for told in json.loads(text):
            breach = Breach(**told | {"effects": tuple(told["effects"])})
            found.setdefault(breach.key, (breach, set()))[1].update(part)
    told = [one for one in found.values() if len(one[1]) == world_size or not one[0].alike_on_all]
    compared: dict[str, list[tuple[Breach, set[int]]]] = {}
    for one in told:
        compared.setdefault(one[0].unlike, []).append(one)
    by_itself = [_one(breach, tuple(sorted(ranks)), world_size) for breach, ranks in compared.pop("", [])]
    unlike = [_unlike(held[0][0], [ranks for _, ranks in held], world_size) for held in compared.values()]
    return *by_itself, *(one for one in unlike if one is not None)


def _unlike(breach: Breach, ranks: list[set[int]], world_size: int) -> Unlike | None:
    """Word what is not the same on all ranks; blamed are those that differ from more than half of all.

    Where nobody is to blame it is a note: each rank may have its own. None where it is the same on all, or only some
    ranks have found the thing.
    """
    parts = tuple(sorted((tuple(sorted(part)) for part in ranks), key=lambda part: (-len(part), part)))
    everybody = sum(map(len, parts)) == world_size
    if len(parts) < (2 if everybody else SPEAKERS):
        return None
    blamed = outvoted(parts) if everybody else ()
    one, shown = _one(breach, blamed, world_size), "; ".join([*map(ranks_of, parts), *(() if everybody else ("…",))])
    severity = breach.severity if blamed else "info"
    shown = f"each has its own ({shown})" if everybody and len(parts) == world_size else shown
    return replace(one, key=KEY + breach.unlike, message=f"{breach.message}: {shown}.", severity=severity)


def _one(breach: Breach, ranks: tuple[int, ...], world_size: int) -> Unlike:
    """Add the ranks that found it. More than half of all are not blamed: the others' part may not show it."""
    everybody = len(ranks) in (0, world_size)
    first, rest = breach.message.split(" ", 1)
    spoken = f"{first.lower() if first in _ARTICLES else first} {rest}"
    message = breach.message if everybody else f"On {named(ranks, world_size)}: {spoken}"
    blamed = ranks if 2 * len(ranks) <= world_size else ()
    shared = {name: value for name, value in vars(breach).items() if name not in ("alike_on_all", "unlike")}
    return Unlike(**shared | {"key": KEY + breach.key, "message": message}, ranks=blamed)
