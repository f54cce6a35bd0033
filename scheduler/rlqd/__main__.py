"""`rlqd`: put the parts together and run until told to stop."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import sys
from pathlib import Path
from typing import NoReturn

import click

from rlq.errors import RlqError
from rlq.paths import daemon_config, daemon_paths
from rlq.version import VERSION
from rlqd import config as configuration

log = logging.getLogger("rlqd")

#: In the state folder: the secret half of the key by which clients know this daemon.
SERVER_KEY_NAME = "server.key"


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    subcommand_metavar="[COMMAND]",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    help="Folder of the database, exit records and logs; one daemon each.",
)
@click.option(
    "--socket", type=click.Path(path_type=Path), help="Unix socket on which clients are served."
)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="TOML file; --print-config shows every key.",
)
@click.option("--print-config", is_flag=True, help="Print the defaults, documented, and exit.")
@click.option(
    "--check-config", is_flag=True, help="Read the configuration, say what is wrong, and exit."
)
@click.option(
    "--ready-fd",
    type=int,
    hidden=True,
    help="Write one line to this descriptor when ready, or the error.",
)
@click.version_option(VERSION, prog_name="rlqd")
@click.pass_context
def main(
    context: click.Context,
    state_dir: Path | None,
    socket: Path | None,
    config_path: Path | None,
    print_config: bool,
    check_config: bool,
    ready_fd: int | None,
) -> None:
    """The daemon of rlq, the job queue for a shared lab workstation.

    Without a COMMAND it runs the daemon, in the foreground.  Usually systemd does that
    (`rlqd install`), or the first `rlq` command.  SIGTERM stops it; running jobs run on and
    are found again.  SIGHUP reads the configuration again.

    Exit codes: 0 stopped as asked, 2 wrong usage or configuration, 7 the state folder cannot
    be used (another daemon, disk full), 70 a bug.
    """
    if context.invoked_subcommand is not None:
        if given := [name for name, value in context.params.items() if value]:
            option = f"--{given[0].replace('_path', '').replace('_', '-')}"
            raise click.UsageError(f"{option} is for the daemon, not for a command of rlqd's")
        return
    if print_config:
        click.echo(configuration.describe(), nl=False)
        return
    try:
        path = config_path if config_path is not None else daemon_config()
        config = configuration.load(path)
        if check_config:
            click.echo(f"{path or 'built-in defaults'}: OK")
            return
        _serve(config, path, state_dir, socket, ready_fd)
    except RlqError as error:
        _tell(ready_fd, _words(error))
        _fail(error)


def _words(error: RlqError) -> str:
    return error.message + (f"\nhint: {error.hint}" if error.hint else "")


def _fail(error: RlqError) -> NoReturn:
    click.echo(f"rlqd: error: {_words(error)}", err=True)
    sys.exit(error.exit_code)


@main.command("install")
@click.option("--user", is_flag=True, help="For yourself alone, without root.")
@click.option("--dry-run", is_flag=True, help="Print what would be done, and why it cannot be.")
def install(user: bool, dry_run: bool) -> None:
    """Have systemd run this rlqd, from now on and at each boot.

    Writes the unit file, enables and starts it, and waits until the daemon answers. Run it again
    after an upgrade: it restarts the daemon, and running jobs run on. A unit that you have
    edited, and `systemctl edit rlqd`, are kept.
    """
    from rlqd.setup import verbs

    try:
        verbs.install(user=user, dry_run=dry_run)
    except RlqError as error:
        _fail(error)


@main.command("uninstall")
@click.option("--user", is_flag=True, help="The daemon that is yours alone.")
@click.option("--purge", is_flag=True, help="Remove the queue, its history and its logs too.")
@click.option("--force", is_flag=True, help="Though jobs run: they run on.")
def uninstall(user: bool, purge: bool, force: bool) -> None:
    """Take back what install did: stop the daemon, and remove the unit file.

    Refuses while jobs run. Keeps the state and the configuration, and a unit that you have
    edited.
    """
    from rlqd.setup import verbs

    try:
        verbs.uninstall(user=user, purge=purge, force=force)
    except RlqError as error:
        _fail(error)


def _serve(
    config: configuration.Config,
    config_path: Path | None,
    state_dir: Path | None,
    socket: Path | None,
    ready_fd: int | None,
) -> None:
    # Imported here, so that --help and a wrong configuration answer at once.
    from rlqd.adapters import curve, host, lockfile, systemd
    from rlqd.adapters.cgroups import Fences, describe
    from rlqd.adapters.mps import Mps
    from rlqd.adapters.nvml import NvmlMonitor
    from rlqd.adapters.processes import Processes
    from rlqd.adapters.reports import ReportSocket
    from rlqd.adapters.sqlite import Store
    from rlqd.adapters.zeromq import Server, check_peer_address
    from rlqd.shell import rlimits
    from rlqd.shell.mps import MpsJobs
    from rlqd.shell.pump import Pump
    from rlqd.shell.remote import Keyring
    from rlqd.shell.sampling import Sampler, usable_cpus
    from rlqd.shell.signals import Signals

    _log_to_stderr(config.daemon.log_level)
    paths = daemon_paths(state_dir, socket)
    # Root serves everybody: the daemon that systemd starts.
    is_shared = os.geteuid() == 0 and "RUNTIME_DIRECTORY" in os.environ
    paths.make(shared=is_shared)
    # Each client and each job takes descriptors, and libzmq aborts where there are none left.
    own_rlimits = rlimits.of_this_process()
    _, nofile_most = own_rlimits["RLIMIT_NOFILE"]
    resource.setrlimit(resource.RLIMIT_NOFILE, (nofile_most, nofile_most))
    with contextlib.ExitStack() as parts:
        # First of all: it rates the CPUs since it was made, and the first reading comes soon.
        host_monitor = host.HostMonitor()
        parts.callback(host_monitor.close)
        parts.enter_context(lockfile.acquire(paths.lock, serves=paths.socket))
        store = parts.enter_context(Store(paths.database))
        fences = Fences(store.instance_id, enabled=config.enforce.mode != "off")
        found = fences.find()
        log.log(
            logging.WARNING if fences.lacking() else logging.INFO,
            "limits of jobs: %s",
            describe(found) + (f" ({found.problem})" if found.problem else ""),
        )
        if found.cgroup is not None:
            host_monitor.set_cgroup(found.cgroup, Path(found.cgroup_root))
        knows_peers = check_peer_address()
        server = parts.enter_context(
            Server(
                paths.socket,
                mode=0o666 if is_shared and knows_peers else 0o600,
                takes_unvouched=not knows_peers,
                message_bytes_max=config.daemon.message_mib_max * 2**20,
                # One user's leave room for everybody else's, and for what jobs take.
                connections_per_user_max=min(1024, nofile_most // 8),
            )
        )
        reports = parts.enter_context(
            ReportSocket(paths.report_socket, mode=0o666 if is_shared else 0o600)
        )
        keyring = Keyring(store=store)
        remote = None
        if config.remote.listen:
            remote = parts.enter_context(
                curve.CurveServer(
                    *configuration.listen_address(config.remote.listen),
                    curve.load_secret(paths.state_dir / SERVER_KEY_NAME),
                    knows=keyring.knows,
                    connections_max=config.remote.connections_max,
                    message_bytes_max=config.remote.message_mib_max * 2**20,
                )
            )
        nvml = NvmlMonitor(retry_s=config.monitor.period_ms / 100)
        sampler = Sampler(
            read_host=host_monitor.read,
            read_gpus=nvml.read,
            cpus=usable_cpus(host.cpus(), config.cpu.include, smt=config.cpu.smt),
            period_s=config.monitor.period_ms / 1000,
            gpus_included=config.gpu.include,
        )
        mps = None
        if config.mps.mode != "off":
            mps = MpsJobs(
                mps=Mps(
                    *mps_folders(config.mps, paths.state_dir),
                    manage=config.mps.mode == "manage",
                    multi_user=config.mps.multi_user,
                    # A few processes are started for each reading: less often than the rest.
                    period_s=config.monitor.period_ms / 200,
                ),
                required=config.mps.required,
                multi_user=config.mps.multi_user,
                cap_sm=config.mps.cap_sm,
            )
        signals = Signals()
        notifier = systemd.Notifier()
        pump = Pump(
            config=config,
            config_path=str(config_path or ""),
            state_dir=paths.state_dir,
            logs_dir=paths.logs_dir,
            socket_path=paths.socket,
            report_path=paths.report_socket,
            store=store,
            server=server,
            reports=reports,
            processes=Processes(paths.run_dir, store.instance_id),
            sampler=sampler,
            supervisor_of=host_monitor.tree_of,
            owner_of=host_monitor.process_owner,
            notifier=notifier,
            signals=signals,
            reload=lambda: configuration.load(config_path or daemon_config()),
            rlimits=own_rlimits,
            keyring=keyring,
            remote=remote,
            fences=fences,
            mps=mps,
        )
        pump.start()
        log.info("rlqd %s serves %s from %s", VERSION, paths.socket, paths.state_dir)
        if remote is not None:
            log.info("other machines are served on %s", remote.endpoint)
        notifier.ready("ready")
        _tell(ready_fd, "ready")
        pump.run()
        log.info("stopped; running jobs run on")


def mps_folders(config: configuration.Mps, state_dir: Path) -> tuple[Path, Path]:
    """The pipe and log folders of the MPS control daemon."""
    if config.mode == "manage":
        pipe, log_ = str(state_dir / "mps" / "pipe"), str(state_dir / "mps" / "log")
    else:
        pipe, log_ = "/tmp/nvidia-mps", "/var/log/nvidia-mps"
    return Path(config.pipe_dir or pipe), Path(config.log_dir or log_)


def _log_to_stderr(level: str) -> None:
    # Under systemd the journal stamps the time itself.
    stamp = "" if "JOURNAL_STREAM" in os.environ else "%(asctime)s "
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format=f"{stamp}%(levelname)s %(message)s"
    )


def _tell(ready_fd: int | None, text: str) -> None:
    """Tell whoever started this daemon; it may have gone away meanwhile."""
    if ready_fd is None:
        return
    with contextlib.suppress(OSError):
        os.write(ready_fd, f"{text}\n".encode())
    with contextlib.suppress(OSError):
        os.close(ready_fd)


if __name__ == "__main__":
    main()
