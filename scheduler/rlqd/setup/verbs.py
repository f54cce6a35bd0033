"""`rlqd install` and `rlqd uninstall`."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import zmq

import rlq.version
import rlqd
from rlq.errors import (
    NotPermittedError,
    RefusedError,
    RlqError,
    UnavailableError,
    UsageError,
)
from rlq.protocol import messages as wire
from rlq.protocol.states import LIVE_STATES, JobState
from rlq.version import VERSION
from rlqd.adapters.processes import running_attempts
from rlqd.setup import reach, unit
from rlqd.setup.service import UNIT, Service, system_service, user_service

WAITING = (JobState.PENDING,)


def install(*, user: bool, dry_run: bool) -> None:
    """Raises: RlqError."""
    if dry_run:
        _show(user_service() if user else system_service())
        return
    _require_right_user(user, "install")
    service = user_service() if user else system_service()
    service.require_systemd()
    program = this_program()
    _require_fitness(service, program)
    running = _running(service)[0]
    before = service.version() if service.is_active() else ""
    # A drop-in that systemd has not read yet.
    stale = service.needs_reload()
    changed = _write_unit(service, program) or stale
    service.systemctl("daemon-reload")
    if not service.is_enabled():
        service.systemctl("enable", UNIT)
        _say("enabled", f"{UNIT}: it starts {'when you log in' if user else 'at boot'}")
    _run_it(service, program, before, changed=changed)
    pong = _verify(service)
    if before and before != pong.version:
        _say("version", f"{before} before, {pong.version} now")
    if running:
        _say("jobs", f"{_jobs(running)} meanwhile; nothing was stopped")
    _tell_where(service, program)


def uninstall(*, user: bool, purge: bool, force: bool) -> None:
    """Raises: RlqError."""
    _require_right_user(user, "uninstall")
    service = user_service() if user else system_service()
    service.require_systemd()
    running, waiting, state_dir = _running(service)
    if running and (purge or not force):
        raise RefusedError(
            f"{_jobs(running)}: nobody would look after them any more",
            hint="wait for them (`rlq drain` starts no more) or `rlq cancel --all`"
            + (
                "" if purge else "; with --force they run on, and a later install finds them again"
            ),
        )
    known = service.unit_path.is_file() or service.is_active() or service.is_enabled()
    if service.is_active():
        service.systemctl("stop", UNIT)
        _say("stopped", UNIT)
    if service.is_enabled():
        service.systemctl("disable", UNIT)
        _say("disabled", UNIT)
    if service.unit_path.is_file():
        if unit.is_ours(service.unit_path.read_text()):
            service.unit_path.unlink()
            _say("removed", service.unit_path)
        else:
            _say("kept", f"{service.unit_path}: it was edited, or written by hand")
        service.systemctl("daemon-reload")
    if not known:
        _say("nothing", f"there is no {service.unit_path}")
    for drop_in in service.drop_ins:
        _say("kept", drop_in)
    if running:
        _say("jobs", f"{_jobs(running)} on; install again, and they are found")
    if service.config_path.exists():
        _say("kept", service.config_path)
    _leave_state(state_dir, waiting, purge=purge)


def _leave_state(state_dir: Path, waiting: int, *, purge: bool) -> None:
    if not state_dir.is_dir():
        return
    if not purge:
        queue = (
            f"the queue ({waiting} waiting), history and logs" if waiting else "history and logs"
        )
        _say("kept", f"{state_dir}: {queue}; --purge removes it")
        return
    # Whatever a drop-in made of it: only a folder that is rlqd's is removed.
    if not (state_dir / "rlq.db").is_file():
        raise RefusedError(
            f"{state_dir} does not look like rlqd's state folder: it holds no rlq.db",
            hint="remove by hand what you want to be rid of",
        )
    try:
        shutil.rmtree(state_dir)
    except OSError as error:
        raise UnavailableError(f"cannot remove {state_dir}: {error}") from error
    _say("removed", f"{state_dir}: the queue, history and logs")


# ---- parts of install ---------------------------------------------------------------


def this_program() -> tuple[str, ...]:
    """What ExecStart= has to say to start this very installation."""
    # Not resolved: /opt/rlq may be a link that an upgrade moves.
    script = Path(sys.executable).with_name("rlqd")
    if os.access(script, os.X_OK):
        return (str(script),)
    return (sys.executable, "-P", "-m", "rlqd")


def _require_right_user(user: bool, verb: str) -> None:
    is_root = os.geteuid() == 0
    if user and is_root:
        raise UsageError(
            "--user is for one person's own daemon, and this is root",
            hint=f"run it as yourself, without sudo; for everybody: rlqd {verb}",
        )
    if not user and not is_root:
        raise NotPermittedError(
            f"only root can {verb} the daemon for everybody",
            hint=f"sudo {' '.join(this_program())} {verb}; or for yourself alone:"
            f" rlqd {verb} --user",
        )


def _require_fitness(service: Service, program: tuple[str, ...]) -> None:
    masked = service.unit_path
    if masked.is_symlink() and os.readlink(masked) == "/dev/null":
        raise RefusedError(
            f"{UNIT} is masked", hint=f"{service.systemctl_line} unmask rlqd, and run it again"
        )
    if not service.user:
        reach.require_shared(_files(program), sys.executable)


def _files(program: tuple[str, ...]) -> list[str]:
    """Of everything that the daemon, its jobs' supervisors and `rlq` are made of, one each."""
    modules = (os, rlq.version, rlqd, click, msgspec, zmq)
    return [program[0], sys.executable, *(str(module.__file__) for module in modules)]


