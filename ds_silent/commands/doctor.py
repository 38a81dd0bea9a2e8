"""``ds-silent doctor``: what this machine has and lacks for a watched training, in one table.

    results = examine(Machine(), "runs/silent")
    code = doctor_command("runs/silent", json_path=None)      # prints; 0 ok, 1 doubtful, 2 missing

Each check asks a :class:`Machine` and yields results; those of the host are in
:mod:`ds_silent.commands.doctor_host`. None may end the command: what raises becomes a result, what may hang or crash
(drivers, name servers) runs in a process of its own with a time-out.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ds_silent.commands import doctor_host as host
from ds_silent.commands.doctor_host import CheckResult, Machine, State, doubtful, missing, ok, shown
from ds_silent.commands.measuring import carried_out

CODES: Mapping[State, int] = {"ok": 0, "note": 0, "doubtful": 1, "missing": 2}
TORCH_SECONDS = 120.0  # to import torch and to wake every device, from a slow file system
Found = Mapping[str, Any]
"""What torch says of itself and of its devices."""

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


def torch_says(machine: Machine) -> tuple[Found | None, CheckResult]:
    """Return what torch finds, in a process that may hang or crash; and the result of torch itself."""
    answer = machine.run([sys.executable, "-c", _ASK_TORCH], TORCH_SECONDS)
    lines = [line for line in answer.out.splitlines() if line.startswith("ds_silent:")]
    if answer.late:
        remedy = "A driver that hangs: look at the accelerator's own tool (nvidia-smi, npu-smi) and at dmesg."
        return None, missing("torch", f"no answer within {TORCH_SECONDS:.0f} s", remedy)
    if not lines:
        end = "not installed" if machine.version("torch") is None else f"its import ended with status {answer.code}"
        return None, missing("torch", end, "pip install torch, in the build for this accelerator.")
    found: Found = json.loads(lines[-1].removeprefix("ds_silent:"))
    return found, in_range("torch", str(found["torch"]), (2, 4), (2, 15))


_DEVICES = {
    "cuda": (
        ("dev/nvidia0", "dev/nvidiactl"),
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        r"^([\d.]+)",
    ),
    "npu": (("dev/davinci0", "dev/davinci_manager"), ["npu-smi", "info"], r"Version:\s*([\w.]+)"),
}
"""Kind of torch's -> the files of its devices, the tool that knows its driver, and where the version stands in it."""


def accelerator(machine: Machine, found: Found | None) -> Iterator[CheckResult]:
    """Check the device, its driver, and what torch can do with it."""
    kind = "" if found is None else str(found["kind"])
    wanted = machine.environment.get("DS_ACCELERATOR", "")
    if found is not None and wanted and wanted != kind:
        remedy = "Unset DS_ACCELERATOR, or install the torch that has this device."
        yield missing("accelerator", f"DS_ACCELERATOR is {shown(wanted)}, torch has {kind}", remedy)
    present = [name for name in _DEVICES if _is_there(machine, name)]
    if kind == "cpu" and present and wanted != "cpu":
        remedy = f"Install the torch of this device: {'torch_npu' if 'npu' in present else 'a CUDA build of torch'}."
        yield missing("accelerator", f"torch sees none, /dev has one ({', '.join(present)})", remedy)
    elif kind == "cpu":
        yield ok("accelerator", "none; trains on the CPU")
    elif found is not None:
        names = sorted(set(found["devices"]))
        text = f"{len(found['devices'])} x {', '.join(names)}" if names else f"{kind}, no device"
        if found["broken"]:
            remedy = "Look at the driver's own tool and at other processes on these devices; then run this again."
            yield missing("accelerator", f"{text}; {shown(found['broken'])}", remedy)
        elif names:
            yield ok("accelerator", text)
        else:
            yield missing("accelerator", text, "Look at the variables of visible devices.")
    for name, (_, command, pattern) in _DEVICES.items():
        if name == kind or name in present:
            yield driver(machine, command, pattern)


def _is_there(machine: Machine, kind: str) -> bool:
    return any((machine.root / file).exists() for file in _DEVICES[kind][0])


