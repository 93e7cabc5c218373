"""A real SLURM of several nodes on this one machine, on loopback, without root or systemd.

Every daemon lives in one folder and writes only there. Nodes are slurmd processes with a port each; SLURM believes that
they are machines, so that a job over two nodes takes the road of a real one, except for the network.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.needs import path_of

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
"""Programs of Debian's munge, slurmctld, slurmd and slurm-client."""

SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ReturnToService=2
JobRequeue=1
KillWait=5
MinJobAge=3600
MaxArraySize=100
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 State=UP
"""


@dataclass
class Cluster:
    """A running cluster; `environment` is what its clients need."""

    folder: Path
    nodes: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """This process's, with the cluster's configuration."""
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(self, *command: str, check: bool = True) -> str:
        """Output of a SLURM command."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        if check and done.returncode:
            raise RuntimeError(f"{command}: {done.stderr}")
        return done.stdout

    def job_states(self) -> dict[str, str]:
        """State of every job that is remembered, by `123` or `123_4`."""
        found = {}
        for line in self.ask("squeue", "--noheader", "--array", "--states=all", "--format=%F|%K|%T").splitlines():
            main, index, state = line.split("|")
            found[f"{main}_{index}" if index.isdigit() else main] = state
        return found

    def hold(self) -> None:
        """Let no job start; they queue."""
        self.ask("scontrol", "update", "partitionname=main", "state=down")

    def go(self) -> None:
        """Let jobs start again."""
        self.ask("scontrol", "update", "partitionname=main", "state=up")

    def preempt(self, job: str) -> None:
        """Send what a scheduler sends before it takes the nodes away.

        To the step of a plain job number: for `123_4` with elements still waiting scancel takes the signal for
        undelivered and goes on sending it, also to the job's next start.
        """
        command = ["scancel", "--signal=USR2", f"{job}.0"]
        with contextlib.suppress(subprocess.TimeoutExpired):  # a second signal would come after five seconds
            subprocess.run(command, env=self.environment, capture_output=True, timeout=4, check=False)

    def start_now(self, job: str) -> None:
        """Start a requeued job without the two minutes that SLURM waits."""
        time.sleep(2.0)  # slurmd takes a credential of the second of the kill for the killed job's, and runs nothing
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now")

    def kill_node(self, name: str) -> None:
        """End a node as a power failure does: its slurmd, and all that runs in its jobs, without a word."""
        pid = int((self.folder / f"slurmd-{name}.pid").read_text())
        doomed = [psutil.Process(pid), *_of_node(name, self.folder)]
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def start_node(self, name: str) -> None:
        """Start a node's slurmd, anew where it was killed, and let the node be used."""
        _daemon(self, "slurmd", "-N", name, "-f", str(self.folder / "slurm.conf"))
        deadline = time.monotonic() + 60
        while "down" in self.ask("sinfo", "-h", "-n", name, "-o", "%T") and time.monotonic() < deadline:
            time.sleep(0.2)

    def clear(self) -> None:
        """End all jobs, and let new ones start."""
        self.ask("scancel", f"--user={os.getuid()}")
        self.go()
        deadline = time.monotonic() + 60
        while self.ask("squeue", "--noheader"):
            if time.monotonic() > deadline:
                raise RuntimeError(f"jobs do not end\n{self.describe()}")
            time.sleep(0.1)

    def describe(self) -> str:
        """Queue, nodes and logs, for the message of a failed test."""
        return "\n".join([self.ask("squeue", "--array"), self.ask("sinfo", "-N", "-l"), self.log()])

    def log(self) -> str:
        """What the daemons have to say of a failure."""
        parts = [f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log"))]
        return "\n".join(parts)


def _of_node(name: str, folder: Path) -> Iterator[psutil.Process]:
    """Processes of this cluster's jobs on a node, and the slurmstepds above them."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            if environment.get("SLURMD_NODENAME") == name and environment.get("SLURM_CONF") == str(
                folder / "slurm.conf"
            ):
                parent = process.parent()
                if parent is not None and parent.name().startswith("slurmstepd"):
                    yield parent
                yield process


@contextlib.contextmanager
def running(folder: Path, *, nodes: int = 2, cpus: int = 2, more: str = "") -> Iterator[Cluster]:
    """munged, slurmctld and one slurmd a node for the time of the block, which begins when all nodes are idle.

    Args:
        folder: of every file of the cluster.
        nodes: how many machines SLURM believes in.
        cpus: processors of each.
        more: further lines of slurm.conf.

    Raises:
        RuntimeError: they are not within 30 seconds; the message holds the daemons' logs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    cluster = Cluster(folder, tuple(f"n{number + 1}" for number in range(nodes)))
    try:
        _configure(cluster, cpus, more)
        _munge(folder)
        _daemon(cluster, "slurmctld", "-c", "-f", str(folder / "slurm.conf"))
        for name in cluster.nodes:
            (folder / f"spool-{name}").mkdir(exist_ok=True)
            _daemon(cluster, "slurmd", "-N", name, "-f", str(folder / "slurm.conf"))
        deadline = time.monotonic() + 30
        while {*cluster.ask("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False).split()} != {*cluster.nodes}:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the nodes did not become idle\n{cluster.log()}")
            time.sleep(0.1)
        yield cluster
    finally:
        stop(folder)


def _configure(cluster: Cluster, cpus: int, more: str) -> None:
    host = socket.gethostname().partition(".")[0]
    ports = _free_ports(len(cluster.nodes) + 1)
    text = SLURM_CONF.format(host=host, port=ports[0], user=getpass.getuser(), folder=cluster.folder)
    for name, port in zip(cluster.nodes, ports[1:], strict=True):
        text += (
            f"NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs={cpus} Sockets=1 "
            f"CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN\n"
        )
    (cluster.folder / "slurm.conf").write_text(text + more)
    (cluster.folder / "cgroup.conf").write_text("CgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\n")
    (cluster.folder / "state").mkdir(exist_ok=True)


def _free_ports(count: int) -> list[int]:
    """Of those that no system gives to a client."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found += [port] * (port not in found)
    return found


def _munge(folder: Path) -> None:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
    names |= {"log-file": "munged.log", "seed-file": "munge.seed"}
    options = [f"--{option}={folder / name}" for option, name in names.items()]
    subprocess.run([str(path_of("munged")), "--force", *options], check=True, capture_output=True)


def _daemon(cluster: Cluster, name: str, *arguments: str) -> None:
    command = [str(path_of(name)), *arguments]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr}\n{cluster.log()}")


def stop(folder: Path) -> None:
    """End a folder's jobs, then its daemons, slurmds first; what does not go in five seconds is killed.

    Jobs first: their processes are no children of the daemons, and would outlive them.
    """
    with contextlib.suppress(RuntimeError, OSError, subprocess.TimeoutExpired):
        Cluster(folder, ()).clear()
    for path in [*folder.glob("slurmd-*.pid"), folder / "slurmctld.pid", folder / "munged.pid"]:
        if not path.exists() or not path.read_text().strip():
            continue
        pid = int(path.read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + 5
            while _lives(pid) and time.monotonic() < deadline:
                time.sleep(0.05)
            if _lives(pid):
                os.kill(pid, signal.SIGKILL)
        path.unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