def _unit_text(service: Service, program: tuple[str, ...]) -> str:
    edit = f"{service.systemctl_line} edit rlqd"
    return unit.render(unit.template(user=service.user), program, version=VERSION, edit=edit)


def _write_unit(service: Service, program: tuple[str, ...]) -> bool:
    """Whether it changed anything."""
    path, text = service.unit_path, _unit_text(service, program)
    for drop_in in service.drop_ins:
        _say("kept", f"{drop_in}: your changes hold")
    old = path.read_text() if path.is_file() else None
    if old == text:
        _say("unchanged", path)
        return False
    if old is not None and not unit.is_ours(old):
        _say("kept", f"{path}: it was edited, or written by hand")
        if (starts := unit.exec_start(old)) != " ".join(program):
            _say("", f"NOTE: it starts {starts or 'nothing'}, not {' '.join(program)}")
        _say(
            "",
            f"to have ours: move it away, put your changes in `{service.systemctl_line} edit"
            " rlqd`,",
        )
        _say("", "and install again")
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_text(text)
        part.chmod(0o644)
        part.replace(path)
    except OSError as error:
        raise UnavailableError(f"cannot write {path}: {error.strerror}") from error
    _say("wrote" if old is None else "changed", path)
    for line in unit.changes(old, text) if old is not None else ():
        _say("", line)
    return True


def _run_it(service: Service, program: tuple[str, ...], before: str, *, changed: bool) -> None:
    """Start it, or restart it where what runs is not this installation with this unit."""
    if service.is_active():
        pid = service.main_pid()
        if before == VERSION and not changed and _runs(pid, service, program):
            _say("unchanged", f"rlqd {VERSION} runs already, pid {pid}")
            return
        _systemctl_or_why(service, "restart")
        _say("restarted", f"{UNIT}: jobs run on")
        return
    if service.user:
        _take_over(service)
    # After too many failed starts systemd refuses more.
    with contextlib.suppress(UnavailableError):
        service.systemctl("reset-failed", UNIT)
    _systemctl_or_why(service, "start")
    _say("started", UNIT)


