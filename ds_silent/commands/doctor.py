"""``ds-silent doctor``: what this machine has and lacks for a watched training, in one table.

    rows = examine(Machine(), "runs/silent")
    code = doctor_command("runs/silent", json_path=None)      # prints; 0 ok, 1 doubtful, 2 missing

Each probe asks a :class:`Machine` and answers with rows. None may end the command: what raises becomes a row, what may
hang or crash (drivers, name servers) runs in a process of its own with a time-out. Of the environment only variables
that are named here are shown, and of their values only what a variable of that kind may hold.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ds_silent.commands.measuring import refuse_unwritable, write_json
from ds_silent.config import ConfigError
from ds_silent.extras import version_of
from ds_silent.text import one_line, size_text

State = Literal["ok", "doubtful", "missing"]
CODES: Mapping[State, int] = {"ok": 0, "doubtful": 1, "missing": 2}
SECONDS = 10.0  # for a program that looks something up
TORCH_SECONDS = 120.0  # to import torch and to wake every device, from a slow file system
LONGEST = 80  # characters of anything found
SHOWN_LOCKS = 3


@dataclass(frozen=True)
class Row:
    """One thing that was looked at; ``remedy`` where it is not ok."""

    what: str
    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Answer:
    """What a program has said; ``code`` None: it is not there, or did not end in time."""

    code: int | None
    out: str = ""
    late: bool = False


def row_if(good: bool, what: str, found: str, otherwise: State, remedy: str) -> Row:
    """An ok row, or one of another state with its remedy."""
    return Row(what, "ok", found) if good else Row(what, otherwise, found, remedy)


def run_program(command: Sequence[str], seconds: float = SECONDS) -> Answer:
    """Its output, without a shell and without input."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Answer(None, late=True)
    except (OSError, ValueError):
        return Answer(None)
    return Answer(done.returncode, done.stdout)


@dataclass(frozen=True)
class Machine:
    """What the probes ask; a test gives another."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    run: Callable[..., Answer] = run_program
    version: Callable[[str], str | None] = version_of
    interfaces: Callable[[], list[str]] = lambda: [name for _, name in socket.if_nameindex()]
    root: Path = Path("/")  # of /dev, /proc, /sys and /usr

    def read(self, path: str) -> str | None:
        """A file below ``root``; None where it cannot be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None


# -- torch and the accelerator -----------------------------------------------------------------------------------------

_ASK_TORCH = """
import json, torch, torch.distributed as dist
from ds_silent.device import kind
found = {"torch": torch.__version__, "kind": kind(), "cuda": torch.version.cuda, "gloo": dist.is_gloo_available(),
         "nccl": dist.is_nccl_available(), "devices": [], "broken": ""}
if found["kind"] != "cpu":
    module = getattr(torch, found["kind"])
    try:
        for index in range(module.device_count()):
            found["devices"].append(str(module.get_device_name(index)))
            float(torch.ones(2, device=f"{found['kind']}:{index}").sum())
        if found["kind"] == "cuda" and found["nccl"]:
            found["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:
        found["broken"] = f"{type(error).__name__}: {error}"
print("ds_silent:" + json.dumps(found))
"""


def torch_says(machine: Machine) -> tuple[dict[str, Any] | None, Row]:
    """What torch finds, in a process that may hang or crash; and the row of torch itself."""
    answer = machine.run([sys.executable, "-c", _ASK_TORCH], TORCH_SECONDS)
    lines = [line for line in answer.out.splitlines() if line.startswith("ds_silent:")]
    if answer.late:
        remedy = "A driver that hangs: look at the accelerator's own tool (nvidia-smi, npu-smi) and at dmesg."
        return None, Row("torch", "missing", f"no answer within {TORCH_SECONDS:.0f} s", remedy)
    if not lines:
        end = "not installed" if machine.version("torch") is None else f"its import ended with status {answer.code}"
        return None, Row("torch", "missing", end, "pip install torch, in the build for this accelerator.")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("ds_silent:"))
    return found, in_range("torch", str(found["torch"]), (2, 4), (2, 15))


