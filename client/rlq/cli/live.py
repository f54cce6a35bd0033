"""Progress bars at the bottom of a terminal, for `logs -f` and `wait`."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from rlq.cli.output import clean, console
from rlq.cli.tables import WARMING_UP, count, done_pct, is_warming_up, rate, state_word
from rlq.protocol.messages import Job, Waited
from rlq.protocol.units import format_duration

#: More bars than this do not help anybody.
BARS_MAX = 8


class Bars:
    """One bar for each running job that reports; a line on top that counts the ended ones."""

    def __init__(self, *, total: int, stderr: bool = True) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[said]}", markup=False),
            console=console(stderr=stderr),
            transient=True,
            refresh_per_second=4,
        )
        self._tasks: dict[int, TaskID] = {}
        self._overall: TaskID | None = None
        self._total = total

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def follow(self, waited: Waited) -> None:
        """The daemon's word on jobs that are waited for, perhaps too many to name each."""
        ended = waited.ended
        if not waited.partial:
            ended = sum(job.state.is_final for job in waited.jobs)
        else:
            named = {job.id for job in waited.jobs}
            for id in self._tasks.keys() - named:
                self._progress.remove_task(self._tasks.pop(id))
        self.update(waited.jobs, ended)

    def update(self, jobs: Sequence[Job], ended: int = 0) -> None:
        if self._total > 1:
            if self._overall is None:
                self._overall = self._progress.add_task("jobs ended", total=self._total, said="")
            self._progress.update(self._overall, completed=ended, said=f"{ended} of {self._total}")
        for job in jobs:
            if job.state.is_final:
                if (task := self._tasks.pop(job.id, None)) is not None:
                    self._progress.remove_task(task)
                continue
            if job.id not in self._tasks:
                if len(self._tasks) >= BARS_MAX or (self._total > 1 and job.progress is None):
                    continue
                name = f"{job.id} {clean(job.name)}"
                self._tasks[job.id] = self._progress.add_task(
                    name if len(name) <= 22 else f"{name[:21]}…", total=None, said=""
                )
            pct = done_pct(job.progress)
            self._progress.update(
                self._tasks[job.id],
                total=None if pct is None else 100,
                completed=pct or 0,
                said=said_of(job),
            )

    def print(self, line: str) -> None:
        """A line of a log, above the bars; its colours are kept."""
        self._progress.console.print(Text.from_ansi(line), soft_wrap=True)


def said_of(job: Job) -> str:
    progress = job.progress
    if progress is None:
        return state_word(job).lower()
    pct = done_pct(progress)
    parts = [count(progress.step) if pct is None else f"{pct}%"]
    if is_warming_up(progress):
        return " ".join([*parts, WARMING_UP])
    if progress.steps_per_s is not None:
        parts.append(f"{rate(progress.steps_per_s)} steps/s")
    if progress.eta_s is not None:
        parts.append(format_duration(progress.eta_s))
    return " ".join(parts)
