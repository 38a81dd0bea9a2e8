"""``python -m ds_silent train.py ...``: run an unchanged script with the ``silent_consistency`` block honoured.

    deepspeed --num_gpus 8 --module ds_silent train.py ...      # the launcher puts --local_rank=N before the script
    torchrun --nproc_per_node 8 -m ds_silent train.py ...
    python -m ds_silent -m package.module ...                   # as Python's own -m
    python -m ds_silent --silent-consistency-config block.json pretrain_gpt.py ...

The script's own ``deepspeed.initialize`` becomes :func:`ds_silent.initialize`. Whatever else it trains - under
``DistributedDataParallel``, ``fully_shard`` or Megatron-core - is attached (:mod:`ds_silent.frameworks.auto_attach`),
with the block of the file named before the script, or in the environment variable SILENT_CONSISTENCY_CONFIG, or all
defaults. A ds_config without a block gets that of the file too.

Nothing else changes: ``__main__``, ``sys.argv`` and ``sys.path`` are what Python itself would make of the script, so
that data-loader workers find what it defines.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ds_silent.extras import is_first
from ds_silent.integrations import BLOCK_FILE

if TYPE_CHECKING:
    from ds_silent.patches import Patches

_CONFIG = "--silent-consistency-config"
_USAGE = f"usage: python -m ds_silent [{_CONFIG} FILE] [-m package.module | train.py] [args]"
_FIRST_SPEAKS = 3.0  # seconds
_LOCAL_RANK = ("--local_rank", "--local-rank")  # DeepSpeed's launcher; torch.distributed.launch


@dataclass(frozen=True)
class _Target:
    """What is to be run."""

    name: str
    is_module: bool
    arguments: tuple[str, ...]  # as plain ``deepspeed train.py`` would hand them over: the launcher's own come first
    config: str | None = None  # the file that holds the block


def main() -> None:
    target = _target_of(sys.argv[1:])
    patches = _take_places(
        target.config or os.environ.get(BLOCK_FILE) or None, _CONFIG if target.config else BLOCK_FILE
    )
    try:
        if target.is_module:
            _run_module(target)
        else:
            _run_script(target)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            atexit.unregister(_say_if_nothing_was_observed)  # it has said why itself
        raise
    finally:
        patches.undo()


def _take_places(file: str | None, called: str) -> Patches:
    """Stand in for what a script calls to make a training; a file that is no block ends all with one sentence.

    Args:
        called: what has named the file.
    """
    from ds_silent.config import ConfigError
    from ds_silent.observing.observe import given_block
    from ds_silent.patches import Patches

    try:
        block = given_block(file, called)
    except ConfigError as error:
        if is_first():
            sys.exit(f"ds_silent: {error}")
        time.sleep(_FIRST_SPEAKS)  # where rank 0 has said it, the launcher ends this one before it repeats that
        sys.exit(f"ds_silent: on rank {os.environ.get('RANK')}: {error}")
    patches = Patches()

    def deepspeed_is_there(_: ModuleType) -> None:
        from ds_silent.frameworks.deepspeed.attach_deepspeed import take_its_place

        take_its_place(block if file else None)

    patches.after_import("deepspeed", deepspeed_is_there)
    patches.after_import("torch.multiprocessing.spawn", partial(_follow_spawned, patches, file, called))
    unobserved: Callable[[], list[str]] = list
    if block is not None:
        from ds_silent.frameworks.auto_attach import AutoAttach

        auto_attach = AutoAttach(block)
        patches.also(auto_attach.undo)
        unobserved = auto_attach.unobserved
    atexit.register(_say_if_nothing_was_observed, unobserved)
    return patches


@dataclass(frozen=True)
class Spawned:
    """What a process runs that the script starts by ``torch.multiprocessing.spawn``: observed as the script is."""

    function: Callable[..., Any]
    file: str | None
    called: str

    def __call__(self, *args: Any) -> Any:
        patches = _take_places(self.file, self.called)
        try:
            return self.function(*args)
        finally:
            patches.undo()


def _follow_spawned(patches: Patches, file: str | None, called: str, module: ModuleType) -> None:
    from ds_silent.__main__ import Spawned  # by the name that another process imports it by

    def start(original: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        atexit.unregister(_say_if_nothing_was_observed)  # the processes say it
        return original(Spawned(function, file, called), *args, **kwargs)

    patches.wrap(module, "start_processes", start)


def _say_if_nothing_was_observed(unobserved: Callable[[], list[str]]) -> None:
    """Say it: silence would look like health."""
    from ds_silent.observing.observe import anything_observed
    from ds_silent.observing.start import alone
    from ds_silent.text import NOTHING_CAME_BY

    if is_first() and not anything_observed():
        one = "it ran as one process, which has nothing to be compared with: start several"
        none = one if alone() else NOTHING_CAME_BY
        why = "; ".join(unobserved()) or none
        print(f"ds_silent: nothing was observed: {why}", file=sys.stderr)


def _target_of(arguments: Sequence[str]) -> _Target:
    """Read what stands before the script; what is behind it is the script's."""
    launchers: list[str] = []
    config: str | None = None
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option in ("-h", "--help"):
            print(_USAGE)
            sys.exit(0)
        if option.split("=")[0] in _LOCAL_RANK:
            launchers.append(option)
            if "=" not in option and rest:
                launchers.append(rest.pop(0))
        elif option.split("=")[0] == _CONFIG:
            config = option.partition("=")[2] or (rest.pop(0) if rest and "=" not in option else "")
            if not config:
                sys.exit(f"ds_silent: {_CONFIG} needs the file that holds the block, got nothing; {_USAGE}")
        elif option == "-m" and rest:
            # DeepSpeed's --module and the -m of Python mean the same
            return _Target(rest[0], True, (*launchers, *rest[1:]), config)
        elif option != "--":
            _refuse(f"{option} {'without a module' if option == '-m' else 'before the script'}")
    if not rest:
        _refuse("nothing")
    if not os.path.isfile(rest[0]):
        _refuse(f"{rest[0]}, which is {'a directory' if os.path.isdir(rest[0]) else 'no file'} (in {os.getcwd()})")
    return _Target(rest[0], False, (*launchers, *rest[1:]), config)


def _refuse(given: str) -> None:
    """End on every rank: the launcher ends the others as soon as one has ended, perhaps before they could speak."""
    sys.exit(f"ds_silent: give the training script to run, got {given}; {_USAGE}")


def _run_script(target: _Target) -> None:
    """Run it as ``python train.py``. Not by ``runpy``: its ``__main__`` is gone when exit handlers and threads run."""
    path = os.path.abspath(target.name)
    loader = SourceFileLoader("__main__", path)
    code = loader.source_to_code(loader.get_data(path), path)
    sys.argv = [target.name, *target.arguments]
    if not getattr(sys.flags, "safe_path", False):  # python -P puts nothing there
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = ModuleType("__main__")
    # without a __spec__ multiprocessing starts its workers from __file__
    names: dict[str, Any] = {"__file__": path, "__builtins__": __builtins__, "__loader__": loader, "__spec__": None}
    vars(module).update(names)
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _run_module(target: _Target) -> None:
    """Run it as ``python -m package.module``: ``sys.path[0]`` is the current directory, as for ``-m ds_silent``."""
    name = target.name
    try:
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise  # the package itself imports something that is missing
        found = None
    except ValueError:  # a name like "__main__"
        found = None
    if found is None:
        _refuse(f"-m {name}, which is no module that can be run (sys.path[0] is {sys.path[0]})")
    sys.argv = [name, *target.arguments]  # runpy puts the module's file in the first place
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
