"""What was learned of programs: what they take, how fast they are alone, how they share."""

from __future__ import annotations

import time
from collections import Counter

import click

from rlq.cli.app import App, note, verb
from rlq.cli.output import (
    NONE,
    clean,
    folded,
    print_json,
    print_tsv,
    stdout_is_terminal,
)
from rlq.cli.tables import rate
from rlq.errors import UsageError
from rlq.protocol.messages import Curve, CurvePoint, Profiled, Profiles
from rlq.protocol.units import format_duration, format_mib

#: Where the facts begin, under a signature.
INDENT = 12


@verb("profile", short_help="What was learned of programs: memory, speed, how they share.")
@click.argument("pattern", metavar="[PATTERN]", default="")
@click.option(
    "--forget", metavar="SIGNATURE", help="Drop what was learned of it (the daemon's user, root)."
)
def command(app: App, pattern: str, forget: str | None) -> None:
    """What jobs were measured at, by signature: the program and those options that decide what
    it costs (`rlq show` tells a job's). New jobs are charged and packed by it.

    PATTERN is a part of a signature, or a shell pattern: 'rlq_sac*Humanoid*'.

    \b
    peak      the most it took: host memory, GPU memory, SM share; cores kept busy
    alone     training steps/s with a device to itself
    together  how many times one job's speed 2, 3, … of them give on a device
    """
    if forget is not None:
        if pattern:
            raise UsageError(
                "--forget names one signature, and no pattern beside it",
                hint="`rlq profile` lists the signatures",
            )
        with app.client() as client:
            said = client.forget(forget)
        if app.json:
            print_json({"forgotten": forget})
        else:
            click.echo(clean(said))
        return
    with app.client() as client:
        found = client.profile(pattern)
    if app.json:
        print_json(found)
    elif not stdout_is_terminal():
        print_plain(found, time.time())
    elif found.programs or found.curves:
        print_profiles(found, time.time())
    elif pattern:
        note(f"nothing was learned of a program like {clean(pattern)!r}")
        note("hint: `rlq profile` lists all")
    else:
        note("nothing was learned yet: it takes a job that runs for a while and reports its steps")
        note(
            "hint: SB3 and SBX programs report by themselves; `rlq calibrate` measures in minutes"
        )


def print_profiles(found: Profiles, now: float) -> None:
    mixes = [curve for curve in found.curves if len(curve.signatures) > 1]
    first = True
    for program in found.programs:
        if not first:
            click.echo()
        first = False
        click.echo(clean(program.signature))
        line("peak", peak_words(program, now))
        for i, solo in enumerate(program.solo):
            age = format_duration(now - solo.learned_at)
            line(
                "alone" if i == 0 else "",
                f"{rate(solo.steps_per_s)} steps/s on {clean(solo.device)} ({age} ago)",
            )
        for i, curve in enumerate(curves_of(found, program.signature)):
            line("together" if i == 0 else "", curve_words(curve))
    for curve in mixes:
        if not first:
            click.echo()
        first = False
        click.echo(mix_words(curve.signatures))
        line("together", curve_words(curve))


def mix_words(signatures: tuple[str, ...]) -> str:
    """ "A (75%) beside B (25%)"; without shares where all have the same."""
    parts = Counter(signatures)
    if len(set(parts.values())) == 1:
        return " beside ".join(map(clean, parts))
    return " beside ".join(
        f"{clean(name)} ({100 * n // len(signatures)}%)" for name, n in parts.items()
    )


def line(name: str, text: str) -> None:
    for i, part in enumerate(folded(text, INDENT)):
        click.echo(f"  {name if i == 0 else '':<{INDENT - 2}}{part}")


def curves_of(found: Profiles, signature: str) -> list[Curve]:
    """Of this program alone, not of mixes."""
    return [curve for curve in found.curves if curve.signatures == (signature,)]


def peak_words(program: Profiled, now: float) -> str:
    if not program.runs:
        return "not known: no run of it was long enough yet"
    parts = []
    if program.mem_mib is not None:
        parts.append(f"{format_mib(program.mem_mib)} memory")
    if program.gpu_mem_mib is not None:
        parts.append(f"{format_mib(program.gpu_mem_mib)} GPU memory")
    if program.sm_pct is not None:
        parts.append(f"{program.sm_pct}% SM")
    if program.cpu_cores is not None:
        parts.append(f"{program.cpu_cores:.1f} cores")
    runs = "1 run" if program.runs == 1 else f"{program.runs} runs"
    age = format_duration(now - program.learned_at)
    return f"{', '.join(parts) or 'nothing'} ({runs}, {age} ago)"


def curve_words(curve: Curve) -> str:
    points = ", ".join(f"{point.jobs} give {point.stp:.1f}x" for point in curve.points)
    return f"{points} on {clean(curve.device)}"


def print_plain(found: Profiles, now: float) -> None:
    """One line for each program and device; a mix of programs stands under `A + B`."""
    rows: list[tuple[object, ...]] = []
    told: set[tuple[str, tuple[str, ...]]] = set()
    for program in found.programs:
        curves = {curve.device: curve for curve in curves_of(found, program.signature)}
        solo = {one.device: one.steps_per_s for one in program.solo}
        for device in [*solo, *(d for d in curves if d not in solo)] or [NONE]:
            told.add((device, (program.signature,)))
            curve = curves.get(device)
            rows.append(
                (
                    program.signature,
                    *known(program.mem_mib, program.gpu_mem_mib, program.sm_pct),
                    *known(program.cpu_cores),
                    program.runs,
                    f"{max(0.0, now - program.learned_at):.0f}",
                    device,
                    NONE if device not in solo else f"{solo[device]:g}",
                    points_plain(() if curve is None else curve.points),
                )
            )
    for curve in found.curves:
        if (curve.device, curve.signatures) not in told:
            age = now - max(point.learned_at for point in curve.points)
            rows.append(
                (
                    " + ".join(curve.signatures),
                    *known(None, None, None, None),
                    0,
                    f"{max(0.0, age):.0f}",
                    curve.device,
                    NONE,
                    points_plain(curve.points),
                )
            )
    print_tsv(
        (
            *("SIGNATURE", "MEM_MIB", "GPU_MEM_MIB", "SM_PCT", "CPU_CORES", "RUNS", "AGE_S"),
            *("DEVICE", "SOLO_STEPS_PER_S", "STP"),
        ),
        rows,
    )


def points_plain(points: tuple[CurvePoint, ...]) -> str:
    return ",".join(f"{point.jobs}:{point.stp:.3f}" for point in points) or NONE


def known(*numbers: float | None) -> list[object]:
    return [NONE if number is None else number for number in numbers]
