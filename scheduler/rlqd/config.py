"""The daemon's configuration: every key, once, with its default, its rule and its meaning.

The dataclasses below ARE the table.  Reading a file, `rlqd --print-config` (`describe`) and
docs/configuration.md (`markdown`) all come from their fields' metadata, so that a key cannot
exist without being checked and documented.  Python names carry the unit; TOML names do not,
their values do ("2G", "30s", "20%").
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rlq.errors import UsageError
from rlq.protocol import units
from rlq.protocol.keys import PORT
from rlqd.hours import Hours, parse_hours

# ---- kinds of value ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """`parse` raises ValueError (or UsageError) on anything that is not `allowed`."""

    parse: Callable[[object], Any]
    #: The value as TOML, so that parse(show(x)) == x.
    show: Callable[[Any], str]
    #: For people: ends the sentence "... must be".
    allowed: str


def _check(ok: bool) -> None:
    if not ok:
        raise ValueError


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _show_mib(mib: int) -> str:
    return f'"{mib // 1024}G"' if mib and mib % 1024 == 0 else f'"{mib}M"'


def _show_ms(ms: int) -> str:
    for unit, per in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        # A minute reads better as 60s: the larger unit only from two on.
        if ms % per == 0 and (ms // per >= 2 or unit == "s"):
            return f'"{ms // per}{unit}"'
    return f'"{ms}ms"'


def size(least_mib: int, most_mib: int = 2**40) -> Kind:
    """MiB."""

    def parse(value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool):
            mib = value
        else:
            text = _string(value)
            # parse_mib knows no nought; here it is a fair amount to keep free.
            mib = 0 if text.strip().rstrip("KMGTiBkmgtb ") == "0" else units.parse_mib(text)
        _check(least_mib <= mib <= most_mib)
        return mib

    most = f" to {units.format_mib(most_mib)}" if most_mib < 2**40 else " or more"
    allowed = f'a size such as "512M" or "2G" (a bare number is MiB), {least_mib} MiB{most}'
    return Kind(parse, _show_mib, allowed)


def duration(least: str, most: str) -> Kind:
    """Milliseconds."""

    def of(text: str) -> int:
        return 0 if text == "0s" else units.parse_duration_ms(text)

    def parse(value: object) -> int:
        ms = of(_string(value).strip())
        _check(of(least) <= ms <= of(most))
        return ms

    return Kind(parse, _show_ms, f'a duration such as "30s" or "2h", {least} to {most}')


def optional(kind: Kind) -> Kind:
    """None, written as an empty string."""
    return Kind(
        lambda value: None if value == "" else kind.parse(value),
        lambda value: '""' if value is None else kind.show(value),
        f'"" (none) or {kind.allowed}',
    )


def share(least: int, most: int = 100) -> Kind:
    """Per cent."""

    def parse(value: object) -> int:
        text = _string(value).strip()
        pct = 0 if text in ("0", "0%") else units.parse_pct(text)
        _check(least <= pct <= most)
        return pct

    return Kind(parse, lambda pct: f'"{pct}%"', f'a share from "{least}%" to "{most}%"')


def whole(least: int, most: int) -> Kind:
    def parse(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError
        _check(least <= value <= most)
        return value

    return Kind(parse, str, f"a whole number from {least} to {most}")


def choice(*words: str) -> Kind:
    def parse(value: object) -> str:
        word = _string(value)
        _check(word in words)
        return word

    return Kind(parse, json.dumps, "one of " + ", ".join(f'"{word}"' for word in words))


def _parse_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


FLAG = Kind(_parse_flag, lambda value: "true" if value else "false", "true or false")
#: Linux's own limit for a build of today is 8192.
_CORES_MAX = 65_536


def _parse_cores(value: object) -> tuple[int, ...]:
    text = _string(value)
    if not text.strip():
        return ()
    ranges = units.parse_ranges(text)
    _check(all(high < _CORES_MAX for _, high in ranges))
    return tuple(sorted({n for low, high in ranges for n in range(low, high + 1)}))


def _show_cores(cores: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return '"' + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + '"'


CORES = Kind(_parse_cores, _show_cores, '"" (all) or cores such as "0-15" or "0,2,4-7"')


def _parse_devices(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError
    devices = []
    for item in value:
        device = str(item) if isinstance(item, int) and not isinstance(item, bool) else item
        if not isinstance(device, str):
            raise ValueError
        _check((device.isascii() and device.isdigit()) or device.startswith(("GPU-", "MIG-")))
        devices.append(device)
    return tuple(devices)


DEVICES = Kind(
    _parse_devices,
    lambda devices: json.dumps(list(devices)),
    'a list of GPU numbers or UUIDs such as [0, 1] or ["GPU-5a…"]; empty: all',
)


def _parse_hours(value: object) -> tuple[Hours, ...]:
    if not isinstance(value, list):
        raise ValueError
    return tuple(parse_hours(_string(text)) for text in value)


HOURS = Kind(
    _parse_hours,
    lambda hours: json.dumps([one.text for one in hours]),
    'a list of hours such as ["Mon-Fri 09:00-18:00", "Sat 22:00-02:00"]; empty: none',
)


def _parse_folder(value: object) -> str:
    text = _string(value)
    _check(text == "" or (text.startswith("/") and "\0" not in text))
    return text


def listen_address(text: str) -> tuple[str, int]:
    """`tcp://ADDRESS[:PORT]` as address ("*": all of IPv4) and port.  Raises ValueError."""
    scheme, _, rest = text.partition("://")
    _check(scheme == "tcp")
    host, colon, port = rest.rpartition(":") if not rest.endswith("]") else (rest, "", "")
    if not colon:
        host, port = rest, str(PORT)
    if host != "*":
        version = 4
        if host.startswith("[") and host.endswith("]"):
            host, version = host[1:-1], 6
        _check(ipaddress.ip_address(host).version == version and "%" not in host)
    _check(port.isascii() and port.isdigit() and int(port) < 65_536)
    return host, int(port)


def _parse_listen(value: object) -> str:
    text = _string(value)
    if text:
        listen_address(text)
    return text


LISTEN = Kind(
    _parse_listen,
    json.dumps,
    '"" (nowhere), or "tcp://ADDRESS:PORT" with an address of this machine or * for all: '
    f'"tcp://*:{PORT}"',
)

FOLDER = Kind(_parse_folder, json.dumps, '"" (see its meaning) or an absolute path')


def _parse_account(value: object) -> str:
    text = _string(value)
    _check(len(text) <= 256 and text.isprintable() and not set(text) & set(" :,/"))
    return text


#: Whether there is such a group is asked when it matters: a directory service may be down.
GROUP = Kind(_parse_account, json.dumps, '"" (none) or the name of a Unix group')


def _parse_shares(value: object) -> tuple[tuple[str, int], ...]:
    if not isinstance(value, dict):
        raise ValueError
    number = whole(1, 1_000_000)
    _check(all(user for user in value))
    return tuple(sorted((user, number.parse(n)) for user, n in value.items()))


SHARES = Kind(
    _parse_shares,
    lambda shares: (
        "{ " + ", ".join(f"{json.dumps(user)} = {n}" for user, n in shares) + " }"
        if shares
        else "{}"
    ),
    "a table of users and whole numbers from 1 such as { ada = 2, bob = 1 }",
)

# ---- keys --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Key:
    """A TOML key."""

    name: str
    kind: Kind
    doc: str


def _key(name: str, kind: Kind, default: object, doc: str) -> Any:
    return field(default=kind.parse(default), metadata={"key": Key(name, kind, doc)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a job is counted for where it declares nothing, until it has been measured."""

    gpu_mem_mib: int = _key("gpu_mem", size(1), "4G", "Memory on each of the job's GPUs.")
    sm_pct: int = _key(
        "sm", share(1), "20%", "Share of each of the job's GPUs' streaming multiprocessors."
    )
    cores: int = _key("cores", whole(1, 4096), 1, "CPU cores of the job's own.")
    mem_mib: int = _key("mem", size(1), "2G", "Host memory.")
    grace_ms: int = _key(
        "grace", duration("0s", "1d"), "30s", "Time from SIGTERM to SIGKILL when a job is stopped."
    )
    time_limit_ms: int | None = _key(
        "time_limit",
        optional(duration("1s", "3650d")),
        "",
        "Longest time a job may run that sets no `--time-limit`.",
    )
    log_mib_max: int | None = _key(
        "log_max",
        optional(size(1)),
        "",
        "Size at which a job's log is rotated, one older part kept.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Which GPUs the queue uses, and how much of them."""

    mem_mib_reserve: int = _key(
        "mem_reserve", size(0), "512M", "Memory that is kept free on each GPU."
    )
    sm_pct_limit: int = _key(
        "sm_limit",
        share(1),
        "100%",
        "Sum of the SM shares of all jobs on one GPU, processes outside the queue included.",
    )
    jobs_per_gpu: int = _key(
        "jobs_per_gpu", whole(0, 1000), 0, "Most jobs at a time on one GPU; 0: no limit."
    )
    include: tuple[str, ...] = _key(
        "include",
        DEVICES,
        [],
        "The GPUs the queue may use. UUIDs stay true when a board is moved; numbers do not.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """Which cores the queue uses."""

    reserve: int = _key("reserve", whole(0, 4096), 0, "Cores that are never given to jobs.")
    outside: str = _key(
        "outside",
        choice("subtract", "ignore"),
        "subtract",
        "Whether the cores that processes outside the queue keep busy are subtracted.",
    )
    minimum: int = _key(
        "minimum",
        whole(0, 4096),
        1,
        "Cores the queue may always use, however busy processes outside it are.",
    )
    include: tuple[int, ...] = _key("include", CORES, "", "The cores the queue may use.")
    smt: bool = _key(
        "smt",
        FLAG,
        True,
        "Whether the second hyperthread of a core may be given to a job when whole cores run out.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Host memory."""

    mib_reserve: int = _key("reserve", size(0), "1G", "Host memory that is kept free.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """When jobs start."""

    reserve_after_ms: int = _key(
        "reserve_after",
        duration("0s", "365d"),
        "60s",
        "How long the head of the queue waits before smaller jobs may no longer delay it.",
    )
    preemption: str = _key(
        "preemption",
        choice("off", "priority"),
        "off",
        "Whether jobs submitted with --preemptible are stopped, and queued again, for a job of"
        " higher priority that cannot start otherwise.",
    )
    preempt_exempt_ms: int = _key(
        "preempt_exempt",
        duration("0s", "365d"),
        "10m",
        "A job that was started again is not preempted before it has run for so long.",
    )
    settle_ms: int = _key(
        "settle",
        duration("1s", "1h"),
        "10s",
        "The readings of a job must be stable over this window before it is counted by them.",
    )
    margin_pct: int = _key(
        "margin", share(0), "10%", "Added to a job's measured peak when it is counted by it."
    )
    launch_retries: int = _key(
        "launch_retries",
        whole(0, 100),
        3,
        "Further tries when a job cannot be started for a passing reason, such as no free pid.",
    )
    queued_max: int = _key(
        "max_queued",
        whole(1, 10_000_000),
        1_000_000,
        "Most jobs that may wait; a submission beyond it is refused.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What the jobs of one user, or of a group's members together, may have."""

    max_jobs: int | None = _key(
        "max_jobs", optional(whole(0, 10_000_000)), "", "Jobs that run at a time."
    )
    max_submit_jobs: int | None = _key(
        "max_submit_jobs",
        optional(whole(0, 10_000_000)),
        "",
        "Jobs that wait or run; a submission beyond it is refused.",
    )
    gpus: int | None = _key(
        "gpus",
        optional(whole(0, 1000)),
        "",
        "GPUs of the running jobs; one that two jobs share counts for both.",
    )
    gpu_mem_mib: int | None = _key(
        "gpu_mem",
        optional(size(0)),
        "",
        "GPU memory that the running jobs are counted for, on all GPUs together.",
    )
    cores: int | None = _key(
        "cores", optional(whole(0, _CORES_MAX)), "", "Cores of the running jobs."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Limit):
    """What each user's jobs may have together. An empty value: as much as there is."""

    #: By name.
    users: dict[str, Limit] = field(default_factory=dict[str, Limit])
    groups: dict[str, Limit] = field(default_factory=dict[str, Limit])


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiet:
    """Hours in which the queue uses only a share of the machine (docs/bookings.md)."""

    hours: tuple[Hours, ...] = _key(
        "hours",
        HOURS,
        [],
        "When, in local time. Jobs that run then run on; new ones keep within the share.",
    )
    gpus: int | None = _key(
        "gpus", optional(whole(0, 1000)), "", "So many GPUs, those with the lowest numbers."
    )
    cores: int | None = _key("cores", optional(whole(0, 4096)), "", "So many cores.")
    sm_pct: int | None = _key(
        "sm", optional(share(1)), "", "So much of each GPU, in place of `gpu.sm_limit`."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bookings:
    """What users may book for themselves (docs/bookings.md)."""

    claim_ms_max: int = _key(
        "claim_max",
        duration("0s", "30d"),
        "4h",
        "Longest time a user may `rlq claim` a GPU for; `0s`: only administrators may.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Fair share between users (docs/fairness.md)."""

    half_life_ms: int = _key(
        "half_life",
        duration("1h", "3650d"),
        "7d",
        "After so long, what somebody has used counts half.",
    )
    age_max_ms: int = _key(
        "age_max", duration("1m", "3650d"), "7d", "A job's age counts up to this."
    )
    age_weight: int = _key(
        "age_weight", whole(0, 1_000_000), 1_000, "What the full age adds to a job's score."
    )
    share_weight: int = _key(
        "share_weight",
        whole(0, 1_000_000),
        10_000,
        "What the full fair-share factor adds to a job's score; 0: only priority and age count.",
    )
    shares: tuple[tuple[str, int], ...] = _key(
        "shares",
        SHARES,
        {},
        "Users' shares of the machine, by name or uid; who is not named has 1.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The throughput guard: packing stops when one more job no longer helps."""

    enabled: bool = _key(
        "enabled", FLAG, True, "Whether jobs that report their steps/s are packed by them."
    )
    threshold_pct: int = _key(
        "threshold",
        share(0),
        "5%",
        "What one more job must add, as a share of a job's speed alone.",
    )
    observe_ms: int = _key(
        "observe", duration("1s", "1h"), "15s", "How long a mix of jobs is measured."
    )
    first_report_ms: int = _key(
        "first_report",
        duration("0s", "1h"),
        "60s",
        "A program that has reported nothing for so long is taken never to report.",
    )
    patience_ms: int = _key(
        "patience",
        duration("0s", "1d"),
        "3m",
        "How long a job that reports may take until it trains before it is no longer waited for.",
    )
    forget_ms: int = _key(
        "forget", duration("1m", "3650d"), "30d", "How long what was learned counts."
    )
    cores_most: int = _key(
        "max_cores",
        whole(1, 4096),
        1,
        "Most cores for a job that declares none: more than `defaults.cores` only while nobody"
        " else waits, and as long as each was measured to add `threshold`.",
    )
    pause_youngest: bool = _key(
        "pause_youngest",
        FLAG,
        False,
        "Whether the youngest job of a device is paused where fewer jobs were measured to be"
        " faster together.",
    )
    pause_turn_ms: int = _key(
        "pause_turn",
        duration("1s", "1d"),
        "10m",
        "How long a job stays paused by `pause_youngest` at most: then it is another one's turn.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mps:
    """NVIDIA's CUDA Multi-Process Service (docs/mps.md). Read when the daemon starts."""

    mode: str = _key(
        "mode",
        choice("off", "use", "manage"),
        "off",
        "`use`: jobs on a GPU go through an MPS control daemon that somebody else runs; `manage`:"
        " rlqd starts one where none answers; `off`: rlqd leaves MPS alone.",
    )
    required: bool = _key(
        "required",
        FLAG,
        True,
        "While MPS cannot be used, no job starts on a GPU; `false`: jobs start without MPS.",
    )
    multi_user: bool = _key(
        "multi_user",
        FLAG,
        False,
        "The control daemon runs with `-multiuser-server`, as root; without it, only one user's"
        " jobs at a time go through MPS, and other users' jobs run beside it without.",
    )
    pipe_dir: str = _key(
        "pipe_dir",
        FOLDER,
        "",
        "CUDA_MPS_PIPE_DIRECTORY; empty: NVIDIA's `/tmp/nvidia-mps`, or for `manage`"
        " `mps/pipe` in the state folder.",
    )
    log_dir: str = _key(
        "log_dir",
        FOLDER,
        "",
        "CUDA_MPS_LOG_DIRECTORY; empty: NVIDIA's `/var/log/nvidia-mps`, or for `manage`"
        " `mps/log` in the state folder.",
    )
    cap_sm: bool = _key(
        "cap_sm",
        FLAG,
        True,
        "Whether a job that declares its SM share (`--sm`) is held to it.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """Use from other machines, by keys that were enrolled (docs/remote.md). Read at the start."""

    listen: str = _key(
        "listen",
        LISTEN,
        "",
        "Where the daemon listens for other machines. ssh needs none of this.",
    )
    connections_max: int = _key(
        "max_connections",
        whole(1, 10_000),
        128,
        "Most connections from other machines at a time, strangers' included; others wait.",
    )
    message_mib_max: int = _key(
        "max_message",
        size(1, 64),
        "8M",
        "Longest message of a remote client, strangers included, as in `[daemon]`.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Enforce:
    """Limits that a job cannot lift (docs/operations.md, "Enforcement")."""

    mode: str = _key(
        "mode",
        choice("auto", "off"),
        "auto",
        "`auto`: each job runs in a systemd scope, or without systemd in a control group of its"
        " own, where that can be had; `off`: jobs are only pinned to their cores. Read when the"
        " daemon starts.",
    )
    mem_pct_margin: int = _key(
        "mem_margin",
        share(0),
        "10%",
        "A job that declares its memory (`--mem`) is ended by the kernel when it uses so much"
        " more, and 16 MiB. A job that declares none has no limit.",
    )
    tasks_max: int = _key(
        "tasks_max",
        whole(0, 4_194_304),
        4096,
        "Most processes and threads of one job at a time; 0: no limit.",
    )
    io_weight: int = _key(
        "io_weight",
        whole(1, 10_000),
        100,
        "Each job's share of a busy disk, relative to other jobs and to systemd's 100.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitor:
    """How the machine is watched."""

    period_ms: int = _key(
        "period", duration("100ms", "1m"), "1s", "Time between two readings of GPUs and host."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """The daemon itself."""

    log_level: str = _key(
        "log_level",
        choice("debug", "info", "warning", "error"),
        "info",
        "The least important messages that are logged (to stderr; with systemd, the journal).",
    )
    admin_group: str = _key(
        "admin_group",
        GROUP,
        "",
        "Its members may act on everybody's jobs, drain and stop, as root and the daemon's own"
        " user may.",
    )
    keep_finished_ms: int | None = _key(
        "keep_finished",
        optional(duration("1m", "3650d")),
        "",
        'How long finished jobs stay in `rlq history`, such as "90d"; empty: for ever.',
    )
    hide_commands: bool = _key(
        "hide_commands",
        FLAG,
        False,
        "Whether other users' command lines and folders are hidden from all but administrators:"
        " in `rlq list`, `show`, `why`, `gpus`.",
    )
    message_mib_max: int = _key(
        "max_message",
        size(1, 64),
        "64M",
        "Longest message a client may send. A client that sends more is disconnected.",
    )


SECTIONS: dict[str, type] = {
    "defaults": Defaults,
    "gpu": Gpu,
    "cpu": Cpu,
    "memory": Memory,
    "scheduling": Scheduling,
    "limits": Limits,
    "quiet": Quiet,
    "bookings": Bookings,
    "share": Share,
    "guard": Guard,
    "mps": Mps,
    "remote": Remote,
    "enforce": Enforce,
    "monitor": Monitor,
    "daemon": Daemon,
}
#: [limits.users.NAME] and [limits.groups.NAME] have the keys of [limits].
LIMITED = ("users", "groups")
LIMITED_DOC = (
    "`[limits.users.NAME]` sets the same keys for one user; a key that is not given there is as in"
    " `[limits]`. `[limits.groups.NAME]` sets them for the sum of the jobs of a Unix group's"
    " members; a key that is not given there is no limit. Of all limits that hold for a job the"
    " tightest counts."
)
#: The one section whose keys are the user's own.
ENVIRONMENT = "environment"
ENVIRONMENT_DOC = "Variables set for every job that does not set them itself. Values are strings."


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """`Config()` is the built-in defaults.  One field per section."""

    defaults: Defaults = field(default_factory=Defaults)
    gpu: Gpu = field(default_factory=Gpu)
    cpu: Cpu = field(default_factory=Cpu)
    memory: Memory = field(default_factory=Memory)
    scheduling: Scheduling = field(default_factory=Scheduling)
    limits: Limits = field(default_factory=Limits)
    quiet: Quiet = field(default_factory=Quiet)
    bookings: Bookings = field(default_factory=Bookings)
    share: Share = field(default_factory=Share)
    guard: Guard = field(default_factory=Guard)
    mps: Mps = field(default_factory=Mps)
    remote: Remote = field(default_factory=Remote)
    enforce: Enforce = field(default_factory=Enforce)
    monitor: Monitor = field(default_factory=Monitor)
    daemon: Daemon = field(default_factory=Daemon)
    # Not in the repr: variables may hold passwords.
    environment: dict[str, str] = field(default_factory=dict, repr=False)


def keys_of(section: type) -> Iterator[tuple[str, Key]]:
    """(attribute, key) of each key of a section."""
    for one in fields(section):
        if "key" in one.metadata:
            yield one.name, one.metadata["key"]


# ---- reading -----------------------------------------------------------------------


def load(path: str | os.PathLike[str] | None) -> Config:
    """The configuration in the file; None: the built-in defaults.

    Raises:
        UsageError: the file cannot be read, is not TOML, or holds an unknown key or a value
            that is not allowed.
    """
    if path is None:
        return Config()
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        raise UsageError(
            f"cannot read the configuration {path}: {error.strerror}",
            hint="name another file with --config",
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a text file in UTF-8") from error
    return parse(text, str(path))


def parse(text: str, source: str) -> Config:
    """The configuration in TOML text.  `source` names it in errors.

    Raises:
        UsageError: as `load`.
    """
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        # Plain ValueError: a date that does not exist, a number with too many digits.
        raise UsageError(f"{source} is not valid TOML: {error}") from error
    parts: dict[str, Any] = {}
    for name, table in document.items():
        if name not in SECTIONS and name != ENVIRONMENT:
            raise _unknown_section(name, table, source)
        if not isinstance(table, dict):
            raise UsageError(
                f"{source}: {name} is a section, not a value", hint=f"write [{name}] on a line"
            )
        if name == ENVIRONMENT:
            parts[name] = _environment(table, source)
        elif name == "limits":
            parts[name] = _limits(table, source)
        else:
            parts[name] = _section(name, table, source)
    return Config(**parts)


def _limits(table: dict[str, object], source: str) -> Limits:
    """[limits], with the tables of users and groups in it."""
    own = _values("limits", {k: v for k, v in table.items() if k not in LIMITED}, source)
    of: dict[str, dict[str, Limit]] = {}
    for kind in LIMITED:
        # A user has what is given for everybody, where nothing else is; a group has not.
        start = Limit(**own) if kind == "users" else Limit()
        names = _table(f"limits.{kind}", table.get(kind, {}), source)
        of[kind] = {}
        for name, keys in names.items():
            title = f"limits.{kind}.{name}"
            values = _values("limits", _table(title, keys, source), source, title)
            of[kind][name] = replace(start, **values)
    return Limits(**own, users=of["users"], groups=of["groups"])


def _table(title: str, value: object, source: str) -> dict[str, object]:
    if not isinstance(value, dict):
        name = title if title.count(".") > 1 else f"{title}.NAME"
        raise UsageError(
            f"{source}: {title} is a section, not a value", hint=f"write [{name}] on a line"
        )
    return value


def _section(name: str, table: dict[str, object], source: str) -> Any:
    return SECTIONS[name](**_values(name, table, source))


def _values(
    name: str, table: dict[str, object], source: str, title: str | None = None
) -> dict[str, Any]:
    """The values given in a table with the keys of section `name`, by attribute.

    `title`: what errors call it.
    """
    title = title or name
    by_name = {key.name: (attribute, key) for attribute, key in keys_of(SECTIONS[name])}
    values: dict[str, Any] = {}
    for key_name, value in table.items():
        if key_name not in by_name:
            raise _unknown_key(name, key_name, source, title=title)
        attribute, key = by_name[key_name]
        try:
            values[attribute] = key.kind.parse(value)
        except (ValueError, UsageError) as error:
            raise UsageError(
                f"{source}: {title}.{key_name} is {_toml(value)}, and must be {key.kind.allowed}",
                hint=f"the default is {_default(SECTIONS[name], attribute, key)}",
            ) from error
    return values


def _environment(table: dict[str, object], source: str) -> dict[str, str]:
    environment: dict[str, str] = {}
    for name, value in table.items():
        if not name or "=" in name or "\0" in name:
            raise UsageError(f"{source}: {name!r} in [environment] cannot be a variable's name")
        if not isinstance(value, str) or "\0" in value:
            # The value is not shown: it may be a secret.
            raise UsageError(
                f"{source}: environment.{name} must be a string without NUL",
                hint=f'write {name} = "…"',
            )
        environment[name] = value
    return environment


def _unknown_section(name: str, value: object, source: str) -> UsageError:
    if isinstance(value, dict):
        near = difflib.get_close_matches(name, [*SECTIONS, ENVIRONMENT], n=1)
        hint = f"did you mean [{near[0]}]?" if near else "sections: " + ", ".join(SECTIONS)
        return UsageError(f"{source}: unknown section [{name}]", hint=hint)
    error = _unknown_key("", name, source)
    return UsageError(f"{source}: key {name} stands in no section", hint=error.hint)


def _unknown_key(section: str, name: str, source: str, *, title: str = "") -> UsageError:
    """Nearest in its own section first, then anywhere."""
    title = title or section
    own = [key.name for _, key in keys_of(SECTIONS[section])] if section else []
    own += LIMITED if title == "limits" else ()
    elsewhere: dict[str, str] = {}
    for other, table in SECTIONS.items():
        if other != section:
            for _, key in keys_of(table):
                elsewhere.setdefault(key.name, other)
    if near := difflib.get_close_matches(name, own, n=1):
        hint = f"did you mean {title}.{near[0]}?"
    elif near := difflib.get_close_matches(name, list(elsewhere), n=1, cutoff=0.75):
        hint = f"did you mean {elsewhere[near[0]]}.{near[0]}?"
    elif own:
        hint = f"[{title}] has " + ", ".join(own)
    else:
        hint = "`rlqd --print-config` prints every key"
    return UsageError(f"{source}: unknown key {title}.{name}", hint=hint)


def _toml(value: object) -> str:
    """A value as its writer knows it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _default(section: type, attribute: str, key: Key) -> str:
    return key.kind.show(getattr(section(), attribute))


# ---- showing -----------------------------------------------------------------------


def describe(config: Config | None = None) -> str:
    """`config` (the defaults) as commented TOML that reads back as the same configuration.

    Values of [environment] are shown: this is the administrator's own file.
    """
    shown = config or Config()
    lines = ["# The configuration of rlqd; every key, with what it may be.", ""]
    for name, section in SECTIONS.items():
        lines += [f"[{name}]", f"# {_first_line(section)}", ""]
        for attribute, key in keys_of(section):
            value = getattr(getattr(shown, name), attribute)
            lines += [f"# {key.doc}", f"# Must be {key.kind.allowed}."]
            lines += [f"{key.name} = {key.kind.show(value)}", ""]
        if name == "limits":
            lines += _describe_limited(shown.limits)
    lines += [f"[{ENVIRONMENT}]", f"# {ENVIRONMENT_DOC}"]
    for variable, value in shown.environment.items():
        lines.append(f"{_quoted(variable)} = {_quoted(value)}")
    return "\n".join(lines) + "\n"


def _describe_limited(limits: Limits) -> list[str]:
    lines: list[str] = []
    for kind, of in (("users", limits.users), ("groups", limits.groups)):
        for name, limit in of.items():
            lines.append(f"[limits.{kind}.{_quoted(name)}]")
            for attribute, key in keys_of(Limit):
                lines.append(f"{key.name} = {key.kind.show(getattr(limit, attribute))}")
            lines.append("")
    return lines


def markdown() -> str:
    """The tables of docs/configuration.md."""
    lines: list[str] = []
    for name, section in SECTIONS.items():
        lines += [f"### `[{name}]`", "", _first_line(section), ""]
        lines += ["| key | default | meaning | allowed |", "| --- | --- | --- | --- |"]
        for attribute, key in keys_of(section):
            default = _default(section, attribute, key)
            lines.append(f"| `{key.name}` | `{default}` | {key.doc} | {key.kind.allowed} |")
        lines += ["", LIMITED_DOC, ""] if name == "limits" else [""]
    lines += [f"### `[{ENVIRONMENT}]`", "", ENVIRONMENT_DOC, ""]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    # JSON's strings are TOML's basic strings, but for DEL, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _first_line(section: type) -> str:
    return (section.__doc__ or "").splitlines()[0]


if __name__ == "__main__":
    print(markdown(), end="")
