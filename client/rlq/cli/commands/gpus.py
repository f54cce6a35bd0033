"""The GPUs: who uses what, inside the queue and outside it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import click

from rlq.cli.app import App, verb, warn
from rlq.cli.output import (
    NONE,
    Cell,
    Column,
    Row,
    clean,
    print_json,
    print_table,
    print_tsv,
    stdout_is_terminal,
)
from rlq.protocol.bookings import booked_words, quiet_words, what_words
from rlq.protocol.messages import Booking, Gpu, Host, Machine, Throughput
from rlq.protocol.units import format_mib


@verb("gpus", short_help="The GPUs: who uses what, in the queue and outside it.")
def command(app: App) -> None:
    """The machine: each GPU, what is free and promised, who uses it, in the queue and outside."""
    with app.client() as client:
        machine = client.devices()
    if app.json:
        print_json(machine)
        return
    if not stdout_is_terminal():
        print_plain(machine)
        return
    if machine.gpus:
        if machine.nvml_problem and not machine.nvml_absent:
            warn(clean(machine.nvml_problem))
        booked = [one for one in machine.bookings if one.gpus]
        print_table(
            [
                *(Column("GPU"), Column("NAME", least=10), Column("SM", "right")),
                *(Column("PROMISED", "right"), Column("MEM FREE", "right")),
                *(Column("OF", "right"), Column("PROMISED", "right"), Column("TEMP", "right")),
            ],
            list(rows_of(machine.gpus, booked, time.time())),
        )
    else:
        click.echo(without_gpu(machine))
    click.echo()
    click.echo(host_line(machine.host))
    for words in booked_lines(machine, time.time()):
        click.echo(f"note  {clean(words)}")


def without_gpu(machine: Machine) -> str:
    if machine.nvml_absent:
        return "no GPU (no NVIDIA driver here); jobs run on the CPU"
    if machine.nvml_problem:
        return f"the GPUs cannot be read: {clean(machine.nvml_problem)}"
    return "no GPU; jobs run on the CPU"


def throughput_words(found: Throughput) -> str:
    """ "3 jobs give 2.4x one job's speed (ANTT 1.3)"; "" while nobody knows."""
    if not found.jobs or found.stp is None:
        return ""
    jobs = "1 job gives" if found.jobs == 1 else f"{found.jobs} jobs give"
    slower = "" if found.antt is None else f" (ANTT {found.antt:.1f})"
    return f"{jobs} {found.stp:.1f}x one job's speed{slower}"


def rows_of(gpus: Sequence[Gpu], booked: Sequence[Booking], now: float) -> Iterator[Row]:
    for gpu in gpus:
        head: list[Cell | str] = [Cell(f"gpu{gpu.index}", "bold"), gpu.name]
        if gpu.problem:
            yield Row(head, rest=Cell(gpu.problem, "red"))
        else:
            yield Row(
                [
                    *head,
                    pct(gpu.sm_pct),
                    pct(gpu.sm_pct_charged),
                    mib(gpu.mem_mib_free),
                    mib(gpu.mem_mib_total),
                    mib(gpu.mem_mib_charged),
                    NONE if gpu.temperature_c is None else f"{gpu.temperature_c} °C",
                ]
            )
        for one in booked:
            if gpu.uuid in one.gpus:
                yield Row([""], rest=Cell(booked_words(one, now), "cyan"))
        if words := throughput_words(gpu.throughput):
            yield Row([""], rest=Cell(words))
        for process in sorted(gpu.processes, key=lambda p: (p.job is None, p.job or 0, p.pid)):
            who = f"job {process.job}" if process.job is not None else "outside the queue"
            used = ", ".join(
                part
                for part in (
                    "" if process.mem_mib is None else format_mib(process.mem_mib),
                    "" if process.sm_pct is None else f"{process.sm_pct}% SM",
                    {True: "MPS", False: "without MPS", None: ""}[process.mps],
                )
                if part
            )
            yield Row(
                [""],
                rest=Cell(
                    f"{who}: {process.user}, pid {process.pid}"
                    f"{', ' + used if used else ''}, {process.command}",
                    "" if process.job is not None else "yellow",
                ),
            )


def booked_lines(machine: Machine, now: float) -> list[str]:
    """What is booked of the machine beside its GPUs, and quiet hours."""
    lines = [
        f"{what_words(one)}: {booked_words(one, now)}"
        if one.kind != "maintenance"
        else booked_words(one, now)
        for one in machine.bookings
        if one.cores or one.mem_mib or not one.gpus
    ]
    if machine.quiet is not None:
        lines.append(quiet_words(machine.quiet, now))
    return lines


def host_line(host: Host) -> str:
    together = throughput_words(host.throughput)
    return (
        f"cpu   {host.cores_assigned} of {host.cores} cores given to jobs,"
        f" {host.cores_outside:.1f} busy outside the queue\n"
        + (f"      {together}\n" if together else "")
        + f"mem   {format_mib(host.mem_mib_available)} of {format_mib(host.mem_mib_total)} free,"
        f" {format_mib(host.mem_mib_charged)} promised to jobs"
    )


def print_plain(machine: Machine) -> None:
    print_tsv(
        (
            *("GPU", "UUID", "NAME", "SM_PCT", "SM_PCT_CHARGED", "MEM_MIB_FREE", "MEM_MIB_TOTAL"),
            *("MEM_MIB_CHARGED", "TEMPERATURE_C", "JOBS", "PROBLEM", "STP", "ANTT", "BOOKED"),
        ),
        [
            (
                *(gpu.index, gpu.uuid, gpu.name, known(gpu.sm_pct), gpu.sm_pct_charged),
                *(known(gpu.mem_mib_free), known(gpu.mem_mib_total), gpu.mem_mib_charged),
                known(gpu.temperature_c),
                ",".join(str(j) for j in sorted({p.job for p in gpu.processes if p.job})) or NONE,
                gpu.problem or NONE,
                *(ratio(gpu.throughput.stp), ratio(gpu.throughput.antt)),
                ",".join(b.name for b in machine.bookings if gpu.uuid in b.gpus) or NONE,
            )
            for gpu in machine.gpus
        ],
    )
    if machine.nvml_problem and not machine.nvml_absent:
        warn(clean(machine.nvml_problem))


def ratio(number: float | None) -> str:
    return NONE if number is None else f"{number:.3f}"


def known(number: int | None) -> object:
    return NONE if number is None else number


def pct(number: int | None) -> str:
    return NONE if number is None else f"{number}%"


def mib(number: int | None) -> str:
    return NONE if number is None else format_mib(number)
