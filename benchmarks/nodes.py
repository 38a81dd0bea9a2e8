"""Two machines on one: a training that loses a rank, a node and its network, and goes on each time.

    sudo python benchmarks/nodes.py        # make nodes: some ten minutes on 2 cores

Two network namespaces are two nodes, each with an address and a host name of its own (UTS namespace), between them a
virtual cable. torchrun starts 2 x 2 ranks with its c10d rendezvous: it needs no ssh, no pdsh and no MPI between nodes,
and every rank's process can be found and killed. The fine-tune of the embedded model, every check on:

* healthy to its end: no event;
* a second one, from which a rank is killed, then a node; then the link loses 5 % of the packets, then it is cut. Each
  time the other ranks must end in bounded time, with records that can be read; the same command with ``--resume`` goes
  on. At its end its records must be those of the healthy one, number for number.
* elastic: a checkpoint of 4 ranks goes on with 2; the detectors start anew and one event says so.

Bounds: a killed process closes its connections, so its peers hear of it at once; a cut link says nothing, so torch's
time-out ends the wait (``DEEPSPEED_TIMEOUT``, 1 minute here, 10 by default): once, whether it is the observer's own
collective or the training's that waits. The cut comes a step before an exact measurement: there the observer's is the
first one. torchrun's agents wait up to 300 s for each other behind their ranks.

Exit status: 0 all as told above, 1 not so, 2 something is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "ds_cpu_demo.json"
ELASTIC = Path(__file__).resolve().parent / "nodes_elastic.py"
PREFIX = "ds-silent"
CABLE = "ds0"  # the interface's name in both nodes
NAMES = Path("/etc/netns")
PORT = 29400
PER_NODE = 2
TORCH_TIMEOUT = 60.0  # DEEPSPEED_TIMEOUT is in whole minutes
START = 240.0  # seconds from the command to the first record, on a slow machine
LOSS = 5  # % of the packets, in each direction
AT_ONCE = 45.0  # a closed connection is heard of at once; torchrun gives its ranks 30 s to end
AFTER_TIMEOUT = TORCH_TIMEOUT + AT_ONCE  # one wait, whoever waits
LAUNCHERS = 10.0  # seconds for them, behind their ranks
STEPS, SAVE_EVERY = 24, 3
FAULT_AT = (5, 11, 17)  # steps behind which the faults come: each leaves steps behind a checkpoint


class Missing(Exception):
    """What this machine lacks, and the remedy, in one sentence."""


class Interrupted(BaseException):
    """A signal asked for the end; everything is cleaned up on the way out."""


# -- the two nodes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A network namespace with an address and a host name."""

    host: str
    namespace: str
    address: str

    def inside(self, *command: str) -> list[str]:
        """``command`` with this node's network and host name; the process that is started becomes the command."""
        named = 'hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", named, self.host, *command]

    def pids(self) -> list[int]:
        """Of all processes that run there."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        return [int(line) for line in found.stdout.split()]

    def kill(self) -> None:
        """Everything that runs there, launcher and ranks, at once."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def nodes_of(tag: str) -> tuple[Node, Node]:
    """Addresses of a network that nothing outside can reach."""
    return tuple(  # type: ignore[return-value]
        Node(f"node{number}", f"{PREFIX}-{tag}-{number}", f"10.213.77.{number + 1}") for number in range(2)
    )


def hosts_of(nodes: Sequence[Node]) -> str:
    """Their /etc/hosts: torchrun asks for the name of its own machine."""
    return "".join(f"{line}\n" for line in ("127.0.0.1 localhost", *(f"{node.address} {node.host}" for node in nodes)))


def stale_namespaces(names: Sequence[str], alive: Callable[[int], bool]) -> list[str]:
    """Those that a killed run of this program has left behind: the number in the name is its process."""
    mine = [(name, name.split("-")) for name in names if name.startswith(f"{PREFIX}-")]
    return [name for name, parts in mine if len(parts) == 4 and parts[2].isdigit() and not alive(int(parts[2]))]


def drop_bytecode(percent: float) -> str:
    """A classic BPF program for ``tc ... bpf direct-action``: drop this share of the packets at random.

    Loads a random word (ancillary load 56), compares, returns TC_ACT_SHOT (2) or TC_ACT_OK (0).
    """
    ancillary, most = 0xFFFFF000 + 56, round(percent / 100 * 0xFFFFFFFF)
    return f"4,32 0 0 {ancillary},37 1 0 {most},6 0 0 2,6 0 0 0"


