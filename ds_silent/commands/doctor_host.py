"""Look a host over for ``ds-silent doctor``: network, compiler, disk, shared memory, clock and environment.

Each check asks a :class:`Machine` and yields results. Of the environment only variables that are named here are shown,
and of their values only what a variable of that kind may hold.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from ds_silent.extras import version_of
from ds_silent.text import one_line, shortened, size_text

State = Literal["ok", "note", "doubtful", "missing"]
"""``note``: as it should be on one host, where nothing says that there are several."""
SECONDS = 10.0  # for a program that looks something up
LONGEST = 80  # characters of anything found
SHOWN_LOCKS = 3


@dataclass(frozen=True)
class CheckResult:
    """One thing that was looked at; ``remedy`` where it is not ok."""

    state: State
    what: str
    found: str
    remedy: str = ""


ok, note = partial(CheckResult, "ok"), partial(CheckResult, "note")
doubtful, missing = partial(CheckResult, "doubtful"), partial(CheckResult, "missing")


@dataclass(frozen=True)
class Answer:
    """What a program has printed; ``code`` None: it is not there, or did not end in time."""

    code: int | None
    out: str = ""
    late: bool = False


def run_program(command: Sequence[str], seconds: float = SECONDS) -> Answer:
    """Run a program without a shell and without input."""
    nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
    try:
        done = subprocess.run(command, stdin=nothing, stdout=pipe, stderr=pipe, errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired:
        return Answer(None, late=True)
    except (OSError, ValueError):
        return Answer(None)
    return Answer(done.returncode, done.stdout)


@dataclass(frozen=True)
class Machine:
    """What the checks ask; a test gives another."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    run: Callable[..., Answer] = run_program
    version: Callable[[str], str | None] = version_of
    interfaces: Callable[[], list[str]] = lambda: [name for _, name in socket.if_nameindex()]
    root: Path = Path("/")  # of /dev, /proc, /sys and /usr


def shown(text: str) -> str:
    """Shorten a text to one line of at most ``LONGEST`` characters."""
    line = " ".join(one_line(str(text)).split())
    return shortened(line, LONGEST)


_IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def network(machine: Machine) -> Iterator[CheckResult]:
    """Check the interfaces, what the variables name, and the host's own name."""
    present = machine.interfaces()
    up = [name for name in present if name != "lo" and is_up(machine, name)]
    yield ok("interfaces", ", ".join(up) or "loopback only: one node")
    for variable in _IFNAMES:
        given = machine.environment.get(variable)
        if given is None:
            continue
        chosen, usable = chosen_interfaces(given, present, variable.startswith(("GLOO", "TP"))), ", ".join(up) or "lo"
        if not chosen:
            remedy = f"Set {variable} to one of {usable}, or unset it."
            yield missing(variable, f"{shown(given)}: no such interface here", remedy)
        elif not set(chosen) & {*up, "lo"}:
            yield doubtful(variable, f"{shown(given)} is down", f"Set it up, or use one of {usable}.")
        else:
            yield ok(variable, shown(given))
    name = socket.gethostname()
    answer = machine.run(["getent", "hosts", name])
    address = answer.out.split()[0] if answer.code == 0 and answer.out.split() else ""
    if answer.code is None and not answer.late:
        return  # no getent: nobody to ask
    if not address:
        remedy = "Add it to /etc/hosts, or give launchers addresses (torchrun --local-addr, --rdzv-endpoint)."
        yield doubtful("host name", f"{shown(name)} has no address", remedy)
    elif address.startswith("127.") and up and not any(map(machine.environment.get, _IFNAMES)):
        remedy = "On several nodes set GLOO_SOCKET_IFNAME (and NCCL's or HCCL's) to the interface between them."
        say = doubtful if has_several_hosts(machine) else note
        yield say("host name", f"{shown(name)} is {address}: other nodes cannot reach that", remedy)
    else:
        yield ok("host name", f"{shown(name)} is {address}")


_HOSTS = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "PET_NNODES", "NNODES", "GROUP_WORLD_SIZE")
_LOCAL = r"|localhost|127\..*|::1"


def has_several_hosts(machine: Machine) -> bool:
    """Tell whether a launcher's variables or DeepSpeed's hostfile are about more than this host."""
    given = machine.environment
    if any(int(count) > 1 for name in _HOSTS for count in re.findall(r"\d+", given.get(name, ""))[-1:]):
        return True
    if given.get("MASTER_ADDR", "") != socket.gethostname() and not re.fullmatch(_LOCAL, given.get("MASTER_ADDR", "")):
        return True
    try:
        lines = (machine.root / "job/hostfile").read_text(errors="replace").splitlines()
    except OSError:
        return False
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in lines) > 1