def driver(machine: Machine, command: list[str], pattern: str) -> CheckResult:
    """Check its version, by its own tool."""
    answer = machine.run(command)
    version = re.search(pattern, answer.out, re.M) if answer.code == 0 else None
    if version is not None:
        return ok("driver", shown(version[1]))
    why = "does not answer" if answer.late else "is not there" if answer.code is None else f"ends with {answer.code}"
    return missing("driver", f"{command[0]} {why}", "Install or repair the driver; a container needs it mounted.")


CANN_OF = {
    **dict.fromkeys(("2.12.0", "2.11.0", "2.10.0.post4", "2.9.0.post6", "2.7.1.post8"), "9.1"),
    **dict.fromkeys(("2.10.0", "2.9.0.post2", "2.8.0.post4", "2.7.1.post4"), "9.0"),
    **dict.fromkeys(("2.9.0", "2.8.0.post2", "2.7.1.post2", "2.6.0.post5"), "8.5"),
    **dict.fromkeys(("2.8.0", "2.7.1", "2.6.0.post3"), "8.3"),
    **dict.fromkeys(("2.6.0", "2.5.1.post1"), "8.2"),
    **dict.fromkeys(("2.5.1", "2.4.0.post4"), "8.1"),
}
"""torch_npu's version -> CANN's, by torch_npu's own table (COMPATIBILITY.md of gitcode.com/Ascend/pytorch)."""


def ascend(machine: Machine, found: Found | None) -> Iterator[CheckResult]:
    """Check CANN and torch_npu, where there is an NPU or a package for one."""
    npu = machine.version("torch_npu") or machine.version("torch-npu")
    if npu is None and not _is_there(machine, "npu"):
        return
    cann = cann_version(machine)
    if npu is None:
        yield missing("torch_npu", "not installed", "pip install torch_npu, of torch's own version.")
    else:
        torch = str(found["torch"]) if found is not None else machine.version("torch") or ""
        own, pair = numbers(torch)[:2], f"{npu} with torch {torch}"
        remedy = f"pip install a torch_npu {'.'.join(map(str, own))}: it must be of torch's own version."
        yield ok("torch_npu", pair) if numbers(npu)[:2] == own else missing("torch_npu", pair, remedy)
    if cann is None:
        yield missing(
            "CANN", "not found", "Install CANN, or source its set_env.sh: without it torch_npu cannot be imported."
        )
    elif npu is not None:
        needed = CANN_OF.get(npu)
        if needed is None:
            text = f"{cann}; which one torch_npu {npu} needs is not known here"
            yield doubtful("CANN", text, "Look the pair up in the table of torch_npu's README.")
        elif numbers(cann)[:2] != numbers(needed)[:2]:
            yield doubtful("CANN", f"{cann}, torch_npu {npu} is built for {needed}", f"Install CANN {needed}.")
        else:
            yield ok("CANN", cann)
    if machine.environment.get("HCCL_CONNECT_TIMEOUT") is None and npu is not None:
        yield ok("HCCL", "with CANN; HCCL_CONNECT_TIMEOUT not set: ranks wait 120 s for each other")


_CANN_FILES = (("*/ascend_toolkit_install.info", r"^version=([\w.]+)"), ("version.cfg", r"\[[\w.:]*?(\d+\.[\w.]+)"))


