"""A picture with one byte per pixel: a table of numbers as colours that suit a light and a dark page. Pure."""

from __future__ import annotations

import base64
import io

import numpy as np
import numpy.typing as npt
from PIL import Image

_SIDES = 126  # shades on each side of nothing
_NOT_A_NUMBER = 2 * _SIDES + 1
_EMPTY = 2 * _SIDES + 2
BELOW, ABOVE, BROKEN = (38, 110, 190), (214, 88, 28), (190, 24, 120)


def diverging(values: npt.NDArray[np.float32], limit: float) -> bytes:
    """PNG of (R, C): transparent at 0, stronger towards ``limit``; infinities in a colour of their own, NaN empty."""
    with np.errstate(all="ignore"):
        share = np.clip(np.nan_to_num(values / max(limit, 1e-30), nan=0.0, posinf=1.0, neginf=-1.0), -1.0, 1.0)
    index = (np.rint(share * _SIDES) + _SIDES).astype(np.uint8)
    index[np.isinf(values)] = _NOT_A_NUMBER
    index[np.isnan(values)] = _EMPTY
    shades = [(*BELOW, _alpha(_SIDES - n)) for n in range(_SIDES)]
    shades += [(0, 0, 0, 0)] + [(*ABOVE, _alpha(n + 1)) for n in range(_SIDES)] + [(*BROKEN, 255), (0, 0, 0, 0)]
    return _png(index, shades)


def sequential(values: npt.NDArray[np.float32], low: float, high: float) -> bytes:
    """PNG of (R, C): transparent at ``low``, full at ``high``."""
    span = high - low
    with np.errstate(all="ignore"):
        share = (values - np.float32(low)) / np.float32(span if span > 0 else 1.0)
    return diverging(np.where(np.isinf(values), values, np.clip(share, 0.0, 1.0)).astype(np.float32), 1.0)


def data_uri(png: bytes) -> str:
    """For an image's address."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _alpha(n: int) -> int:
    share: float = (n / _SIDES) ** 0.8
    return round(255 * share)


def _png(index: npt.NDArray[np.uint8], shades: list[tuple[int, int, int, int]]) -> bytes:
    rows, columns = index.shape
    image = Image.frombytes("P", (columns, rows), index.tobytes())
    image.putpalette(b"".join(bytes(shade[:3]) for shade in shades))
    held = io.BytesIO()
    image.save(held, "PNG", transparency=bytes(shade[3] for shade in shades), bits=8, compress_level=9)
    return held.getvalue()