class Network:
    """Two nodes and the cable between them."""

    def __init__(self, nodes: tuple[Node, Node]):
        self.nodes = nodes

    def build(self) -> None:
        """Namespaces, cable and addresses."""
        first, second = self.nodes
        for node in self.nodes:
            _do("ip", "netns", "add", node.namespace)
            NAMES.joinpath(node.namespace).mkdir(parents=True)  # `ip netns exec` shows what is there as /etc/hosts
            NAMES.joinpath(node.namespace, "hosts").write_text(hosts_of(self.nodes), encoding="utf-8")
        _do("ip", "link", "add", CABLE, "netns", first.namespace, "type", "veth", "peer", "name", CABLE, "netns",
            second.namespace)  # fmt: skip
        for node in self.nodes:
            _do("ip", "-n", node.namespace, "address", "add", f"{node.address}/24", "dev", CABLE)
            _do("ip", "-n", node.namespace, "link", "set", "lo", "up")
        self.up()

    def up(self) -> None:
        """A cable that loses nothing."""
        for node in self.nodes:
            for parent in ("root", "clsact"):
                _try("tc", "-n", node.namespace, "qdisc", "del", "dev", CABLE, parent)
            _do("ip", "-n", node.namespace, "link", "set", CABLE, "up")

    def lose(self, percent: float) -> str:
        """Lose packets in both directions; what loses them: netem, or where the kernel has none, a BPF program."""
        how = ""
        for node in self.nodes:
            tc = ("tc", "-n", node.namespace)
            if _try(*tc, "qdisc", "add", "dev", CABLE, "root", "netem", "loss", f"{percent}%"):
                how = "netem"
                continue
            _do(*tc, "qdisc", "add", "dev", CABLE, "clsact")
            _do(*tc, "filter", "add", "dev", CABLE, "ingress", "bpf", "direct-action", "bytecode",
                drop_bytecode(percent))  # fmt: skip
            how = "tc's BPF classifier, this kernel has no netem"
        return how

    def down(self) -> None:
        """Cut the cable: no packet, and no word of it to those who wait."""
        _do("ip", "-n", self.nodes[0].namespace, "link", "set", CABLE, "down")

    def remove(self) -> None:
        """End what still runs in the nodes, and the nodes with their cable."""
        for node in self.nodes:
            node.kill()
            _try("ip", "netns", "del", node.namespace)
            shutil.rmtree(NAMES / node.namespace, ignore_errors=True)
        with suppress(OSError):  # not empty: it is somebody else's too
            NAMES.rmdir()


@contextmanager
def network() -> Iterator[Network]:
    """Built, and removed on every way out."""
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, _interrupt)
    for name in stale_namespaces(_namespaces(), _alive):
        Network((Node("", name, ""), Node("", name, ""))).remove()
    built = Network(nodes_of(str(os.getpid())))
    try:
        built.build()
        yield built
    finally:
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        built.remove()


def _interrupt(signum: int, frame: Any) -> None:
    raise Interrupted(signal.Signals(signum).name)


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    return [line.split()[0] for line in listed.splitlines() if line.strip()]


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise Missing(f"'{' '.join(command)}' failed ({said}): run this as root on a Linux machine of your own")


def _try(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def refuse_without(which: Callable[[str], str | None], user: int, platform: str) -> None:
    """Raises Missing for the first thing that is not there."""
    if platform != "linux":
        raise Missing(f"network namespaces are Linux's, this is {platform}: run it on a Linux machine")
    packages = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "hostname": "hostname"}
    for program, package in packages.items():
        if which(program) is None:
            raise Missing(f"'{program}' is missing: install the package {package}")
    if user != 0:
        raise Missing("network namespaces need root: start it with sudo, or in a container with CAP_SYS_ADMIN")


