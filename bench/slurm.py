"""Slurm of one node on loopback: munged, slurmctld and slurmd as our own children.

Run as root, which slurmd must be.  Every file is in one temporary folder; every port listens on
127.0.0.1.  The scheduler is set to look at once, so that its usual batching is not measured.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from bench.stamps import wait_for

_CONF = """
ClusterName=rlqbench
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherType=jobacct_gather/none
KillWait=3
DefMemPerCPU=10
NodeName=n1 NodeHostname=n1 NodeAddr=127.0.0.1 Port={node_port} CPUs={cpus} RealMemory=2000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_port() -> int:
    """One of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Slurm:
    """`start`, then `env` finds it.

    Raises:
        FileNotFoundError: it is not installed, or we are not root.
    """

    def __init__(self, cpus: int) -> None:
        for program in ("munged", "slurmctld", "slurmd", "sbatch", "sinfo"):
            if shutil.which(program) is None:
                raise FileNotFoundError(program)
        if os.geteuid() != 0:
            raise FileNotFoundError("root (slurmd needs it)")
        self.folder = Path(tempfile.mkdtemp(prefix="rlq-slurm-"))
        self.folder.chmod(0o755)  # munged refuses a socket that others cannot reach
        self.conf = self.folder / "slurm.conf"
        self.conf.write_text(
            _CONF.format(
                host=socket.gethostname().partition(".")[0],
                folder=self.folder,
                port=free_port(),
                node_port=free_port(),
                cpus=cpus,
            )
        )
        self.env = dict(os.environ) | {"SLURM_CONF": str(self.conf)}
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        (self.folder / "state").mkdir()
        at = self.folder
        try:
            self._spawn(
                *("munged", "--foreground", "--force", f"--key-file={key}"),
                *(f"--socket={at}/munge.sock", f"--pid-file={at}/munged.pid"),
                *(f"--log-file={at}/munged.log", f"--seed-file={at}/munged.seed"),
            )
            wait_for((at / "munge.sock").exists, bool, 10)
            self._spawn("slurmctld", "-D", "-c", "-f", str(self.conf))
            self._spawn("slurmd", "-D", "-N", "n1", "-f", str(self.conf))
            wait_for(self._idle_nodes, lambda idle: idle == "1", 30)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for child in reversed(self._children):
            child.terminate()
        for child in reversed(self._children):
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _spawn(self, *argv: str) -> None:
        with (self.folder / f"{argv[0]}.out").open("wb") as out:
            self._children.append(
                subprocess.Popen(
                    argv, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
                )
            )

    def _idle_nodes(self) -> str:
        asked = subprocess.run(
            ["sinfo", "-h", "-t", "idle", "-o", "%D"],
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        return asked.stdout.strip()