def cann_version(machine: Machine) -> str | None:
    """Read it from the toolkit's own file."""
    homes = [machine.environment.get(name) for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")]
    for home in filter(None, (*homes, str(machine.root / "usr/local/Ascend/ascend-toolkit/latest"))):
        for name, pattern in _CANN_FILES:
            for file in sorted(Path(home).glob(name)):
                if version := re.search(pattern, file.read_text(errors="replace"), re.M):
                    return version[1]
    return None


FRAMEWORKS = (
    ("deepspeed", "DeepSpeed", (0, 16, 9), (0, 19, 8)),
    ("megatron-core", "Megatron-core", (0, 15, 0), (0, 16, 1)),
)


def frameworks(machine: Machine) -> Iterator[CheckResult]:
    """Check those that are installed: whether their versions were tried."""
    for package, name, *tried in FRAMEWORKS:
        version = machine.version(package)
        yield in_range(name, version, *tried) if version else ok(name, "not installed; only its own trainings need it")


def in_range(name: str, version: str, lowest: tuple[int, ...], highest: tuple[int, ...]) -> CheckResult:
    """Tell whether a version was tried; newer ones may work, older ones will not."""
    low, high = (".".join(map(str, bound)) for bound in (lowest, highest))
    own = numbers(version)[: len(lowest)]
    if own < lowest:
        return missing(name, shown(version), f"Install {name} {low} or newer.")
    if own > highest:
        return doubtful(name, shown(version), f"Tried up to {high}: run 'ds-silent drill' once before you trust it.")
    return ok(name, shown(version))


def numbers(version: str) -> tuple[int, ...]:
    """Read ``"2.6.0.post3+cpu"`` as (2, 6, 0) and ``"8.3.RC1"`` as (8, 3)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def collectives(found: Found | None) -> Iterator[CheckResult]:
    """Check what carries the ranks' messages."""
    if found is not None and not found["gloo"]:
        yield doubtful(
            "gloo", "not in this torch", "Install a torch with gloo: ds_silent's meetings on the host need it."
        )
    if found is not None and found["kind"] == "cuda":
        version, remedy = found.get("nccl_version") or "not in this torch", "Install a torch that was built with NCCL."
        yield ok("NCCL", str(version)) if found["nccl"] else missing("NCCL", str(version), remedy)


def examine(machine: Machine, directory: str) -> list[CheckResult]:
    """Make all checks. Never raises: a check that breaks is a result that says so."""
    try:
        found, first = torch_says(machine)
    except Exception as error:
        found, first = None, _broke("torch", error)
    checks: dict[str, Callable[[], Iterator[CheckResult]]] = {
        "accelerator": lambda: accelerator(machine, found),
        "Ascend": lambda: ascend(machine, found),
        "frameworks": lambda: frameworks(machine),
        "collectives": lambda: collectives(found),
        "network": lambda: host.network(machine),
        "compiler": lambda: host.compiler(machine),
        "compile locks": lambda: host.build_locks(machine),
        "output": lambda: host.output(directory),
        "/dev/shm": lambda: host.shared_memory(machine),
        "clock": lambda: host.clock(machine),
        "environment": lambda: host.environment(machine),
    }
    return [first, *(result for name, check in checks.items() for result in guarded(name, check))]


def guarded(name: str, check: Callable[[], Iterator[CheckResult]]) -> Iterator[CheckResult]:
    """Yield a check's results up to where it breaks, and then one that says so."""
    try:
        yield from check()
    except Exception as error:  # whatever a machine does: the other results are wanted all the more
        yield _broke(name, error)


def _broke(name: str, error: Exception) -> CheckResult:
    found = f"could not be looked at ({type(error).__name__}: {shown(str(error))})"
    return doubtful(name, found, "Look at it by hand.")


def exit_code(results: Sequence[CheckResult]) -> int:
    return max((CODES[result.state] for result in results), default=0)


def table_of(results: Sequence[CheckResult]) -> Table:
    columns = (Column(heading, overflow="fold") for heading in ("what", "state", "found", "remedy"))
    table = Table(*columns, title="ds-silent doctor", title_justify="left")
    colours = {"ok": "green", "note": "yellow", "doubtful": "yellow", "missing": "red"}
    for one in results:
        table.add_row(Text(one.what), Text(one.state, colours[one.state]), Text(one.found), Text(one.remedy))
    return table


def doctor_command(directory: str, json_path: str | None) -> int:
    """Look, print, and write ``json_path``; the exit status."""

    def show(results: list[CheckResult], console: Console) -> None:
        console.width = console.width if console.is_terminal else 140
        console.print(table_of(results))

    def to_json(results: list[CheckResult]) -> dict[str, Any]:
        return {"exit_code": exit_code(results), "rows": [{"what": one.what, **asdict(one)} for one in results]}

    return carried_out(lambda _: examine(Machine(), directory), show, to_json, exit_code, json_path)