def accelerator(machine: Machine, found: Mapping[str, Any] | None) -> Iterator[Row]:
    """The device, its driver, and what torch can do with it."""
    kind = "" if found is None else str(found["kind"])
    told = machine.environment.get("DS_ACCELERATOR", "")
    if found is not None and told and told != kind:
        remedy = "Unset DS_ACCELERATOR, or install the torch that has this device."
        yield Row("accelerator", "missing", f"DS_ACCELERATOR is {shown(told)}, torch has {kind}", remedy)
    present = [name for name, marks in _DEVICE_FILES.items() if any((machine.root / mark).exists() for mark in marks)]
    if found is not None and kind == "cpu":
        unseen = [] if told == "cpu" else present
        if unseen:
            remedy = f"Install the torch of this device: {'torch_npu' if 'npu' in unseen else 'a CUDA build of torch'}."
            yield Row("accelerator", "missing", f"torch sees none, /dev has one ({', '.join(unseen)})", remedy)
        else:
            yield Row("accelerator", "ok", "none; trains on the CPU")
    elif found is not None:
        names = sorted(set(found["devices"]))
        text = f"{len(found['devices'])} x {', '.join(names)}" if names else f"{kind}, no device"
        if found["broken"]:
            remedy = "Look at the driver's own tool and at other processes on these devices; then run this again."
            yield Row("accelerator", "missing", f"{text}; {shown(found['broken'])}", remedy)
        else:
            yield row_if(bool(names), "accelerator", text, "missing", "Look at the variables of visible devices.")
    if kind == "cuda" or "cuda" in present:
        yield driver(machine, ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], r"^([\d.]+)")
    if kind == "npu" or "npu" in present:
        yield driver(machine, ["npu-smi", "info"], r"Version:\s*([\w.]+)")


_DEVICE_FILES = {"cuda": ("dev/nvidia0", "dev/nvidiactl"), "npu": ("dev/davinci0", "dev/davinci_manager")}


def driver(machine: Machine, command: list[str], pattern: str) -> Row:
    """Its version, from its own tool."""
    answer = machine.run(command)
    version = re.search(pattern, answer.out, re.M) if answer.code == 0 else None
    if version is not None:
        return Row("driver", "ok", shown(version[1]))
    why = "does not answer" if answer.late else "is not there" if answer.code is None else f"ends with {answer.code}"
    remedy = "Install or repair the driver; a container needs it mounted."
    return Row("driver", "missing", f"{command[0]} {why}", remedy)


CANN_OF = {
    **dict.fromkeys(("2.12.0", "2.11.0", "2.10.0.post4", "2.9.0.post6", "2.7.1.post8"), "9.1"),
    **dict.fromkeys(("2.10.0", "2.9.0.post2", "2.8.0.post4", "2.7.1.post4"), "9.0"),
    **dict.fromkeys(("2.9.0", "2.8.0.post2", "2.7.1.post2", "2.6.0.post5"), "8.5"),
    **dict.fromkeys(("2.8.0", "2.7.1", "2.6.0.post3"), "8.3"),
    **dict.fromkeys(("2.6.0", "2.5.1.post1"), "8.2"),
    **dict.fromkeys(("2.5.1", "2.4.0.post4"), "8.1"),
}
"""torch_npu's version -> CANN's, by torch_npu's own table (COMPATIBILITY.md of gitcode.com/Ascend/pytorch)."""


def ascend(machine: Machine, found: Mapping[str, Any] | None) -> Iterator[Row]:
    """CANN and torch_npu, where there is an NPU or a package for one."""
    npu = machine.version("torch_npu") or machine.version("torch-npu")
    there = any((machine.root / mark).exists() for mark in _DEVICE_FILES["npu"])
    if npu is None and not there:
        return
    cann = cann_version(machine)
    if npu is None:
        yield Row("torch_npu", "missing", "not installed", "pip install torch_npu, of torch's own version.")
    else:
        torch = str(found["torch"]) if found is not None else machine.version("torch") or ""
        alike = numbers(npu)[:2] == numbers(torch)[:2]
        remedy = f"pip install a torch_npu {'.'.join(map(str, numbers(torch)[:2]))}: it must be of torch's own version."
        yield Row("torch_npu", "ok" if alike else "missing", f"{npu} with torch {torch}", "" if alike else remedy)
    if cann is None:
        remedy = "Install CANN, or source its set_env.sh: without it torch_npu cannot be imported."
        yield Row("CANN", "missing", "not found", remedy)
    elif npu is not None:
        belongs = CANN_OF.get(npu)
        if belongs is None:
            remedy = "Look the pair up in the table of torch_npu's README."
            yield Row("CANN", "doubtful", f"{cann}; which one torch_npu {npu} needs is not known here", remedy)
        elif numbers(cann)[:2] != numbers(belongs)[:2]:
            yield Row("CANN", "doubtful", f"{cann}, torch_npu {npu} is built for {belongs}", f"Install CANN {belongs}.")
        else:
            yield Row("CANN", "ok", cann)
    if machine.environment.get("HCCL_CONNECT_TIMEOUT") is None and npu is not None:
        yield Row("HCCL", "ok", "with CANN; HCCL_CONNECT_TIMEOUT not set: ranks wait 120 s for each other")


