"""Functions that read a gradient on the CPU in one pass, compiled from ``host.c`` at first use.

    functions = compiled()                       # NotCompiled: no compiler, or none that can
    functions.readers[torch.float32, None]       # reads a tensor, see host.c; absent: not of this dtype
    functions.checksums(tensors, sizes, keys)    # int64 (n,); None: torch reads these

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
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, CalledProcessError, run

import torch
from torch import Tensor
from torch.nn import Parameter

from ds_silent.maths.mixing import ROW, word_keys

SOURCE = Path(__file__).with_name("host.c")
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared")
SECONDS = 60  # at most, of the compiler
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_SIZE, _ADDRESS = ctypes.c_int64, ctypes.c_void_p
_READER = (_ADDRESS, _ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE, ctypes.c_float, _ADDRESS)

Read = Callable[..., None]
Touched = ctypes.Array[ctypes.c_uint8]
"""What has been written to, a byte for each table: bit b for its b-th k elements."""


def address_of(values: Tensor) -> int:
    """Return where the elements lie one behind the other, on the CPU; 0 where they do not, or there are none.

    A subclass may wrap another tensor, a negated view keeps its tensor's elements, and an efficient zero has none.
    """
    plain = type(values) in (Tensor, Parameter) and values.device.type == "cpu" and not values.is_neg()
    return values.data_ptr() if plain and values.is_contiguous() else 0


class NotCompiled(Exception):
    """There is no such library here; the message says why."""


class Functions:
    """The functions of one library.

    Attributes:
        readers: by the dtype of the values, and of what they are added to before.
    """

    def __init__(self, library: ctypes.CDLL):
        self.readers: dict[tuple[torch.dtype, torch.dtype | None], Read] = {}
        for dtype, name in _NAMES.items():
            self.readers[dtype, None] = library[f"read_{name}"]
            self.readers.update({(dtype, onto): library[f"read_{name}_onto_{_NAMES[onto]}"] for onto in _NAMES})
        for reader in self.readers.values():
            reader.argtypes, reader.restype = _READER, None  # type: ignore[attr-defined]
        self._checksums = library.checksums
        self._checksums.argtypes = (_SIZE, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _ADDRESS)
        self._checksums.restype = None
        self._fold = library.fold
        self._fold.argtypes, self._fold.restype = (_SIZE, _ADDRESS, _ADDRESS, _SIZE, _SIZE, _ADDRESS), None
        self._word_keys = word_keys()

    def fold(self, tables: Tensor, touched: Touched, size: int) -> Tensor:
        """Fold what was touched of tables, (n, up to 8 size) fp32, and make it zero; (n, size) sketches."""
        sketches = torch.empty(len(tables), size)
        self._fold(len(tables), touched, tables.data_ptr(), tables.shape[1], size, sketches.data_ptr())
        return sketches

    def checksums(self, tensors: Sequence[Tensor | None], sizes: Sequence[int], row_keys: Tensor) -> Tensor | None:
        """int64 (n,) checksums of the bits of tensors, see :mod:`ds_silent.kernels.checksums`; 0 for None.

        Args:
            sizes: bytes of each.
            row_keys: int64, one for each row of the longest.

        Returns:
            None where one has no address or another size.
        """
        at = [None if one is None else address_of(one) for one in tensors]
        if any(
            one is not None and (size != one.nbytes or (size and not address))
            for one, size, address in zip(tensors, sizes, at, strict=True)
        ):
            return None
        found = torch.empty(len(tensors), dtype=torch.int64)
        addresses, lengths = (_ADDRESS * len(at))(*at), (_SIZE * len(at))(*sizes)
        keys = self._word_keys.data_ptr(), row_keys.data_ptr()
        self._checksums(len(at), addresses, lengths, ROW, *keys, found.data_ptr())
        return found


@functools.cache
def compiled() -> Functions:
    """Return the functions; compile them where nobody has.

    Raises:
        NotCompiled: there is no compiler, it fails, or what it makes cannot be loaded.
    """
    try:
        return Functions(ctypes.CDLL(str(_library())))
    except CalledProcessError as error:
        said = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines()
        raise NotCompiled(f"{error.cmd[0]} failed: {(said or [f'status {error.returncode}'])[0][:120]}") from error
    except Exception as error:  # whatever is odd here, torch reads as well
        raise NotCompiled(f"{type(error).__name__}: {error}".splitlines()[0][:120]) from error


def _library() -> Path:
    """Return the library's file; compile it where there is none."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    how = "\0".join((*compiler, *FLAGS, platform.machine(), platform.system())).encode()
    name, directory = f"host-{_hash(SOURCE.read_bytes() + how)}", _cache()
    for library in directory.glob(f"{name}-*.so"):
        if _is_whole(library):
            return library
    return _compile(compiler, directory, name)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _cache() -> Path:
    """Return a directory that only this user can write to.

    Raises:
        OSError: others can, or it cannot be made.
    """
    own = os.environ.get("TORCH_EXTENSIONS_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(own) / "ds_silent"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(directory):
        raise PermissionError(f"others may write to {directory}")
    return directory


def _is_ours(path: Path) -> bool:
    found = path.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _is_whole(library: Path) -> bool:
    """Tell whether nobody else can have written it, and nothing is cut off: its name ends with its content's hash."""
    return library.is_file() and _is_ours(library) and library.stem.endswith(f"-{_hash(library.read_bytes())}")


def _compile(compiler: Sequence[str], directory: Path, name: str) -> Path:
    """Compile to another name first: ranks that come at once each make a file of their own."""
    with tempfile.TemporaryDirectory(dir=directory) as working:
        made = Path(working) / "made.so"
        command = [*compiler, *FLAGS, "-o", str(made), str(SOURCE)]
        compiles = partial(run, check=True, capture_output=True, text=True, errors="replace", stdin=DEVNULL)
        for more in ((), ("-DONE_CPU",)):  # an older compiler does not know all kinds of processor
            try:
                compiles([*command, *more], timeout=SECONDS)
                break
            except CalledProcessError:
                if more:
                    raise
        made.chmod(0o700)
        return made.replace(directory / f"{name}-{_hash(made.read_bytes())}.so")