def is_up(machine: Machine, interface: str) -> bool:
    """Tell whether the kernel does not say that it is down; many say "unknown" and work."""
    try:
        return (machine.root / f"sys/class/net/{interface}/operstate").read_text(errors="replace").strip() != "down"
    except OSError:
        return True


def chosen_interfaces(given: str, present: Sequence[str], exact: bool) -> list[str]:
    """Return the interfaces that a variable means: ``exact`` names, as gloo has it, or NCCL's and HCCL's language."""
    without = not exact and given.startswith("^")
    text = given[1:] if without else given  # beginnings; ``=name`` is that name, ``^name`` all but it
    whole = exact or text.startswith("=")
    names = [name.strip() for name in text.removeprefix("=").split(",") if name.strip()]
    matched = [one for one in present if any(one == name if whole else one.startswith(name) for name in names)]
    return [one for one in present if one not in matched] if without else matched


def compiler(machine: Machine) -> Iterator[CheckResult]:
    """Check what DeepSpeed compiles its operators with at the first start."""
    if machine.version("deepspeed") is None:
        return
    names = [machine.environment["CXX"]] if machine.environment.get("CXX") else ["c++", "g++", "clang++"]
    answers = (machine.run([name, "--version"]) for name in names)
    version = next((answer.out.splitlines()[0] for answer in answers if answer.code == 0 and answer.out), None)
    if version is not None:
        yield ok("C++ compiler", shown(version))
    else:
        remedy = "Install g++ (package build-essential or gcc-c++), or set CXX: DeepSpeed compiles its operators."
        yield missing("C++ compiler", f"none of {shown(', '.join(names))}", remedy)
    if machine.version("ninja") is None and machine.run(["ninja", "--version"]).code != 0:
        yield doubtful("ninja", "not installed", "pip install ninja: without it DeepSpeed compiles nothing.")


def build_locks(machine: Machine) -> Iterator[CheckResult]:
    """Check for locks of operators that were compiled: torch waits for ever for a build that was killed."""
    given = machine.environment.get("TORCH_EXTENSIONS_DIR")
    cache = machine.environment.get("XDG_CACHE_HOME") or Path(machine.environment.get("HOME", "~"), ".cache")
    place = Path(given or Path(cache, "torch_extensions")).expanduser()  # as torch.utils.cpp_extension, 2.4 to 2.15
    found = [lock for lock in (*place.glob("*/lock"), *place.glob("*/*/lock")) if lock.is_file()]
    in_use = _open_files(machine) if found else set()
    stale = sorted(one_line(shlex.quote(str(lock))) for lock in found if os.path.realpath(lock) not in in_use)
    for lock in stale[:SHOWN_LOCKS]:
        remedy = f"Unless another host compiles there now: rm {lock}"
        yield doubtful("compile lock", "no process here has it open; torch waits for it without end", remedy)
    if len(stale) > SHOWN_LOCKS:
        yield doubtful("compile locks", f"{len(stale) - SHOWN_LOCKS} more", f"Look below {shown(str(place))}.")
    if given and not stale:
        yield ok("compile locks", f"none left behind in {shown(given)}")


def _open_files(machine: Machine) -> set[str]:
    """Return those of all processes that may be looked at."""
    found = set()
    for link in (machine.root / "proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it is closed by now, or another user's
            found.add(os.readlink(link))
    return found


def output(directory: str) -> Iterator[CheckResult]:
    """Check whether records can be written there, and how many. Nothing is left behind."""
    place, locks = Path(directory).expanduser().absolute(), True
    while not place.exists() and place != place.parent:
        place = place.parent
    what = f"output ({shown(directory)})"
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"1")
            file.flush()
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                locks = False
    except OSError as error:
        remedy = "Give silent_consistency.output_dir another place, or change the rights of this one."
        yield missing(what, f"{shown(str(place))} cannot be written ({error.strerror})", remedy)
        return
    free = shutil.disk_usage(place).free
    state: State = "missing" if free < 2**24 else "doubtful" if free < 2**30 else "ok"
    remedy = "" if state == "ok" else "Make room: a long run writes some hundred megabytes, checkpoints come on top."
    yield CheckResult(state, what, f"writable, {size_text(free)} free", remedy)
    if not locks:
        remedy = "Two runs into one directory may not notice each other: give each its own output_dir."
        yield doubtful("file locks", "not on this file system", remedy)