def cann_version(machine: Machine) -> str | None:
    """From the toolkit's own file."""
    homes = [machine.environment.get(name) for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")]
    default = str(machine.root / "usr/local/Ascend/ascend-toolkit/latest")
    for home in [*(home for home in homes if home), default]:
        for file in sorted(Path(home).glob("*/ascend_toolkit_install.info")):
            version = re.search(r"^version=([\w.]+)", file.read_text(errors="replace"), re.M)
            if version:
                return version[1]
        plain = Path(home) / "version.cfg"
        if plain.is_file() and (version := re.search(r"\[[\w.:]*?([\d]+\.[\w.]+)", plain.read_text(errors="replace"))):
            return version[1]
    return None


def frameworks(machine: Machine) -> Iterator[Row]:
    """Those that are installed, and whether their versions were tried."""
    for package, name, lowest, highest in (
        ("deepspeed", "DeepSpeed", (0, 16, 9), (0, 19, 8)),
        ("megatron-core", "Megatron-core", (0, 15, 0), (0, 16, 1)),
    ):
        version = machine.version(package)
        if version is None:
            yield Row(name, "ok", "not installed; only its own trainings need it")
        else:
            yield in_range(name, version, lowest, highest)


def in_range(name: str, version: str, lowest: tuple[int, ...], highest: tuple[int, ...]) -> Row:
    """Whether a version was tried; newer ones may work, older ones will not."""
    low, high = (".".join(map(str, bound)) for bound in (lowest, highest))
    own = numbers(version)[: len(lowest)]
    if own < lowest:
        return Row(name, "missing", shown(version), f"Install {name} {low} or newer.")
    if own > highest:
        remedy = f"Tried up to {high}: run 'ds-silent drill' once before you trust it."
        return Row(name, "doubtful", shown(version), remedy)
    return Row(name, "ok", shown(version))


def numbers(version: str) -> tuple[int, ...]:
    """``"2.6.0.post3+cpu"`` -> (2, 6, 0); ``"8.3.RC1"`` -> (8, 3)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def collectives(machine: Machine, found: Mapping[str, Any] | None) -> Iterator[Row]:
    """What carries the ranks' messages."""
    if found is None:
        return
    if not found["gloo"]:
        remedy = "Install a torch with gloo: ds_silent's meetings on the host need it."
        yield Row("gloo", "doubtful", "not in this torch", remedy)
    if found["kind"] == "cuda":
        state: State = "ok" if found["nccl"] else "missing"
        remedy = "" if found["nccl"] else "Install a torch that was built with NCCL."
        yield Row("NCCL", state, str(found.get("nccl_version") or "not in this torch"), remedy)


# -- the network -------------------------------------------------------------------------------------------------------

_IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def network(machine: Machine) -> Iterator[Row]:
    """The interfaces, what the variables name, and the host's own name."""
    present = machine.interfaces()
    up = [name for name in present if name != "lo" and is_up(machine, name)]
    yield Row("interfaces", "ok", ", ".join(up) or "loopback only: one node")
    for variable in _IFNAMES:
        told = machine.environment.get(variable)
        if told is None:
            continue
        exact = variable.startswith(("GLOO", "TP"))
        chosen = chosen_interfaces(told, present, exact)
        if not chosen:
            remedy = f"Set {variable} to one of {', '.join(up) or 'lo'}, or unset it."
            yield Row(variable, "missing", f"{shown(told)}: no such interface here", remedy)
        elif not set(chosen) & {*up, "lo"}:
            remedy = f"Set it up, or use one of {', '.join(up) or 'lo'}."
            yield Row(variable, "doubtful", f"{shown(told)} is down", remedy)
        else:
            yield Row(variable, "ok", shown(told))
    name = socket.gethostname()
    answer = machine.run(["getent", "hosts", name])
    address = answer.out.split()[0] if answer.code == 0 and answer.out.split() else ""
    named = any(machine.environment.get(variable) for variable in _IFNAMES)
    if answer.code is None and not answer.late:
        return  # no getent: nobody to ask
    if not address:
        remedy = "Add it to /etc/hosts, or give launchers addresses (torchrun --local-addr, --rdzv-endpoint)."
        yield Row("host name", "doubtful", f"{shown(name)} has no address", remedy)
    elif address.startswith("127.") and len(up) > 0 and not named:
        remedy = "On several nodes set GLOO_SOCKET_IFNAME (and NCCL's or HCCL's) to the interface between them."
        yield Row("host name", "doubtful", f"{shown(name)} is {address}: other nodes cannot reach that", remedy)
    else:
        yield Row("host name", "ok", f"{shown(name)} is {address}")


def is_up(machine: Machine, interface: str) -> bool:
    """Unless the kernel says that it is down; many say "unknown" and work."""
    return (machine.read(f"/sys/class/net/{interface}/operstate") or "").strip() != "down"


def chosen_interfaces(told: str, present: Sequence[str], exact: bool) -> list[str]:
    """Which interfaces a variable means.

    Args:
        exact: names, as gloo has it; else NCCL's and HCCL's language: beginnings, ``=name`` exactly, ``^name`` not it.
    """
    without = not exact and told.startswith("^")
    text = told[1:] if without else told
    whole = exact or text.startswith("=")
    names = [name.strip() for name in text.removeprefix("=").split(",") if name.strip()]
    matched = [one for one in present if any(one == name if whole else one.startswith(name) for name in names)]
    return [one for one in present if one not in matched] if without else matched


# -- the host ----------------------------------------------------------------------------------------------------------


def compiler(machine: Machine) -> Iterator[Row]:
    """DeepSpeed compiles its operators at the first start."""
    if machine.version("deepspeed") is None:
        return
    names = [machine.environment["CXX"]] if machine.environment.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        answer = machine.run([name, "--version"])
        if answer.code == 0 and answer.out:
            yield Row("C++ compiler", "ok", shown(answer.out.splitlines()[0]))
            break
    else:
        remedy = "Install g++ (package build-essential or gcc-c++), or set CXX: DeepSpeed compiles its operators."
        yield Row("C++ compiler", "missing", f"none of {shown(', '.join(names))}", remedy)
    if machine.version("ninja") is None and machine.run(["ninja", "--version"]).code != 0:
        yield Row("ninja", "doubtful", "not installed", "pip install ninja: without it DeepSpeed compiles nothing.")


def build_locks(machine: Machine) -> Iterator[Row]:
    """Locks of operators that are compiled: torch waits for ever for a build that was killed."""
    told = machine.environment.get("TORCH_EXTENSIONS_DIR")
    cache = machine.environment.get("XDG_CACHE_HOME") or Path(machine.environment.get("HOME", "~"), ".cache")
    place = Path(told or Path(cache, "torch_extensions")).expanduser()  # as torch.utils.cpp_extension, 2.4 to 2.15
    found = [lock for lock in (*place.glob("*/lock"), *place.glob("*/*/lock")) if lock.is_file()]
    in_use = _open_files(machine) if found else set()
    stale = sorted(one_line(shlex.quote(str(lock))) for lock in found if os.path.realpath(lock) not in in_use)
    for lock in stale[:SHOWN_LOCKS]:
        remedy = f"Unless another host compiles there now: rm {lock}"
        yield Row("compile lock", "doubtful", "no process here has it open; torch waits for it without end", remedy)
    if len(stale) > SHOWN_LOCKS:
        yield Row("compile locks", "doubtful", f"{len(stale) - SHOWN_LOCKS} more", f"Look below {shown(str(place))}.")
    if told and not stale:
        yield Row("compile locks", "ok", f"none left behind in {shown(told)}")


def _open_files(machine: Machine) -> set[str]:
    """Of all processes that may be looked at."""
    found = set()
    for link in (machine.root / "proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it is closed by now, or another user's
            found.add(os.readlink(link))
    return found


def output(directory: str) -> Iterator[Row]:
    """Whether records can be written there, and how many. Nothing is left behind."""
    place = Path(directory).expanduser().absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    what = f"output ({shown(directory)})"
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"1")
            file.flush()
            locks = _locks(file.fileno())
    except OSError as error:
        remedy = "Give silent_consistency.output_dir another place, or change the rights of this one."
        yield Row(what, "missing", f"{shown(str(place))} cannot be written ({error.strerror})", remedy)
        return
    free = shutil.disk_usage(place).free
    state: State = "missing" if free < 2**24 else "doubtful" if free < 2**30 else "ok"
    remedy = "" if state == "ok" else "Make room: a long run writes some hundred megabytes, checkpoints come on top."
    yield Row(what, state, f"writable, {size_text(free)} free", remedy)
    if not locks:
        remedy = "Two runs into one directory may not notice each other: give each its own output_dir."
        yield Row("file locks", "doubtful", "not on this file system", remedy)


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def shared_memory(machine: Machine) -> Iterator[Row]:
    """What DataLoader workers, gloo and NCCL hand to each other through."""
    place = machine.root / "dev/shm"
    if not place.is_dir():
        yield Row("/dev/shm", "missing", "not there", "Mount a tmpfs at /dev/shm.")
        return
    usage = shutil.disk_usage(place)
    small = usage.total < 2**30 or usage.free < 2**28
    remedy = "Start the container with --shm-size=8g or --ipc=host: where it is full, workers end with a bus error."
    found = f"{size_text(usage.total)}, {size_text(usage.free)} free"
    yield row_if(not small, "/dev/shm", found, "doubtful", remedy)


def clock(machine: Machine, sleep: Callable[[float], None] = time.sleep) -> Iterator[Row]:
    """Whether it goes evenly, and whether somebody sets it: logs of several nodes are read side by side."""
    wall, steady = time.time(), time.monotonic()
    sleep(0.2)
    apart = abs((time.time() - wall) - (time.monotonic() - steady))
    if apart > 0.05:
        remedy = "Something sets the clock in steps: let chrony or ntpd slew it."
        yield Row("clock", "doubtful", f"wall and monotonic part by {apart:.2f} s within 0.2 s", remedy)
        return
    remedy = "Start chronyd, ntpd or systemd-timesyncd: logs of several nodes are compared by their times."
    told = machine.run(["timedatectl", "show", "--property=NTPSynchronized", "--value"])
    if told.code == 0 and told.out.strip() in ("yes", "no"):
        yield synchronised(told.out.strip() == "yes", remedy)
        return
    told = machine.run(["chronyc", "-n", "tracking"])
    leap = re.search(r"Leap status\s*:\s*(.*)", told.out) if told.code == 0 else None
    if leap is None:
        yield Row("clock", "ok", "even; nobody here knows whether it is synchronised")
    else:
        yield synchronised(leap[1].strip().lower() != "not synchronised", remedy)


def synchronised(good: bool, remedy: str) -> Row:
    """Of the clock."""
    return row_if(good, "clock", "synchronised" if good else "not synchronised", "doubtful", remedy)


# -- the environment ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Doubt:
    """A variable, the values of it that make one wonder, and why."""

    variable: str
    pattern: str
    remedy: str


DOUBTS = (
    Doubt("CUDA_LAUNCH_BLOCKING", r"1", "Unset it: every kernel is waited for."),
    Doubt("ASCEND_LAUNCH_BLOCKING", r"1", "Unset it: every kernel is waited for."),
    Doubt("TORCH_DISTRIBUTED_DEBUG", r"DETAIL", "Unset it: every collective is checked by another one."),
    Doubt("NCCL_DEBUG", r"(?i)info|trace", "Set it to WARN: each rank writes thousands of lines."),
    Doubt("TORCH_NCCL_ASYNC_ERROR_HANDLING", r"0", "Unset it: ranks wait for ever for one that is gone."),
    Doubt("NCCL_ASYNC_ERROR_HANDLING", r"0", "Unset it: ranks wait for ever for one that is gone."),
    Doubt("NCCL_P2P_DISABLE", r"1", "Unset it, unless this machine's devices cannot talk directly."),
    Doubt("NCCL_IB_DISABLE", r"1", "Unset it where there is InfiniBand: sockets are many times slower."),
    Doubt("NCCL_SHM_DISABLE", r"1", "Unset it, and give the container more /dev/shm instead."),
    Doubt("CUDA_VISIBLE_DEVICES", r"|-1", "Unset it, or name devices: an empty list hides all of them."),
    Doubt("ASCEND_RT_VISIBLE_DEVICES", r"|-1", "Unset it, or name devices: an empty list hides all of them."),
    Doubt("DEEPSPEED_TIMEOUT", r"(?!\d+$).*|0+", "Give whole minutes above 0: how long ranks wait for each other."),
    Doubt("MASTER_ADDR", r"localhost|127\..*", "On several nodes give the first node's address; on one it is right."),
    Doubt("PYTHONOPTIMIZE", r".+", "Unset it: checks of torch and DeepSpeed that are assertions do not run."),
)


def environment(machine: Machine) -> Iterator[Row]:
    """Variables whose values make one wonder; nothing else of the environment is shown."""
    clean = True
    for doubt in DOUBTS:
        value = machine.environment.get(doubt.variable)
        if value is not None and re.fullmatch(doubt.pattern, value.strip()):
            clean = False
            yield Row(doubt.variable, "doubtful", shown(value) or "empty", doubt.remedy)
    threads = machine.environment.get("OMP_NUM_THREADS")
    cores = os.cpu_count() or 1
    if threads is not None and (not threads.isdigit() or not 0 < int(threads) <= cores):
        clean = False
        remedy = f"Give a whole number from 1 to the cores of a rank's share (this machine has {cores})."
        yield Row("OMP_NUM_THREADS", "doubtful", shown(threads), remedy)
    if clean:
        yield Row("environment", "ok", "nothing doubtful")


def shown(text: str) -> str:
    """One short line."""
    line = " ".join(one_line(str(text)).split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."


# -- all of it ---------------------------------------------------------------------------------------------------------


def examine(machine: Machine, directory: str) -> list[Row]:
    """All rows. Never raises: a probe that breaks is a row that says so."""
    try:
        found, first = torch_says(machine)
    except Exception as error:
        found, first = None, _broke("torch", error)
    probes: dict[str, Callable[[], Iterator[Row]]] = {
        "accelerator": lambda: accelerator(machine, found),
        "Ascend": lambda: ascend(machine, found),
        "frameworks": lambda: frameworks(machine),
        "collectives": lambda: collectives(machine, found),
        "network": lambda: network(machine),
        "compiler": lambda: compiler(machine),
        "compile locks": lambda: build_locks(machine),
        "output": lambda: output(directory),
        "/dev/shm": lambda: shared_memory(machine),
        "clock": lambda: clock(machine),
        "environment": lambda: environment(machine),
    }
    return [first, *(row for name, probe in probes.items() for row in guarded(name, probe))]


def guarded(name: str, probe: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """The probe's rows up to where it breaks, and then one that says so."""
    try:
        yield from probe()
    except Exception as error:  # whatever a machine does: the other rows are wanted all the more
        yield _broke(name, error)


def _broke(name: str, error: Exception) -> Row:
    found = f"could not be looked at ({type(error).__name__}: {shown(str(error))})"
    return Row(name, "doubtful", found, "Look at it by hand.")


def exit_code(rows: Sequence[Row]) -> int:
    """0: all ok, 1: something doubtful, 2: something missing."""
    return max((CODES[row.state] for row in rows), default=0)


def table_of(rows: Sequence[Row]) -> Table:
    """The rows as they are printed."""
    table = Table(title="ds-silent doctor", title_justify="left")
    for heading in ("what", "state", "found", "remedy"):
        table.add_column(heading, overflow="fold")
    colours = {"ok": "green", "doubtful": "yellow", "missing": "red"}
    for row in rows:
        state = f"[{colours[row.state]}]{row.state}[/]"
        table.add_row(escape(row.what), state, escape(row.found), escape(row.remedy))
    return table


def doctor_command(directory: str, json_path: str | None) -> int:
    """Look, print, and write ``json_path``; the exit status."""
    try:
        refuse_unwritable(json_path)
    except ConfigError as error:
        print(f"ds-silent: {error}", file=sys.stderr)
        return 2
    rows = examine(Machine(), directory)
    code = exit_code(rows)
    Console(width=None if sys.stdout.isatty() else 140).print(table_of(rows))
    write_json(json_path, {"exit_code": code, "rows": [asdict(row) for row in rows]})
    return code
