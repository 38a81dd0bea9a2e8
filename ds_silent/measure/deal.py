"""Find out whether rows are dealt to the ranks at random in each epoch, or each rank takes its own again.

    follower = DealFollower()
    follower.rows.step(values, owners, ranks)                         # the rows of an observation, if known
    follower.step(words, deal, samples, step_rows, rows_in_epoch)     # DataDealt("random", by="...")

*By the samplers*, from the first step on: all ranks must say the same. Each sends a hash of the order that its sampler
deals (:class:`Deal`); if one sends none or another, the deal is unknown. A sampler's order is new until an epoch's rows
were taken by it; if it goes on after that, each rank gets the rows it had.

*By the rows*, once they come again: they decide, whatever the samplers say. Two rows that a rank takes one after the
other were with one rank before with probability 1/N if the deal is random; with shards always, and also if whole files
go from rank to rank, though no row stays. See :class:`RowOwners`.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ds_silent.capture.deals import Deal
from ds_silent.exchange.row_ids import Ids
from ds_silent.maths.mixing import mixed_ids
from ds_silent.measure.coverage import largest_hash
from ds_silent.measure.evidence import LONG_TRAIL, Trail
from ds_silent.records import DataDealt

SLOTS = 1 << 14
LOG_ERROR = math.log(1e8)
"""A wrong decision by the rows comes at most once in 10^8 pairs or rows."""
_ALL = 0.9  # of the rows
IN_BLOCKS = 1 / 8
"""A deal is random if, beyond chance, fewer than this share of pairs come together again."""
_UNLIKE = "the ranks' samplers are not the same"
_ALWAYS, _MOSTLY = 0.99, 0.75


class DealFollower:
    """Follow the deal, on the writing rank."""

    def __init__(self) -> None:
        self.newest = DataDealt()  # as known at the newest step
        self.declared: DataDealt | None = None  # as the user states it, which stands
        self._word = 0.0  # of all samplers; ``_since``: rows taken when it came
        self._since = 0
        self._one_order = False  # all ranks' samplers deal shares of it
        self.rows = RowOwners()  # which rank took which row

    def step(self, words: Tensor, deal: Deal, samples: int, step_rows: int, rows_in_epoch: int | None) -> DataDealt:
        """Take in a step: (N,) hash from each rank, this rank's deal, the rows taken so far with this step's."""
        self._one_order = len(words) > 1 and bool((words == words[0]).all()) and float(words[0]) != 0.0
        said = self._by_samplers(words, deal, samples, step_rows, rows_in_epoch)
        self.newest = self.declared or (said if len(words) < 2 else self._by_rows(said, deal))
        return self.newest

    def deals_each_once(self, rows: int, samples: int) -> bool:
        """Tell whether the samplers of all ranks have dealt one order of all rows for the newest ``rows`` of them."""
        return self._one_order and samples - self._since >= rows

    def _by_rows(self, said: DataDealt, deal: Deal) -> DataDealt:
        rows = self.rows
        if rows.own.decided:
            return said if said.dealt == "own-shard" else DataDealt("own-shard", "rows come again on the rank they had")
        if rows.blocks.decided and said.dealt != "own-shard":
            return DataDealt("unknown", "rows go from rank to rank in blocks")
        if rows.random.decided and not deal.by_content:
            return said if said.dealt == "random" else DataDealt("random", "rows change hands at random")
        return said

    def _by_samplers(
        self, words: Tensor, deal: Deal, samples: int, step_rows: int, rows_in_epoch: int | None
    ) -> DataDealt:
        if not len(words) > 1:
            return DataDealt("unknown", "one rank takes all rows")
        word = float(words[0])
        if word != self._word:
            self._word, self._since = word, samples - step_rows
        if bool((words < 0.0).all()):
            return DataDealt("own-shard", deal.by)
        if not bool((words == word).all()):
            known = bool((words != 0.0).all())
            return DataDealt("unknown", _UNLIKE if known else "not all ranks' samplers are known")
        if word == 0.0:
            return DataDealt("unknown", deal.by)
        if deal.by_epoch and rows_in_epoch is not None and samples - self._since > rows_in_epoch + step_rows:
            return DataDealt("own-shard", f"{deal.by}, but its epoch does not advance")
        return DataDealt("random", deal.by)

    def state_dict(self) -> dict[str, Any]:
        return {"word": self._word, "since": self._since, "rows": self.rows.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._word, self._since = float(state["word"]), int(state["since"])
        self.rows.load_state_dict(state["rows"])


@dataclass
class LikelihoodRatio:
    """Add up the log of a likelihood ratio, never below 0: it reaches LOG_ERROR once in e^LOG_ERROR by chance."""

    log: float = 0.0
    decided: bool = False

    def add(self, gain: float) -> None:
        """Add ``gain``; a decision ends when half its evidence is lost."""
        self.log = min(LOG_ERROR, max(0.0, self.log + gain))
        self.decided = self.log >= LOG_ERROR - 1e-9 or (self.decided and self.log >= LOG_ERROR / 2)


class RowOwners:
    """Remember which rank took a row last, for a sample of rows in constant memory: 12 bytes for each of SLOTS.

    Rows are kept whose 64-bit hash starts with m zero bits, where m grows with the data; each has one slot, which
    another row may take. A row that comes again in the very next observation is left out, and so is every row until
    rows have come again on most ranks: a loader that is stuck, or goes to and fro between a few batches, does not show
    that the others' rows are shards.

    A pair is two rows that a rank took one after the other; no row is in two pairs. If x of M pairs were with one rank
    before, with r = 1/N and q = r + (1 - r) IN_BLOCKS, the evidence for a random deal is (r/q)^x ((1-r)/(1-q))^(M-x):
    under any deal with a share of at least q its expectation is at most 1. The evidence that rows stay with their
    rank, or go from rank to rank in blocks, is (0.99/0.75)^x (0.01/0.25)^(M-x), of rows or of pairs.
    """

    def __init__(self) -> None:
        self._start(0)

    def _start(self, ranks: int) -> None:
        self.random, self.own, self.blocks = LikelihoodRatio(), LikelihoodRatio(), LikelihoodRatio()
        self.own_again: float | None = None  # share of the newest rows that came before, which the same rank had taken
        self.shared: Ids | None = None  # (N,) of the newest rows, those that another rank took before; of both ranks
        self._ranks, self._level, self._count = ranks, 0, 0
        self._hashes = np.zeros(SLOTS, dtype=np.uint64)
        self._owners = np.full(SLOTS, -1, dtype=np.int32)  # -1: nothing is here
        self._came = np.zeros(SLOTS, dtype=np.int64)  # observation's number
        self._numbers = np.zeros(SLOTS, dtype=np.int64)  # of the row, among those of its rank
        self._taken = np.zeros(ranks, dtype=np.int64)  # rows so far
        self.trails: dict[int, Trail] = {}  # by the rank that follows
        self._begun = np.zeros(ranks, dtype=bool)  # ranks whose rows have come again
        self._single = np.full(ranks, -1, dtype=np.int64)  # earlier owner of each rank's newest unpaired row

    def step(self, values: Ids, owners: Ids, ranks: int) -> None:
        """Take in all ranks' rows of an observation or a sample of them, and each row's rank; each rank's in order."""
        if ranks != self._ranks:
            self._start(ranks)
        self._count += 1
        hashes = mixed_ids(values)
        kept = hashes <= largest_hash(self._level)
        numbers = self._numbered(owners)[kept]
        hashes, owners = hashes[kept], owners[kept]
        places = (hashes & np.uint64(SLOTS - 1)).astype(np.int64)
        again = (self._hashes[places] == hashes) & (self._owners[places] >= 0)
        before = self._owners[places].astype(np.int64)
        self.own_again = float((before == owners)[again].mean()) if again.any() else None
        others = again & (before != owners)
        self.shared = np.bincount(np.concatenate([owners[others], before[others]]), minlength=ranks)
        self._follow_trails(owners, numbers, np.where(again, before, -1), self._numbers[places])
        later = again & (self._came[places] < self._count - 1)
        self._begun[owners[later]] = True
        if ranks > 1 and later.any() and 2 * int(self._begun.sum()) > ranks:
            self._weigh(before[later], owners[later])
        self._hashes[places], self._owners[places], self._came[places] = hashes, owners, self._count
        self._numbers[places] = numbers
        while int((self._owners >= 0).sum()) > SLOTS // 2:
            self._level += 1
            self._owners[self._hashes > largest_hash(self._level)] = -1

    def _numbered(self, owners: Ids) -> Ids:
        """Number the rows of each rank, from its first one on."""
        order = np.argsort(owners, kind="stable")
        numbers = np.empty(len(owners), dtype=np.int64)
        numbers[order] = np.arange(len(owners)) - np.searchsorted(owners[order], owners[order])
        numbers += self._taken[owners]
        self._taken += np.bincount(owners, minlength=len(self._taken))
        return numbers

    def _follow_trails(self, owners: Ids, numbers: Ids, before: Ids, earlier: Ids) -> None:
        """Look which ranks take all rows as far behind another rank, whose own are new; later they may come again.

        ``before``: ranks that took the rows last, -1 for new ones; ``earlier``: as which of those ranks' rows.
        """
        rows = np.bincount(owners, minlength=len(self._taken))
        new = np.bincount(owners[before < 0], minlength=len(rows))
        others = np.bincount(owners[(before >= 0) & (before != owners)], minlength=len(rows))
        found = {}
        for rank in np.flatnonzero((rows >= 2) & (others >= _ALL * rows)).tolist():
            own = owners == rank
            leaders, times = np.unique(before[own], return_counts=True)
            leader = int(leaders[times.argmax()])
            lags, times = np.unique((numbers - earlier)[own & (before == leader)], return_counts=True)
            trail = self.trails.get(rank)
            sure = trail is not None and trail.leader == leader and trail.times >= LONG_TRAIL
            if times.max() >= _ALL * rows[rank] and (sure or new[leader] >= _ALL * rows[leader]):
                found[rank] = leader, int(lags[times.argmax()])
        for rank in {*found, *self.trails}:
            leader, lag, count = self.trails.get(rank, Trail(-1, 0, 0))
            here = found.get(rank)
            if here is not None and here[0] == leader:
                count, lag = min(2 * LONG_TRAIL, count + 1), here[1]
            elif here is not None and count < LONG_TRAIL:
                (leader, lag), count = here, 1
            elif rows[rank]:
                count -= 1
            self.trails[rank] = Trail(leader, lag, count)
        self.trails = {rank: trail for rank, trail in self.trails.items() if trail.times > 0}

    def _weigh(self, before: Ids, now: Ids) -> None:
        stayed = int((before == now).sum())
        self.own.add(_log_ratio(stayed, len(now), _ALWAYS, _MOSTLY))
        waiting = np.flatnonzero(self._single >= 0)
        ranks, had = np.concatenate([waiting, now]), np.concatenate([self._single[waiting], before])
        order = np.argsort(ranks, kind="stable")
        ranks, had = ranks[order], had[order]
        begins = np.searchsorted(ranks, ranks)
        first = np.flatnonzero((np.arange(len(ranks)) - begins) % 2 == 0)
        whole = first[(first + 1 < len(ranks)) & (ranks[np.minimum(first + 1, len(ranks) - 1)] == ranks[first])]
        alone = np.setdiff1d(first, whole)
        self._single[:] = -1
        self._single[ranks[alone]] = had[alone]
        same, chance = int((had[whole] == had[whole + 1]).sum()), 1.0 / self._ranks
        self.random.add(_log_ratio(same, len(whole), chance, chance + (1.0 - chance) * IN_BLOCKS))
        self.blocks.add(_log_ratio(same, len(whole), _ALWAYS, _MOSTLY))

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values, at most 0.15 MB of text."""
        kept = np.flatnonzero(self._owners >= 0)
        return {
            "ranks": self._ranks,
            "level": self._level,
            "evidence": [[one.log, one.decided] for one in (self.random, self.own, self.blocks)],
            "hashes": base64.b64encode(self._hashes[kept].astype("<u8").tobytes()).decode("ascii"),
            "owners": base64.b64encode(self._owners[kept].astype("<i4").tobytes()).decode("ascii"),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; a damaged one raises a ValueError."""
        try:
            hashes = np.frombuffer(base64.b64decode(state["hashes"], validate=True), dtype="<u8")
            owners = np.frombuffer(base64.b64decode(state["owners"], validate=True), dtype="<i4")
            random, own, blocks = (LikelihoodRatio(float(log), bool(decided)) for log, decided in state["evidence"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"the ranks of the rows in the checkpoint cannot be read ({error})") from error
        if len(hashes) != len(owners):
            raise ValueError("the ranks of the rows in the checkpoint are damaged: there are more or fewer than rows")
        self._start(int(state["ranks"]))
        self._level = int(state["level"])
        self.random, self.own, self.blocks = random, own, blocks
        places = (hashes & np.uint64(SLOTS - 1)).astype(np.int64)
        self._hashes[places], self._owners[places] = hashes, owners
        self._count = 1  # kept rows count as older than the last observation


def _log_ratio(count: int, of: int, rate: float, against: float) -> float:
    return count * math.log(rate / against) + (of - count) * math.log((1.0 - rate) / (1.0 - against))
