"""``ds-silent doctor``: each probe on a machine that is made up, and all of them on one where everything breaks."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ds_silent.cli import app
from ds_silent.commands import doctor, doctor_host
from ds_silent.commands.doctor_host import Answer, CheckResult, Machine

CPU = {"torch": "2.8.0", "kind": "cpu", "gloo": True, "nccl": False, "devices": [], "broken": ""}
GPU = {**CPU, "kind": "cuda", "nccl": True, "nccl_version": "2.27.3", "devices": ["NVIDIA H100"] * 8}
NPU = {**CPU, "torch": "2.7.1+cpu", "kind": "npu", "devices": ["Ascend910B2"] * 8}
ON_CPU = {"DS_ACCELERATOR": "cpu"}
LATE = Answer(None, late=True)


def machine(
    root: Path,
    answers: Mapping[str, Answer] | None = None,
    versions: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    interfaces: Sequence[str] = ("lo", "eth0"),
) -> Machine:
    """Programs that are not in ``answers`` are not there."""

    def run(command: Sequence[str], seconds: float = 10.0) -> Answer:
        return (answers or {}).get(Path(command[0]).name, Answer(None))

    return Machine(environment or {}, run, (versions or {}).get, lambda: list(interfaces), root)


def states(rows: Iterable[CheckResult]) -> dict[str, str]:
    return {row.what: row.state for row in rows}


def test_every_row_that_is_not_ok_has_a_remedy_and_the_worst_decides(tmp_path: Path) -> None:
    rows = doctor.examine(machine(tmp_path, environment={"CUDA_LAUNCH_BLOCKING": "1"}), str(tmp_path))
    assert states(rows)["torch"] == "missing"
    assert all(bool(row.remedy) == (row.state != "ok") for row in rows)
    assert doctor.exit_code(rows) == 2
    assert doctor.exit_code([row for row in rows if row.state != "missing"]) == 1
    assert doctor.exit_code([CheckResult("ok", "a", "b")]) == 0


def broken(*args: Any, **named: Any) -> Any:
    raise RuntimeError("[red]no[/] such thing")


def test_where_every_probe_breaks_there_is_still_a_table(tmp_path: Path) -> None:
    rows = doctor.examine(Machine({}, broken, broken, broken, tmp_path), "\0")
    assert {"torch", "frameworks", "network", "compiler", "clock"} <= {
        row.what for row in rows if row.found.startswith("could not be looked at (")
    }
    assert doctor.table_of(rows).row_count == len(rows)
    assert all("Traceback" not in row.found for row in rows)


def test_rows_before_a_break_stay() -> None:
    def probe() -> Iterator[CheckResult]:
        yield CheckResult("ok", "a", "b")
        raise OSError("gone")

    assert [(row.what, row.state) for row in doctor.guarded("p", probe)] == [("a", "ok"), ("p", "doubtful")]


def test_a_program_that_hangs_or_is_not_there_is_an_answer() -> None:
    assert doctor_host.run_program(["sleep", "60"], seconds=0.2) == LATE
    assert doctor_host.run_program(["no-such-program-anywhere"]) == Answer(None)
    assert doctor_host.run_program(["sh", "-c", "echo one; exit 3"]) == Answer(3, "one\n")


def test_torch_that_hangs_crashes_or_is_not_there(tmp_path: Path) -> None:
    def told(answer: Answer, versions: Mapping[str, str]) -> CheckResult:
        asked = Machine({}, lambda command, seconds: answer, versions.get, list, tmp_path)
        found, row = doctor.torch_says(asked)
        assert found is None
        return row

    assert "no answer within" in told(LATE, {"torch": "2.8.0"}).found
    assert "status -11" in told(Answer(-11), {"torch": "2.8.0"}).found
    assert told(Answer(1), {}).found == "not installed"


@pytest.mark.parametrize(
    ("found", "marks", "environment", "answers", "expected"),
    [
        (CPU, (), {}, {}, {"accelerator": "ok"}),
        (CPU, ("dev/nvidia0",), {}, {"nvidia-smi": Answer(0, "570.1\n")}, {"accelerator": "missing", "driver": "ok"}),
        (CPU, ("dev/nvidia0",), ON_CPU, {"nvidia-smi": LATE}, {"accelerator": "ok", "driver": "missing"}),
        (CPU, (), {"DS_ACCELERATOR": "cuda"}, {}, {"accelerator": "missing"}),
        (GPU, (), {}, {"nvidia-smi": Answer(0, "570.124.06\n")}, {"accelerator": "ok", "driver": "ok"}),
        ({**GPU, "broken": "RuntimeError: busy"}, (), {}, {}, {"accelerator": "missing", "driver": "missing"}),
        (NPU, (), {}, {"npu-smi": Answer(0, "| Version: 24.1.rc3 |")}, {"accelerator": "ok", "driver": "ok"}),
    ],
)  # fmt: skip
def test_the_accelerator_and_its_driver(
    tmp_path: Path,
    found: dict[str, Any],
    marks: tuple[str, ...],
    environment: dict[str, str],
    answers: dict[str, Answer],
    expected: dict[str, str],
) -> None:
    for mark in marks:
        (tmp_path / mark).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / mark).touch()
    rows = list(doctor.accelerator(machine(tmp_path, answers, environment=environment), found))
    worst: dict[str, str] = {}
    for row in rows:
        worst[row.what] = max(worst.get(row.what, "ok"), row.state, key=lambda state: doctor.CODES[state])  # type: ignore[call-overload]
    assert worst == expected


@pytest.mark.parametrize(
    ("npu", "cann", "expected"),
    [
        ("2.7.1", "8.3.RC1", {"torch_npu": "ok", "CANN": "ok"}),
        ("2.7.1.post2", "8.5.0", {"torch_npu": "ok", "CANN": "ok"}),
        ("2.7.1", "8.2.RC1", {"torch_npu": "ok", "CANN": "doubtful"}),
        ("2.7.1.post99", "8.3.RC1", {"torch_npu": "ok", "CANN": "doubtful"}),
        ("2.6.0", "8.2.RC1", {"torch_npu": "missing", "CANN": "ok"}),
        ("2.7.1", None, {"torch_npu": "ok", "CANN": "missing"}),
    ],
)
def test_cann_and_torch_npu_are_a_pair(tmp_path: Path, npu: str, cann: str | None, expected: dict[str, str]) -> None:
    if cann is not None:
        home = tmp_path / "usr/local/Ascend/ascend-toolkit/latest/aarch64-linux"
        home.mkdir(parents=True)
        (home / "ascend_toolkit_install.info").write_text(f"package_name=Ascend-cann-toolkit\nversion={cann}\n")
    found = states(doctor.ascend(machine(tmp_path, versions={"torch_npu": npu}), NPU))
    assert {name: state for name, state in found.items() if name != "HCCL"} == expected
    assert list(doctor.ascend(machine(tmp_path), CPU)) == []  # nothing of Ascend here


def test_versions_are_judged_by_what_was_tried(tmp_path: Path) -> None:
    def state(package: str, version: str) -> str:
        rows = doctor.frameworks(machine(tmp_path, versions={package: version}))
        return next(row.state for row in rows if version in row.found)

    assert [state("deepspeed", version) for version in ("0.16.8", "0.16.9", "0.19.8", "0.20.0")] == [
        "missing",
        "ok",
        "ok",
        "doubtful",
    ]
    assert state("megatron-core", "0.14.0") == "missing"
    assert doctor.in_range("torch", "2.4.1+cu121", (2, 4), (2, 15)).state == "ok"
    assert doctor.in_range("torch", "2.3.1", (2, 4), (2, 15)).state == "missing"


@pytest.mark.parametrize(
    ("told", "exact", "chosen"),
    [
        ("eth0", True, ["eth0"]),
        ("eth", True, []),
        ("eth0,ib0", True, ["eth0", "ib0"]),
        ("eth", False, ["eth0", "eth1"]),
        ("=eth", False, []),
        ("=eth1", False, ["eth1"]),
        ("^eth,lo", False, ["ib0"]),
    ],
)
def test_interfaces_are_chosen_as_gloo_and_nccl_do(told: str, exact: bool, chosen: list[str]) -> None:
    assert doctor_host.chosen_interfaces(told, ["lo", "eth0", "eth1", "ib0"], exact) == chosen


def test_an_interface_that_is_not_there_or_down_is_said(tmp_path: Path) -> None:
    (tmp_path / "sys/class/net/eth1").mkdir(parents=True)
    (tmp_path / "sys/class/net/eth1/operstate").write_text("down\n")

    def found(**variables: str) -> dict[str, str]:
        answers = {"getent": Answer(0, "127.0.1.1  box\n")}
        here = machine(tmp_path, answers, environment=variables, interfaces=("lo", "eth0", "eth1"))
        return states(doctor_host.network(here))

    assert found() == {"interfaces": "ok", "host name": "note"}
    assert found(GLOO_SOCKET_IFNAME="eth0") == {"interfaces": "ok", "GLOO_SOCKET_IFNAME": "ok", "host name": "ok"}
    assert found(GLOO_SOCKET_IFNAME="bond0")["GLOO_SOCKET_IFNAME"] == "missing"
    assert found(NCCL_SOCKET_IFNAME="eth1")["NCCL_SOCKET_IFNAME"] == "doubtful"


@pytest.mark.parametrize(
    ("variables", "hostfile", "state"),
    [
        ({}, "", "note"),
        ({"MASTER_ADDR": "127.0.0.1", "SLURM_NNODES": "1", "PET_NNODES": "1:1"}, "# a\nnode1 slots=8\n\n", "note"),
        ({"MASTER_ADDR": socket.gethostname()}, "", "note"),
        ({"MASTER_ADDR": "10.0.0.7"}, "", "doubtful"),
        ({"SLURM_JOB_NUM_NODES": "2"}, "", "doubtful"),
        ({"PET_NNODES": "1:4"}, "", "doubtful"),
        ({"MASTER_ADDR": "localhost"}, "node1 slots=8\nnode2 slots=8\n", "doubtful"),
    ],
)
def test_what_only_several_hosts_need_is_a_note_on_one(
    variables: dict[str, str], hostfile: str, state: str, tmp_path: Path
) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job/hostfile").write_text(hostfile)
    variables = {**variables, "NCCL_IB_DISABLE": "1"}
    here = machine(tmp_path, {"getent": Answer(0, "127.0.1.1  box\n")}, environment=variables)
    rows = list(doctor_host.network(here))
    assert states(rows)["host name"] == state
    assert doctor.exit_code(rows) == (0 if state == "note" else 1)
    shown = {"NCCL_IB_DISABLE", *(("MASTER_ADDR",) if variables.get("MASTER_ADDR", "")[:3] in ("127", "loc") else ())}
    assert states(doctor_host.environment(here)) == dict.fromkeys(shown, state)


def test_a_compiler_is_wanted_where_deepspeed_is(tmp_path: Path) -> None:
    deepspeed = {"deepspeed": "0.19.8", "ninja": "1.11"}
    assert states(doctor_host.compiler(machine(tmp_path, versions=deepspeed))) == {"C++ compiler": "missing"}
    gcc = {"g++": Answer(0, "g++ (GCC) 13.2\n")}
    assert states(doctor_host.compiler(machine(tmp_path, gcc, deepspeed))) == {"C++ compiler": "ok"}
    assert list(doctor_host.compiler(machine(tmp_path))) == []


def test_a_lock_of_a_build_that_was_killed_is_found(tmp_path: Path) -> None:
    extensions = tmp_path / "torch extensions"
    for name in ("shm", "adam", "done"):
        (extensions / name).mkdir(parents=True)
    (extensions / "shm" / "lock").touch()
    there = machine(tmp_path, environment={"TORCH_EXTENSIONS_DIR": str(extensions)})
    (stale,) = doctor_host.build_locks(there)
    assert (stale.what, stale.state) == ("compile lock", "doubtful")
    assert stale.remedy.endswith(f": rm '{extensions}/shm/lock'")
    (tmp_path / "proc" / "7" / "fd").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "fd" / "3").symlink_to(extensions / "shm" / "lock")  # a process that compiles
    assert states(doctor_host.build_locks(there)) == {"compile locks": "ok"}
    (extensions / "adam" / "lock").touch()
    (stale,) = doctor_host.build_locks(there)
    assert "adam" in stale.remedy
    home = machine(tmp_path, environment={"HOME": str(tmp_path)})
    assert list(doctor_host.build_locks(home)) == []
    (tmp_path / ".cache" / "torch_extensions" / "py311_cpu" / "shm").mkdir(parents=True)
    (tmp_path / ".cache" / "torch_extensions" / "py311_cpu" / "shm" / "lock").touch()
    assert states(doctor_host.build_locks(home)) == {"compile lock": "doubtful"}


def test_a_lock_that_torch_holds_is_in_use(tmp_path: Path) -> None:
    from torch.utils.file_baton import FileBaton

    (tmp_path / "operator").mkdir()
    baton = FileBaton(str(tmp_path / "operator" / "lock"))
    there = Machine({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert baton.try_acquire()
    assert states(doctor_host.build_locks(there)) == {"compile locks": "ok"}
    baton.release()
    assert not (tmp_path / "operator" / "lock").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_without_rights_is_missing(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert [row.state for row in doctor_host.output(str(tmp_path / "runs"))] == ["missing"]


def test_the_output_directory_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [row.state for row in doctor_host.output(str(tmp_path / "a" / "b"))] in (["ok"], ["doubtful"])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert [row.state for row in doctor_host.output(str(tmp_path / "file" / "runs"))] == ["missing"]
    usage = type("Usage", (), {"total": 2**36, "free": 2**20})
    monkeypatch.setattr(doctor_host.shutil, "disk_usage", lambda place: usage)
    assert [row.state for row in doctor_host.output(str(tmp_path))] == ["missing"]


def test_shared_memory_of_a_container_is_doubtful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert states(doctor_host.shared_memory(machine(tmp_path))) == {"/dev/shm": "missing"}
    (tmp_path / "dev/shm").mkdir(parents=True)
    for total, state in ((2**26, "doubtful"), (2**34, "ok")):
        usage = type("Usage", (), {"total": total, "free": total})
        monkeypatch.setattr(doctor_host.shutil, "disk_usage", lambda place, usage=usage: usage)
        assert states(doctor_host.shared_memory(machine(tmp_path))) == {"/dev/shm": state}


@pytest.mark.parametrize(
    ("answers", "state"),
    [
        ({"timedatectl": Answer(0, "yes\n")}, "ok"),
        ({"timedatectl": Answer(0, "no\n")}, "note"),
        ({"timedatectl": Answer(1), "chronyc": Answer(0, "Leap status     : Not synchronised\n")}, "note"),
        ({"chronyc": Answer(0, "Leap status     : Normal\n")}, "ok"),
        ({}, "ok"),
    ],
)
def test_the_clock(tmp_path: Path, answers: dict[str, Answer], state: str) -> None:
    for environment, expected in (({}, state), ({"SLURM_NNODES": "2"}, "doubtful" if state == "note" else state)):
        here = machine(tmp_path, answers, environment=environment)
        assert states(doctor_host.clock(here, sleep=lambda seconds: None)) == {"clock": expected}


def test_a_clock_that_is_set_in_steps_is_doubtful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walls = iter([1000.0, 1003.0])
    monkeypatch.setattr(doctor_host.time, "time", lambda: next(walls))
    assert states(doctor_host.clock(machine(tmp_path), sleep=lambda seconds: None)) == {"clock": "doubtful"}


def test_doubtful_variables_are_shown_and_no_others(tmp_path: Path) -> None:
    variables = {
        "NCCL_DEBUG": "INFO",
        "DEEPSPEED_TIMEOUT": "30s",
        "OMP_NUM_THREADS": "100000",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_TOKEN": "hf_secret",
        "WANDB_API_KEY": "secret",
    }
    rows = list(doctor_host.environment(machine(tmp_path, environment=variables)))
    doubted = {"NCCL_DEBUG", "DEEPSPEED_TIMEOUT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"}
    assert states(rows) == dict.fromkeys(doubted, "doubtful")
    assert "secret" not in repr(doctor.examine(machine(tmp_path, environment=variables), str(tmp_path)))
    good = {"NCCL_DEBUG": "WARN", "DEEPSPEED_TIMEOUT": "30", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert states(doctor_host.environment(machine(tmp_path, environment=good))) == {"environment": "ok"}


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    result = CliRunner().invoke(app, ["doctor", "--output-dir", str(tmp_path / "runs"), "--json", str(path)])
    written = json.loads(path.read_text())
    assert result.exit_code == written["exit_code"] == max(doctor.CODES[row["state"]] for row in written["rows"])
    assert {"torch", "accelerator", "clock"} <= {row["what"] for row in written["rows"]}
    assert "/dev/shm" in result.output
    refused = CliRunner().invoke(app, ["doctor", "--json", str(tmp_path)])
    assert refused.exit_code == 2
