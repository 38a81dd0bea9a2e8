"""What a resume restores of a detector: attributes by name, as JSON values."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class Stored:
    """Save and restore the attributes ``_name`` of each ``name`` in ``stored``: numbers, arrays, tuples, rank -> step.

    A name that an older version did not save stays as it is.
    """

    stored: tuple[str, ...] = ()

    def state_dict(self) -> Any:
        """Return what continues it after a resume, as JSON values."""
        return {name: _saved(getattr(self, f"_{name}")) for name in self.stored} if self.stored else None

    def load_state_dict(self, state: Any) -> None:
        """Continue from :meth:`state_dict`."""
        for name in self.stored:
            if name in state:
                setattr(self, f"_{name}", _restored(getattr(self, f"_{name}"), state[name]))


def listed(values: npt.NDArray[Any]) -> Any:
    """Return an array as lists, with None for what is not finite: JSON has no NaN."""
    whole = values.astype(object)
    whole[~np.isfinite(values)] = None
    return whole.tolist()


def unlisted(values: Any) -> npt.NDArray[np.float64]:
    """Return the array of :func:`listed`, with minus infinity for None: the logarithm of no evidence."""
    array = np.array(values, dtype=np.float64)
    return np.where(np.isnan(array), -np.inf, array)


def _saved(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return listed(value)
    if isinstance(value, dict):
        return sorted(value.items())
    return list(value) if isinstance(value, tuple) else value


def _restored(before: Any, state: Any) -> Any:
    if isinstance(before, np.ndarray):
        array = unlisted(state).astype(before.dtype)
        return array if array.ndim == before.ndim else array.reshape(-1, *before.shape[1:])
    if isinstance(before, dict):
        return {int(key): int(value) for key, value in state}
    return tuple(state) if isinstance(before, tuple) else state
