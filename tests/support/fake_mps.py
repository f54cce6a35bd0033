"""A fake `nvidia-cuda-mps-control`: behaves as NVIDIA documents it, with its state in folders.

As a module it drives the fake; run as a program it IS the fake (a script of that name on PATH
runs this file with `python -S`).

The state of a control daemon lies in its pipe directory, as the real one's sockets do:

    control            it runs; the words it was started with
    clients/PID        a client of its server: "uid".  A client that ends properly removes its file
    terminated/PID     `terminate_client` was used on it

What is to go wrong lies in FAKE_MPS_FOLDER: `hang` and `fail` name commands, one a line;
`refusals` says how many times it is busy with somebody else; `calls` is a log of every command;
`server` is the pid shown as the server's (it must exist).

As documented: one server; a client that dies of a signal without having been terminated leaves
the server in FAULT until every client has gone; a command to no daemon exits with 1.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

#: For a fake job: become a client of the control daemon that the environment points to, if there
#: is one.  The real CUDA driver does this in cuInit, and says nothing where there is none.
CLIENT = """
import atexit, os, pathlib
mps = pathlib.Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
if (mps / "control").exists() and not os.environ.get("FAKE_MPS_MISSES"):
    me = mps / "clients" / str(os.getpid())
    me.write_text(str(os.getuid()))
    atexit.register(lambda: me.unlink(missing_ok=True))
"""


class FakeMps:
    """One control daemon's world: its program, its pipe directory, and what goes wrong in it."""

    def __init__(self, folder: Path, server: int | None = None) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.pipe_dir = folder / "pipe"
        self.log_dir = folder / "log"
        self.bin.mkdir(parents=True)
        program = self.bin / "nvidia-cuda-mps-control"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {__file__} "$@"\n')
        program.chmod(0o755)
        (folder / "server").write_text(str(server or os.getpid()))

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "FAKE_MPS_FOLDER": str(self.folder),
        }

    def run(self) -> None:
        """Somebody starts the control daemon."""
        _start(self.pipe_dir, "-d")

    def die(self) -> None:
        (self.pipe_dir / "control").unlink()

    def runs_with(self) -> str | None:
        """The words it was started with; None: it does not run."""
        control = self.pipe_dir / "control"
        return control.read_text() if control.exists() else None

    def hang(self, *commands: str) -> None:
        (self.folder / "hang").write_text("\n".join(commands))

    def fail(self, *commands: str) -> None:
        (self.folder / "fail").write_text("\n".join(commands))

    def refuse(self, times: int) -> None:
        (self.folder / "refusals").write_text(str(times))

    def attach(self, pid: int) -> None:
        (self.pipe_dir / "clients" / str(pid)).write_text(str(os.getuid()))

    def calls(self) -> list[str]:
        log = self.folder / "calls"
        return log.read_text().splitlines() if log.exists() else []

    def status(self) -> str:
        return _server_status(self.pipe_dir)


def _start(pipe: Path, words: str) -> None:
    (pipe / "clients").mkdir(parents=True, exist_ok=True)
    (pipe / "terminated").mkdir(exist_ok=True)
    (pipe / "control").write_text(words)


def _clients(pipe: Path) -> list[int]:
    return sorted(int(path.name) for path in (pipe / "clients").iterdir())


def _is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def _server_status(pipe: Path) -> str:
    died = [pid for pid in _clients(pipe) if not _is_alive(pid)]
    if any(not (pipe / "terminated" / str(pid)).exists() for pid in died):
        return "FAULT"
    return "ACTIVE"


def _connected(pipe: Path) -> list[int]:
    return [
        pid
        for pid in _clients(pipe)
        if _is_alive(pid) and not (pipe / "terminated" / str(pid)).exists()
    ]


def _answer(words: list[str], pipe: Path, folder: Path) -> str:
    server = (folder / "server").read_text()
    match words:
        case ["get_server_list"]:
            return server if _clients(pipe) else ""
        case ["get_server_status", pid]:
            return _server_status(pipe) if pid == server else f"Server {pid} not found"
        case ["get_client_list", pid]:
            if pid != server:
                return f"Server {pid} not found"
            return "\n".join(map(str, _connected(pipe)))
        case ["terminate_client", pid, client]:
            if pid != server:
                return f"Server {pid} not found"
            if int(client) not in _connected(pipe):
                return f"Invalid process {client}!"
            (pipe / "terminated" / client).touch()
            return "0"
        case ["quit"]:
            (pipe / "control").unlink()
            return ""
        case _:
            return f"Unrecognized command: {words[0]}"


def _named(folder: Path, file: str, command: str) -> bool:
    path = folder / file
    return path.exists() and command in path.read_text().split()


def _is_refused(folder: Path) -> bool:
    path = folder / "refusals"
    left = int(path.read_text()) if path.exists() else 0
    path.write_text(str(max(0, left - 1)))
    return left > 0


def main(argv: list[str]) -> int:
    folder = Path(os.environ["FAKE_MPS_FOLDER"])
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    commands = [line.split() for line in sys.stdin.read().splitlines() if line] if not argv else []
    with (folder / "calls").open("a") as calls:
        for words in commands or [argv]:
            calls.write(" ".join(words) + "\n")
    for words in commands or [argv]:
        if _named(folder, "hang", words[0]):
            time.sleep(3600)
        if _named(folder, "fail", words[0]):
            print(f"{words[0]} failed")
            return 1
        if _is_refused(folder):
            print("Cannot send command to MPS control daemon process")
            return 1
    if argv:
        if (pipe / "control").exists():
            print("An instance of this daemon is already running")
            return 1
        _start(pipe, " ".join(argv))
        return 0
    if not (pipe / "control").exists():
        print("Cannot find MPS control daemon process")
        return 1
    for words in commands:
        print(_answer(words, pipe, folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
