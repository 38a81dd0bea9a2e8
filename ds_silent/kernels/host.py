"""Functions that read a gradient on the CPU in one pass, compiled from ``host.c`` at first use.

    functions = compiled()                       # NotCompiled: no compiler, or none that can
    functions.reader(torch.float32, None)        # reads a tensor, see host.c; None: not of this dtype
    functions.checksums(tensors, keys)           # int64 (n,)

The machine's C compiler takes about a second, once per user: the library stays in ``TORCH_EXTENSIONS_DIR``, or in the
user's cache. It has code for several kinds of processor and chooses when it is loaded, so machines may share it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import DEVNULL, CalledProcessError, SubprocessError, run

import torch
from torch import Tensor

from ds_silent.maths.mixing import ROW, word_keys

SOURCE = Path(__file__).with_name("host.c")
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared")
SECONDS = 60  # at most, of the compiler
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_SIZE, _ADDRESS = ctypes.c_int64, ctypes.c_void_p
_READER = (_ADDRESS, _ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE, ctypes.c_float, _ADDRESS)

Read = Callable[..., None]
Touched = ctypes.Array[ctypes.c_uint8]
"""Which tables have been written to, 1 or 0."""


class NotCompiled(Exception):
    """There is no such library here; the message says why."""


class Functions:
    """The functions of one library."""

    def __init__(self, library: ctypes.CDLL):
        self._readers: dict[tuple[torch.dtype, torch.dtype | None], Read] = {}
        for dtype, name in _NAMES.items():
            self._readers[dtype, None] = library[f"read_{name}"]
            self._readers.update({(dtype, onto): library[f"read_{name}_onto_{_NAMES[onto]}"] for onto in _NAMES})
        for reader in self._readers.values():
            reader.argtypes, reader.restype = _READER, None  # type: ignore[attr-defined]
        self._checksums = library.checksums
        self._checksums.argtypes = (_SIZE, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _ADDRESS)
        self._checksums.restype = None
        self._fold = library.fold
        self._fold.argtypes, self._fold.restype = (_SIZE, _ADDRESS, _ADDRESS, _SIZE, _SIZE, _ADDRESS), None
        self._word_keys = word_keys()

    def reader(self, dtype: torch.dtype, previous: torch.dtype | None) -> Read | None:
        """Return the function for values of a dtype, and the dtype of what they are added to before."""
        return self._readers.get((dtype, previous))

    def fold(self, tables: Tensor, touched: Touched, size: int) -> Tensor:
        """Fold the tables, (n, a multiple of size) fp32, that were touched, and make them zero; (n, size) sketches."""
        sketches = torch.zeros(len(tables), size)
        self._fold(len(tables), touched, tables.data_ptr(), tables.shape[1], size, sketches.data_ptr())
        return sketches

    def checksums(self, tensors: Sequence[Tensor | None], row_keys: Tensor) -> Tensor:
        """int64 (n,) checksums of the bits of contiguous tensors, see :mod:`ds_silent.kernels.checksums`; 0 for None.

        Args:
            row_keys: int64, one for each row of the longest.
        """
        found = torch.empty(len(tensors), dtype=torch.int64)
        addresses = (_ADDRESS * len(tensors))(*(None if one is None else one.data_ptr() for one in tensors))
        sizes = (_SIZE * len(tensors))(*(0 if one is None else one.nbytes for one in tensors))
        keys = self._word_keys.data_ptr(), row_keys.data_ptr()
        self._checksums(len(tensors), addresses, sizes, ROW, *keys, found.data_ptr())
        return found


@functools.cache
def compiled() -> Functions:
    """Return the functions; compile them where nobody has.

    Raises:
        NotCompiled: there is no compiler, it fails, or what it makes cannot be loaded.
    """
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    source = SOURCE.read_bytes()
    how = "\0".join((*compiler, *FLAGS, platform.machine(), platform.system())).encode()
    name = f"host-{hashlib.sha256(source + how).hexdigest()[:16]}.so"
    try:
        library = _cache() / name
        if not _ours(library):
            _compile(compiler, library)
        return Functions(ctypes.CDLL(str(library)))
    except CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines() or [f"status {error.returncode}"]
        raise NotCompiled(f"{compiler[0]} failed: {said[0][:120]}") from error
    except (OSError, AttributeError, SubprocessError) as error:
        raise NotCompiled(f"{type(error).__name__}: {error}".splitlines()[0][:120]) from error


def _cache() -> Path:
    """Return a directory that only this user can write to."""
    own = os.environ.get("TORCH_EXTENSIONS_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(own) / "ds_silent"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def _ours(library: Path) -> bool:
    """Tell whether it is there and nobody else can have written it."""
    try:
        found = library.stat()
    except FileNotFoundError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _compile(compiler: Sequence[str], library: Path) -> None:
    """Compile to another name first: ranks that come at once each make the same file."""
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        made = Path(directory) / library.name
        command = [*compiler, *FLAGS, "-o", str(made), str(SOURCE)]
        for more in ((), ("-DONE_CPU",)):  # an older compiler does not know all kinds of processor
            try:
                run([*command, *more], check=True, capture_output=True, text=True, timeout=SECONDS, stdin=DEVNULL)
                break
            except CalledProcessError:
                if more:
                    raise
        made.chmod(0o700)
        made.replace(library)
