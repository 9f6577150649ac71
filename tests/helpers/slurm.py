"""A Slurm cluster on this machine: munged, slurmctld and some slurmd on loopback, from Debian's packages.

Several nodes are several slurmd of one host (its build has --enable-multiple-slurmd). Needs root, because slurmd does;
if a program is missing, tests are skipped with that reason. No process outlives the tests: a guard of its own process
group kills all of the cluster when the tests end, even if they were killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.helpers.house_rules import ROOT

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
# Reads until the tests have closed their end of the pipe, or are gone.
GUARD = "import sys; from tests.helpers.slurm import kill_all; sys.stdin.read(); kill_all(sys.argv[1])"


def missing() -> str | None:
    """Why no cluster can run here; None: it can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"Slurm is not installed: no {', '.join(absent)} (make cluster-test installs it)"
    return "slurmd needs root" if os.getuid() else None


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


class Slurm:
    """A running cluster.

    Args:
        folder: its state and logs.
        nodes: how many slurmd.
        cpus: of each.
        max_array: the site's MaxArraySize.
    """

    def __init__(self, folder: Path, *, nodes: int, cpus: int, max_array: int) -> None:
        self.folder, self.nodes = folder, nodes
        self._conf_path = folder / "slurm.conf"
        self.environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(self._conf_path)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", *(f"spool-n{number}" for number in range(1, nodes + 1))):
            (folder / name).mkdir(parents=True)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        folder.chmod(0o755)
        (folder / "slurm.conf").write_text(self._conf(cpus, max_array))
        # A GPU in name only, so that --gpus-per-node has something to give.
        (folder / "gres.conf").write_text(f"NodeName=n[1-{nodes}] Name=gpu File=/dev/null\n")

    def _conf(self, cpus: int, max_array: int) -> str:
        host = socket.gethostname().split(".")[0]
        ports = [_free_port() for _ in range(self.nodes + 1)]
        lines = [
            "ClusterName=test", f"SlurmctldHost={host}(127.0.0.1)", f"SlurmctldPort={ports[0]}",
            "AuthType=auth/munge", f"AuthInfo=socket={self.folder}/munge.socket,cred_expire=5",
            "SlurmUser=root", "SlurmdUser=root",
            f"StateSaveLocation={self.folder}/state", f"SlurmdSpoolDir={self.folder}/spool-%n",
            f"SlurmctldPidFile={self.folder}/slurmctld.pid", f"SlurmdPidFile={self.folder}/slurmd-%n.pid",
            f"SlurmctldLogFile={self.folder}/slurmctld.log", f"SlurmdLogFile={self.folder}/slurmd-%n.log",
            "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "SwitchType=switch/none",
            "MpiDefault=none", "ReturnToService=2", "SelectType=select/cons_tres", "SelectTypeParameters=CR_CPU",
            f"MaxArraySize={max_array}", "SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1",
            "GresTypes=gpu",
            "EnforcePartLimits=ALL",
            "JobRequeue=1", "KillWait=2", "MinJobAge=600", "SlurmctldTimeout=30", "SlurmdTimeout=30", "InactiveLimit=0",
            *(
                f"NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[n]} CPUs={cpus} Gres=gpu:1 "
                "State=UNKNOWN"
                for n in range(1, self.nodes + 1)
            ),
            f"PartitionName=all Nodes=n[1-{self.nodes}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO",
            f"PartitionName=lm Nodes=n[1-{self.nodes}] AllowAccounts=lm",
        ]  # fmt: skip
        return "\n".join(lines) + "\n"

    def start(self) -> None:
        """Start the guard and all daemons, and wait until the nodes are idle."""
        guard = [sys.executable, "-c", GUARD, str(self._conf_path)]
        self._guard = subprocess.Popen(guard, cwd=ROOT, stdin=subprocess.PIPE, process_group=0)
        munge = ["--socket", str(self.folder / "munge.socket"), "--key-file", str(self.folder / "munge.key")]
        munge += ["--pid-file", str(self.folder / "munge.pid"), "--log-file", str(self.folder / "munge.log")]
        self._spawn("munged", ["munged", "--foreground", "--force", *munge, f"--seed-file={self.folder}/munge.seed"])
        _wait(lambda: (self.folder / "munge.socket").exists(), "munged does not start")
        self._spawn("slurmctld", ["slurmctld", "-D", "-i"])
        for number in range(1, self.nodes + 1):
            self._spawn(f"n{number}", ["slurmd", "-D", "-N", f"n{number}"])
        _wait(lambda: self.run("sinfo", "-h", "-o", "%t %D").split() == ["idle", str(self.nodes)], "no idle nodes")

    def run(self, *words: str) -> str:
        """The output of one of Slurm's commands; empty if it fails."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    def kill_node(self, name: str, *, ranks: bool = True) -> None:
        """Kill a node's slurmd; with `ranks` also what it has started, as if its machine had died."""
        self._processes.pop(name).kill()
        for pid, parent in self._started_on(name) if ranks else []:
            for number in {parent, pid} - {1}:  # slurmstepd, too: it would report the end of its tasks
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)

    def start_node(self, name: str) -> None:
        """Start a node's slurmd again, and wait until it is idle."""
        self._spawn(name, ["slurmd", "-D", "-N", name])
        self.run("scontrol", "update", f"nodename={name}", "state=resume")
        _wait(lambda: self.run("sinfo", "-h", "-n", name, "-o", "%t") == "idle", f"{name} is not idle")

    def _started_on(self, name: str) -> list[tuple[int, int]]:
        """(process, its parent) of what a node runs for jobs of this cluster."""
        node = f"SLURMD_NODENAME={name}".encode()
        return [(pid, parent) for pid, parent, words in processes_of(self._conf_path) if node in words]

    def stop(self) -> None:
        """End all daemons and what they run."""
        self.run("scancel", "--user=root")
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        self._guard.communicate()  # kills the rest, such as a slurmstepd that wants to tell slurmctld of its end
        for process in self._processes.values():
            process.wait()

    def _spawn(self, name: str, words: list[str]) -> None:
        log = (self.folder / f"{name}.out").open("wb")
        command = [str(shutil.which(words[0], path=_path())), *words[1:]]
        self._processes[name] = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, process_group=0)
        log.close()


@contextmanager
def slurm(folder: Path, *, nodes: int = 2, cpus: int = 2, max_array: int = 1001) -> Iterator[Slurm]:
    """Run a cluster during the block."""
    made = Slurm(folder, nodes=nodes, cpus=cpus, max_array=max_array)
    with ExitStack() as stack:
        stack.callback(made.stop)
        made.start()
        yield made


def processes_of(conf_path: str | Path) -> Iterator[tuple[int, int, list[bytes]]]:
    """(process, its parent, its environment) of all that was started with this slurm.conf."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            words = (folder / "environ").read_bytes().split(b"\0")
            if f"SLURM_CONF={conf_path}".encode() in words:
                parent = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
                yield int(folder.name), parent, words


def kill_all(conf_path: str) -> None:
    """Kill every process that was started with this slurm.conf, until there is none."""
    while processes := list(processes_of(conf_path)):
        for pid, *_ in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _wait(ready: object, what: str, seconds: float = 40) -> None:
    end = time.monotonic() + seconds
    while not ready():  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.2)
