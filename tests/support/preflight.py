"""The outcome of a preflight, from all that all ranks have: as if every rank's hashes and texts were gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_silent.preflight.comparison import PreflightOutcome, Said, judged
from ds_silent.preflight.items import Hashes, Item


def outcome_of(
    items: Sequence[Item], hashes: Hashes, texts: Mapping[int, Sequence[str]] | None = None
) -> PreflightOutcome:
    """Which items are as expected, and who is the odd one out.

    Args:
        items: one rank's, in the order that is the same everywhere.
        hashes: int32 (N, len(items), 2), every rank's.
        texts: by index of an item, what each of the N ranks shows.
    """
    different = (hashes != hashes[0]).any(axis=(0, 2)).nonzero()[0].tolist()
    said = {index: Said.of(hashes[:, index]) for index in different}
    shown = {index: values for index, values in (texts or {}).items() if index in said}
    of_parts = {index: [values[part[0]] for part in said[index].parts] for index, values in shown.items()}
    return judged(items, len(hashes), said, of_parts)