# -- a training on them ------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """One start of a training: a launcher on each node."""

    network: Network
    log: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, program: Sequence[str], nodes: int = 2) -> None:
        """torchrun on the first ``nodes`` nodes."""
        environment = {  # what a cluster's launch script would set
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "GLOO_SOCKET_IFNAME": CABLE,
            "DEEPSPEED_TIMEOUT": str(round(TORCH_TIMEOUT / 60)),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        for node in self.network.nodes[:nodes]:
            command = node.inside(*launch(node.address, self.network.nodes[0].address, nodes, program))
            with self._log_of(node).open("wb") as log:
                self.processes.append(
                    subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
                )

    def _log_of(self, node: Node) -> Path:
        return self.log.with_suffix(f".{node.host}.log")

    def running(self) -> bool:
        """Whether any launcher runs."""
        return any(process.poll() is None for process in self.processes)

    def wait_for(self, arrived: Callable[[], bool], seconds: float) -> bool:
        """Whether that came, while it runs and within the time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if arrived():
                return True
            if not self.running():
                return arrived()
            time.sleep(0.1)
        return False

    def ranks(self) -> list[int]:
        """Those that run."""
        found = set()
        for node in self.network.nodes:
            for pid in node.pids():
                with suppress(OSError):
                    found.add(rank_of(Path(f"/proc/{pid}/environ").read_bytes()))
        return sorted(rank for rank in found if rank is not None)

    def ended(self, seconds: float) -> float | None:
        """Seconds until every rank has ended by itself; None: not within the time."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            if not self.ranks():
                return time.monotonic() - began
            time.sleep(0.1)
        return None

    def codes(self) -> list[int | None]:
        """Exit status of each launcher."""
        return [process.poll() for process in self.processes]

    def kill(self) -> None:
        """Whatever is left of it."""
        for node in self.network.nodes:
            node.kill()
        for process in self.processes:
            process.wait()

    def rank_pid(self, rank: int) -> int:
        """The process of a rank, by its environment."""
        for node in self.network.nodes:
            for pid in node.pids():
                with suppress(OSError):
                    if rank_of(Path(f"/proc/{pid}/environ").read_bytes()) == rank:
                        return pid
        raise Missing(f"the process of rank {rank} cannot be found in /proc: mount it where this runs")

    def said(self) -> str:
        """What everybody has printed."""
        nodes = self.network.nodes
        return "\n".join(self._log_of(n).read_text(errors="replace") for n in nodes if self._log_of(n).exists())


def launch(address: str, master: str, nodes: int, program: Sequence[str]) -> list[str]:
    """torchrun's command on the node of ``address``."""
    return [
        sys.executable,
        *("-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", str(PER_NODE)),
        *("--rdzv-backend", "c10d", "--rdzv-id", PREFIX, "--rdzv-endpoint", f"{master}:{PORT}"),
        *("--local-addr", address, "--max-restarts", "0", *program),
    ]


def rank_of(environ: bytes) -> int | None:
    """The rank that a process is, from its environment as /proc shows it; a launcher has none."""
    values = dict(line.split(b"=", 1) for line in environ.split(b"\0") if b"=" in line)
    return int(values[b"RANK"]) if values.get(b"RANK", b"").isdigit() else None


def last_step(metrics: Path) -> int:
    """Of the newest whole record; 0 without any."""
    try:
        lines = metrics.read_bytes().splitlines(keepends=True)
    except OSError:
        return 0
    whole = [line for line in lines if line.endswith(b"\n")]
    return int(json.loads(whole[-1])["step"]) if whole else 0


def newest(records: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The last record of each step, without what a clock says."""
    return {one["step"]: {key: value for key, value in one.items() if key != "seconds"} for one in records}


def unlike(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> list[int]:
    """Steps whose newest records are not the same, number for number."""
    one, other = newest(first), newest(second)
    return sorted(step for step in one.keys() | other.keys() if one.get(step) != other.get(step))


# -- what is tried -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A row of the table."""

    name: str
    good: bool
    ended: str
    bound: str
    records: str
    said: str = ""


class Trial:
    """All that is tried, into one directory."""

    def __init__(self, built: Network, directory: Path):
        self.network, self.directory = built, directory
        self.rows: list[Outcome] = []
        config = json.loads(CONFIG.read_text(encoding="utf-8"))
        block = config["silent_consistency"]
        # not 1 or 2 steps behind a checkpoint: a resume times those by the count before it, and leaves them out
        block["direction"] |= {"per_layer": True, "exact_interval": 2 * SAVE_EVERY}
        block |= {"integrity": {"aggregation": True, "replica_interval": SAVE_EVERY}, "tensorboard": False}
        self._config = directory / "ds_config.json"
        self._config.write_text(json.dumps(config, indent=2), encoding="utf-8")

    def finetune(self, name: str) -> list[str]:
        """The command, without the launcher's part."""
        sizes = [
            "--micro-batch",
            "2",
            "--accumulation",
            "1",
            "--max-steps",
            str(STEPS),
            "--save-every",
            str(SAVE_EVERY),
        ]
        script, output = str(ROOT / "launch" / "train.py"), str(self.directory / name)
        return [script, "--deepspeed", str(self._config), "--output", output,
                "--template", "alpaca-with-input", "--no-save-model", *sizes]  # fmt: skip

    def records(self, name: str) -> Path:
        """Where a fine-tune's are."""
        return self.directory / name

    @contextmanager
    def job(self, name: str) -> Iterator[Job]:
        """Whatever is left of it ends with the block."""
        job = Job(self.network, self.directory / name)
        try:
            yield job
        finally:
            job.kill()

    def to_the_end(self, name: str, program: list[str], silent: Path, nodes: int = 2) -> str:
        """Run it; what is wrong with its end, "" if nothing."""
        with self.job(name) as job:
            job.start(program, nodes)
            job.wait_for(lambda: not job.running(), START * 2)
            if job.codes() != [0] * nodes:
                return f"the launchers ended with {job.codes()}: {last_line(job.said())}"
        return unreadable(silent)

    def healthy(self) -> None:
        """The one that the other is compared with."""
        silent = self.records("healthy")
        began = time.monotonic()
        wrong = self.to_the_end("healthy", self.finetune("healthy"), silent)
        wrong = wrong or steps_missing(silent, STEPS) or alarms(silent)
        self.add("healthy", wrong, time.monotonic() - began, "-", silent)

    def fault(
        self, name: str, at: int, strike: Callable[[Job], None], bound: float, whose: str, before: str = ""
    ) -> None:
        """Start or go on, strike behind a step, and see the end."""
        silent = self.records("training")
        program = self.finetune("training") + ["--resume"] * (last_step(silent / "metrics.jsonl") > 0)
        with self.job(name.replace(" ", "-")) as job:
            job.start(program)
            if not job.wait_for(lambda: last_step(silent / "metrics.jsonl") >= at, START):
                self.add(name, f"step {at} was not reached: {last_line(job.said())}", None, whose, silent)
                return
            strike(job)
            seconds = job.ended(bound)
            left = job.wait_for(lambda: not job.running(), LAUNCHERS)
            said = sentence_of(job.said())
            wrong = f"ranks {job.ranks()} still run {bound:.0f} s later" if seconds is None else ""
            if not wrong and "error: rank" not in said:
                wrong = "no rank that was left has said in one sentence why it ended"
            if not wrong and left and not any(job.codes()):
                wrong = "no launcher has said by its exit status that the training failed"
            said += before if left else f"{before}; a launcher still waits for the other one (torchrun: 300 s)"
        self.add(name, wrong or unreadable(silent), seconds, f"{bound:.0f} s, {whose}", silent, said)

    def to_its_end(self) -> None:
        """The struck training's last start; its records against the healthy ones."""
        silent = self.records("training")
        began = time.monotonic()
        wrong = self.to_the_end("goes-on", [*self.finetune("training"), "--resume"], silent)
        wrong = wrong or steps_missing(silent, STEPS) or alarms(silent)
        if not wrong:
            different = unlike(metrics_of(self.records("healthy")), metrics_of(silent))
            wrong = f"steps {different} are not those of the healthy training" if different else ""
        said = "" if wrong else "its records are those of the healthy training, number for number"
        self.add("goes on to its end", wrong, time.monotonic() - began, "-", silent, said)

    def elastic(self) -> None:
        """A checkpoint of 4 ranks goes on with the 2 of the first node."""
        silent = self.directory / "elastic" / "silent"
        began = time.monotonic()
        program = [str(ELASTIC), str(self.directory / "elastic")]
        wrong = self.to_the_end("elastic-4", [*program, "8"], silent)
        wrong = wrong or self.to_the_end("elastic-2", [*program, "16"], silent, nodes=1)
        wrong = wrong or steps_missing(silent, 16) or alarms(silent)
        told = [event for event in events_of(silent) if event["kind"] == "ranks-changed"]
        sizes = [record["world_size"] for record in metrics_of(silent)]
        if not wrong and sizes != [4] * 8 + [2] * 8:
            wrong = f"the records' world sizes are {sizes}"
        if not wrong and [event["step"] for event in told] != [9]:
            wrong = "no single ranks-changed event at the first step with 2 ranks"
        said = told[0]["message"] if told else ""
        self.add("4 ranks, then 2", wrong, time.monotonic() - began, "-", silent, said)

    def add(self, name: str, wrong: str, seconds: float | None, bound: str, silent: Path, said: str = "") -> None:
        """A row, said at once too."""
        ended = "-" if seconds is None else f"{seconds:.1f} s"
        steps = [] if unreadable(silent) else [record["step"] for record in metrics_of(silent)]
        read = f"{len(steps)} records, to step {max(steps, default=0)}, {len(events_of(silent))} events"
        self.rows.append(Outcome(name, not wrong, ended, bound, read, wrong or said))
        print(f"nodes: {name}: {'good' if not wrong else 'NOT GOOD'} ({ended}; {read}) {wrong or said}", flush=True)


def metrics_of(silent: Path) -> list[dict[str, Any]]:
    """All records, in the order of the file."""
    from ds_silent.sinks.jsonl import read_metrics

    path = silent / "metrics.jsonl"
    return list(read_metrics(path)) if path.exists() else []


def events_of(silent: Path) -> list[dict[str, Any]]:
    """All events; none where there is no file."""
    from ds_silent.sinks.jsonl import read_events

    return list(read_events(silent / "events.jsonl")) if (silent / "events.jsonl").exists() else []


def unreadable(silent: Path) -> str:
    """Why the records cannot be read; "" if they can."""
    try:
        return "" if metrics_of(silent) else "no record was written"
    except (OSError, ValueError) as error:
        return f"the records cannot be read ({error})"


def steps_missing(silent: Path, steps: int) -> str:
    """Which steps have no record; "" if all have."""
    missing = sorted(set(range(1, steps + 1)) - {record["step"] for record in metrics_of(silent)})
    return f"steps {missing} have no record" if missing else ""


def alarms(silent: Path) -> str:
    """What was told and is more than information."""
    told = [f"{event['kind']} at step {event['step']}" for event in events_of(silent) if event["severity"] != "info"]
    return f"events of a healthy training: {', '.join(told)}" if told else ""


def last_line(said: str) -> str:
    """The last line that is no rule and no blank."""
    lines = [line.strip() for line in said.splitlines() if len(set(line.strip())) > 2]
    return lines[-1][:200] if lines else "nothing was said"


def sentence_of(said: str) -> str:
    """What the program itself has said of its end, if it has."""
    told = [line.strip() for line in said.splitlines() if line.startswith("error: ")]
    return told[-1] if told else "no sentence"


def run(built: Network, directory: Path) -> list[Outcome]:
    """All that is tried, one after the other."""
    trial = Trial(built, directory)
    trial.healthy()
    victim = 2 * PER_NODE - 1
    trial.fault(
        "one rank killed",
        FAULT_AT[0],
        lambda job: os.kill(job.rank_pid(victim), signal.SIGKILL),
        AT_ONCE,
        "connection closed, torchrun",
    )
    trial.fault("a node killed", FAULT_AT[1], lambda job: built.nodes[1].kill(), AT_ONCE, "connection closed, torchrun")
    how = built.lose(LOSS)
    trial.fault(
        f"{LOSS} % loss, then cut", FAULT_AT[2], lambda job: built.down(), AFTER_TIMEOUT, "torch's time-out",
        f" (loss by {how})",
    )  # fmt: skip
    built.up()
    trial.to_its_end()
    trial.elastic()
    return trial.rows


def table_of(rows: Sequence[Outcome]) -> Table:
    """The rows as they are printed."""
    table = Table(title=f"2 nodes x {PER_NODE} ranks, torchrun's c10d rendezvous", title_justify="left")
    for heading in ("what", "good", "ended after", "bound", "records", "said"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(row.name, "yes" if row.good else "NO", row.ended, row.bound, row.records, escape(row.said))
    return table


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--output", type=Path, help="where logs and records stay; else they go when all was good")
    chosen = parser.parse_args(arguments)
    try:
        refuse_without(shutil.which, os.geteuid(), sys.platform)
        with ExitStack() as stack:
            directory = chosen.output or Path(tempfile.mkdtemp(prefix="ds_silent_nodes_"))
            directory.mkdir(parents=True, exist_ok=True)
            rows = run(stack.enter_context(network()), directory)
    except Missing as error:
        print(f"nodes: {error}", file=sys.stderr)
        return 2
    except Interrupted as error:
        print(f"nodes: ended by {error}; the nodes and what ran in them are gone", file=sys.stderr)
        return 130
    Console(width=160).print(table_of(rows))
    good = all(row.good for row in rows)
    if good and chosen.output is None:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        print(f"nodes: logs and records are in {directory}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
