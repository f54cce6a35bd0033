"""Core jobs to and from what the database keeps of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, assert_never

import msgspec

from rlq.protocol.messages import JobSpec as WireSpec
from rlq.protocol.messages import Placement as WirePlacement
from rlq.protocol.messages import Progress, Usage
from rlq.protocol.states import JobState
from rlqd.adapters.sqlite import Row
from rlqd.config import Config
from rlqd.core import model
from rlqd.core.guard import Learned
from rlqd.core.learned import LearnedPeak
from rlqd.core.states import placement_of
from rlqd.shell.signature import learned_as, signature_of

_STATES: dict[str, type[Any]] = {
    state.__name__: state
    for state in (
        model.Pending,
        model.Starting,
        model.Running,
        model.Suspended,
        model.Completing,
        model.Finished,
    )
}
_encoder = msgspec.json.Encoder()
DAMAGED = "its record in the database is damaged"


def job_state(state: model.State) -> JobState:
    """Slurm's name for a core state."""
    match state:
        case model.Pending():
            return JobState.PENDING
        case model.Starting():
            return JobState.CONFIGURING
        case model.Running():
            return JobState.RUNNING
        case model.Suspended():
            return JobState.SUSPENDED
        case model.Completing():
            return JobState.COMPLETING
        case model.Finished(outcome=outcome):
            return JobState(outcome.value)
        case _:
            assert_never(state)


class Detail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of a row that only the daemon reads.  New fields need defaults."""

    #: `{"kind": "Running", ...}`: the core's state, so that a restart goes on from it.
    state: dict[str, Any]
    #: Where it runs, or ran last.
    placement: WirePlacement | None = None
    usage: Usage | None = None
    progress: Progress | None = None
    #: The job it was last stopped for.
    preempted_by: int | None = None
    #: Where its output goes, as told to the submitter: it stays there when the state folder or
    #: the user's home is moved.  "": of an rlq that did not keep it.
    log_path: str = ""


_decoder = msgspec.json.Decoder(Detail)


def dump_detail(
    state: model.State,
    placement: WirePlacement | None,
    usage: Usage | None,
    progress: Progress | None,
    log_path: str,
    preempted_by: int | None = None,
) -> bytes:
    fields = {"kind": type(state).__name__, **msgspec.to_builtins(state)}
    return _encoder.encode(
        Detail(
            state=fields,
            placement=placement,
            usage=usage,
            progress=progress,
            log_path=log_path,
            preempted_by=preempted_by,
        )
    )


def load_detail(text: bytes) -> Detail:
    """What cannot be read is empty: one damaged row must not hide all others.  `load_state` then
    raises KeyError."""
    try:
        return _decoder.decode(text)
    except msgspec.MsgspecError:
        return Detail(state={})


def shown_spec(row: Row) -> WireSpec:
    """For people: what cannot be read is empty, as in `load_detail`."""
    try:
        return row.job_spec
    except msgspec.MsgspecError:
        return WireSpec(argv=(f"({DAMAGED})",), cwd="", name=row.name)


def load_state(detail: Detail) -> model.State:
    fields = dict(detail.state)
    kind = _STATES[fields.pop("kind")]
    state: model.State = msgspec.convert(fields, kind)
    return state


def dump_learned(row: Learned | LearnedPeak, at: float) -> tuple[str, bytes, float]:
    """(key, body, Unix time) for the database."""
    match row:
        case Learned(kind=kind, signatures=signatures, jobs=jobs):
            key = throughput_key(kind, signatures, jobs)
        case LearnedPeak(signature=signature):
            key = peak_key(signature)
        case _:
            assert_never(row)
    return key, _encoder.encode(row), at


def throughput_key(kind: str, signatures: tuple[str, ...], jobs: int) -> str:
    return "\0".join(["throughput", kind, str(jobs), *signatures])


def peak_key(signature: str) -> str:
    return "\0".join(["peak", signature])


def is_about(key: str, signature: str) -> bool:
    """Whether the row of this key was learned of the program, alone or in a mix."""
    kind, *rest = key.split("\0")
    return signature in (rest if kind == "peak" else rest[2:])


def load_learned(key: str, body: bytes, age_ms: int, now: model.Instant) -> Learned | LearnedPeak:
    """The row, its time put on this boot's clock."""
    at = model.Instant(now - age_ms)
    if key.startswith("peak"):
        peak = msgspec.json.decode(body, type=LearnedPeak)
        return replace(peak, at=at)
    learned = msgspec.json.decode(body, type=Learned)
    return replace(learned, estimate=replace(learned.estimate, at=at))


def core_spec(spec: WireSpec, uid: int, config: Config) -> model.JobSpec:
    """What the scheduler needs of a submission."""
    resources = spec.resources
    return model.JobSpec(
        user=uid,
        priority=spec.priority,
        gpus=resources.gpus,
        gpu_mem_mib=resources.gpu_mem_mib,
        sm_pct=resources.sm_pct,
        cores=resources.cores,
        mem_mib=resources.mem_mib,
        exclusive=resources.exclusive,
        time_limit_ms=resources.time_limit_ms or config.defaults.time_limit_ms,
        grace_ms=config.defaults.grace_ms if spec.grace_ms is None else spec.grace_ms,
        requeue=spec.requeue,
        signature=learned_as(signature_of(spec), uid),
        unguarded=spec.unguarded,
        interactive=bool(spec.via),
        preemptible=spec.preemptible,
    )


def guard_policy(config: Config) -> model.GuardPolicy:
    return model.GuardPolicy(
        enabled=config.guard.enabled,
        threshold_pct=config.guard.threshold_pct,
        observe_ms=config.guard.observe_ms,
        first_report_ms=config.guard.first_report_ms,
        patience_ms=config.guard.patience_ms,
        forget_ms=config.guard.forget_ms,
        pause_youngest=config.guard.pause_youngest,
        pause_turn_ms=config.guard.pause_turn_ms,
    )


def core_policy(config: Config) -> model.Policy:
    return model.Policy(
        gpu_mem_mib_default=config.defaults.gpu_mem_mib,
        sm_pct_default=config.defaults.sm_pct,
        cores_default=config.defaults.cores,
        cores_most=config.guard.cores_most if config.guard.enabled else 1,
        mem_mib_default=config.defaults.mem_mib,
        gpu_mem_mib_reserve=config.gpu.mem_mib_reserve,
        sm_pct_limit=config.gpu.sm_pct_limit,
        jobs_per_gpu_max=config.gpu.jobs_per_gpu,
        cores_reserve=config.cpu.reserve,
        cores_minimum=config.cpu.minimum,
        outside_cpu_counts=config.cpu.outside == "subtract",
        mem_mib_reserve=config.memory.mib_reserve,
        reserve_after_ms=config.scheduling.reserve_after_ms,
        preemption=config.scheduling.preemption == "priority",
        preempt_exempt_ms=config.scheduling.preempt_exempt_ms,
        settle_ms=config.scheduling.settle_ms,
        margin_pct=config.scheduling.margin_pct,
        launch_retries=config.scheduling.launch_retries,
        queued_max=config.scheduling.queued_max,
        stale_ms=max(15_000, 5 * config.monitor.period_ms),
    )


def wire_placement(state: model.State, indices: dict[model.GpuId, int]) -> WirePlacement | None:
    """Where a job in this state is; `indices` gives nvidia-smi's numbers."""
    placement = placement_of(state)
    if placement is None:
        return None
    return WirePlacement(
        gpus=placement.gpus,
        gpu_indices=tuple(indices.get(g, -1) for g in placement.gpus),
        cores=placement.cores,
    )