def _runs(pid: int, service: Service, program: tuple[str, ...]) -> bool:
    """Whether the process is of this installation, or of the one that an edited unit names."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return program[0] in words or not unit.is_ours(service.unit_path.read_text())


def _take_over(service: Service) -> None:
    """From the daemon that the first `rlq` command has started: one state folder, one daemon."""
    try:
        pong = service.ask(wire.Ping(), wire.Pong)
        service.ask(wire.Stop(), wire.Ok)
    except RlqError:
        return  # none runs; or start will say what is wrong
    service.await_end()
    _say("took over", f"from rlqd {pong.version}, pid {pong.pid}, which systemd did not know")


def _systemctl_or_why(service: Service, what: str) -> None:
    try:
        service.systemctl(what, UNIT)
    except UnavailableError as error:
        said = service.last_words()
        message = f"the unit is written, but rlqd does not {what}"
        raise UnavailableError(
            f"{message}; its journal ends:\n{said}" if said else f"{message}: {error.message}",
            hint=error.hint,
        ) from error


def _verify(service: Service) -> wire.Pong:
    pong = service.ask(wire.Ping(), wire.Pong)
    if pong.pid != service.main_pid():
        raise UnavailableError(
            f"another daemon (pid {pong.pid}) answers on {service.socket}",
            hint="stop it (`rlq daemon stop`) and install again; its jobs run on",
        )
    if pong.version != VERSION:
        _say("NOTE", f"rlqd {pong.version} runs, and this is {VERSION}: see ExecStart= above")
    _say("verified", f"rlqd {pong.version}, pid {pong.pid}, answers")
    return pong


def _running(service: Service) -> tuple[int, int, Path]:
    """How many jobs run and wait, and in which state folder."""
    try:
        status = service.ask(wire.Status(), wire.DaemonStatus)
    except RlqError:
        # Stopped, or of another protocol: its supervisors' locks tell.
        return len(running_attempts(service.state_dir / "run")), 0, service.state_dir
    waiting = sum(status.counts.get(state, 0) for state in WAITING)
    live = sum(status.counts.get(state, 0) for state in LIVE_STATES)
    return live - waiting, waiting, Path(status.state_dir)


# ---- words ---------------------------------------------------------------------------


def _say(what: str, rest: object) -> None:
    click.echo(f"{what:<10} {rest}".rstrip())


def _jobs(running: int) -> str:
    return "1 job runs" if running == 1 else f"{running} jobs run"


def _tell_where(service: Service, program: tuple[str, ...]) -> None:
    state_dir, config = service.state_dir, str(service.config_path)
    with contextlib.suppress(RlqError):
        status = service.ask(wire.Status(), wire.DaemonStatus)
        state_dir, config = Path(status.state_dir), status.config_path
    click.echo()
    _say("program", " ".join(program))
    _say("config", config or f"{service.config_path} (not there: built-in defaults)")
    _say("state", f"{state_dir}: the queue, history, logs")
    _say("socket", service.socket)
    _say("log", service.journal_line)
    click.echo("\nnext:")
    for line in _next_steps(service):
        click.echo(f"  {line}")


def _next_steps(service: Service) -> Iterator[str]:
    rlq_command = Path(sys.executable).with_name("rlq")
    places = "/usr/local/bin:/usr/bin:/bin" if not service.user else None
    if shutil.which("rlq", path=places) is None:
        folder = "~/.local/bin" if service.user else "/usr/local/bin"
        yield f"ln -s {rlq_command} {folder}/    # `rlq` on the PATH"
    if service.user:
        name = pwd.getpwuid(os.geteuid()).pw_name
        if not Path(f"/var/lib/systemd/linger/{name}").exists():
            yield "loginctl enable-linger    # or it stops when you log out"
    yield "rlq doctor                # is all well here?"
    yield "rlq submit -- python train.py"


def _show(service: Service) -> None:
    """What install would do; then what would keep it from doing so.  Raises: RlqError."""
    program = this_program()
    click.echo(f"# would write {service.unit_path}:\n")
    click.echo(_unit_text(service, program), nl=False)
    old = service.unit_path.read_text() if service.unit_path.is_file() else None
    if old is not None and not unit.is_ours(old):
        click.echo(f"\n# but it would keep {service.unit_path}: it was edited, or written by hand")
    click.echo(f"\n# would run: {service.systemctl_line} daemon-reload")
    click.echo(f"#            {service.systemctl_line} enable {UNIT}")
    click.echo(f"#            {service.systemctl_line} start {UNIT} (restart, if it runs)")
    click.echo("# would wait until the daemon answers")
    _require_fitness(service, program)
    service.require_systemd()
    _require_right_user(service.user, "install")