def shared_memory(machine: Machine) -> Iterator[CheckResult]:
    """Check what DataLoader workers, gloo and NCCL hand to each other through."""
    place = machine.root / "dev/shm"
    if not place.is_dir():
        yield missing("/dev/shm", "not there", "Mount a tmpfs at /dev/shm.")
        return
    usage = shutil.disk_usage(place)
    found = f"{size_text(usage.total)}, {size_text(usage.free)} free"
    remedy = "Start the container with --shm-size=8g or --ipc=host: where it is full, workers end with a bus error."
    small = usage.total < 2**30 or usage.free < 2**28
    yield doubtful("/dev/shm", found, remedy) if small else ok("/dev/shm", found)


_SYNCHRONISED = (
    (["timedatectl", "show", "--property=NTPSynchronized", "--value"], r"^\s*(yes|no)\s*$"),
    (["chronyc", "-n", "tracking"], r"Leap status\s*:\s*(.*)"),
)


def clock(machine: Machine, sleep: Callable[[float], None] = time.sleep) -> Iterator[CheckResult]:
    """Check whether it goes evenly and is synchronised: logs of several nodes are read side by side."""
    wall, steady = time.time(), time.monotonic()
    sleep(0.2)
    difference = abs((time.time() - wall) - (time.monotonic() - steady))
    if difference > 0.05:
        found = f"wall and monotonic part by {difference:.2f} s within 0.2 s"
        yield doubtful("clock", found, "Something sets the clock in steps: let chrony or ntpd slew it.")
        return
    remedy = "Start chronyd, ntpd or systemd-timesyncd: logs of several nodes are compared by their times."
    for command, pattern in _SYNCHRONISED:
        answer = machine.run(command)
        status = re.search(pattern, answer.out) if answer.code == 0 else None
        if status is not None:
            good = status[1].strip().lower() not in ("no", "not synchronised")
            say = doubtful if has_several_hosts(machine) else note
            yield ok("clock", "synchronised") if good else say("clock", "not synchronised", remedy)
            return
    yield ok("clock", "even; nobody here knows whether it is synchronised")


_ASYNC_ERRORS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
DOUBTS = (
    (("CUDA_LAUNCH_BLOCKING", "ASCEND_LAUNCH_BLOCKING"), r"1", "Unset it: every kernel is waited for."),
    (("TORCH_DISTRIBUTED_DEBUG",), r"DETAIL", "Unset it: every collective is checked by another one."),
    (("NCCL_DEBUG",), r"(?i)info|trace", "Set it to WARN: each rank writes thousands of lines."),
    (_ASYNC_ERRORS, r"0", "Unset it: ranks wait for ever for one that is gone."),
    (("NCCL_P2P_DISABLE",), r"1", "Unset it, unless this machine's devices cannot talk directly."),
    (("NCCL_IB_DISABLE",), r"1", "Unset it where there is InfiniBand: sockets are many times slower."),
    (("NCCL_SHM_DISABLE",), r"1", "Unset it, and give the container more /dev/shm instead."),
    (_DEVICES, r"|-1", "Unset it, or name devices: an empty list hides all of them."),
    (("DEEPSPEED_TIMEOUT",), r"(?!\d+$).*|0+", "Give whole minutes above 0: how long ranks wait for each other."),
    (("MASTER_ADDR",), r"localhost|127\..*|::1", "On several nodes give the first node's address; on one it is right."),
    (("PYTHONOPTIMIZE",), r".+", "Unset it: checks of torch and DeepSpeed that are assertions do not run."),
)
"""Variables, the values of them that make one wonder, and what to do."""
_BETWEEN_HOSTS = ("MASTER_ADDR", "NCCL_IB_DISABLE")


def environment(machine: Machine) -> Iterator[CheckResult]:
    """Check for variables whose values make one wonder; nothing else of the environment is shown."""
    found = []
    for variable, pattern, remedy in ((name, *rest) for names, *rest in DOUBTS for name in names):
        value = machine.environment.get(variable)
        if value is not None and re.fullmatch(pattern, value.strip()):
            say = note if variable in _BETWEEN_HOSTS and not has_several_hosts(machine) else doubtful
            found.append(say(variable, shown(value) or "empty", remedy))
    threads, cores = machine.environment.get("OMP_NUM_THREADS"), os.cpu_count() or 1
    if threads is not None and (not threads.isdigit() or not 0 < int(threads) <= cores):
        remedy = f"Give a whole number from 1 to the cores of a rank's share (this machine has {cores})."
        found.append(doubtful("OMP_NUM_THREADS", shown(threads), remedy))
    yield from found or [ok("environment", "nothing doubtful")]
