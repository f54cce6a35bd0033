"""rlq beside task-spooler, nq, gflow and Slurm, in one run, alternated.

Run: python bench/rivals.py [--jobs 10] [--rounds 5] [--seconds 0.1] [--only rlq,nq]
In each round each queue, one after the other and each round another one first: a gate job keeps
it busy; a shell loop submits `--jobs` jobs (submissions/s); as many again are submitted and
timed one by one (whole process); the gate opens, and the jobs write down when they start and
end.  What is not installed is left out, with a line that says so.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.machine import print_machine
from bench.queues import RIVALS, Gate, Queue, Rlq, submit_loop_s, submit_ms
from bench.report import ratio, spread
from bench.stamps import gaps_ms, read_stamps, stamp_command

#: Title, unit.
MEASURES = {
    "rate": ("submissions by a shell loop", "jobs/s"),
    "submit": ("submit, whole process", "ms"),
    "gap": ("end of one job to start of the next", "ms"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="length of a job")
    parser.add_argument("--only", default="", help="names, separated by commas")
    options = parser.parse_args()
    only = {name.strip().lower() for name in options.only.split(",") if name.strip()}
    #: measure -> queue -> the median of each round
    found: dict[str, dict[str, list[float]]] = {measure: {} for measure in MEASURES}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlq-rivals-")))
        folder.chmod(0o755)
        print_machine(folder)
        queues: list[Queue] = [stack.enter_context(Rlq())]
        for name, (make, install) in RIVALS.items():
            if only and name.lower() not in only:
                continue
            try:
                queues.append(stack.enter_context(make()))
            except FileNotFoundError as missing:
                print(f"skipped: {name} is not installed ({missing}): {install}")
            except TimeoutError as error:
                print(f"skipped: {name} did not start: {error}")
        job = stamp_command(folder)
        for n in range(options.rounds):
            first = n % len(queues)
            for queue in queues[first:] + queues[:first]:
                one = measure(queue, folder / f"{queue.name}-{n}", job, options)
                for what, value in one.items():
                    found[what].setdefault(queue.name, []).append(value)
    for what, (title, unit) in MEASURES.items():
        for name, values in found[what].items():
            line = f"{title}, {name}: {spread(values, unit)}"
            if name != "rlq":
                line += f"; rlq / {name} {ratio(found[what]['rlq'], values)}"
            print(line)


def measure(
    queue: Queue, stem: Path, job: list[str], options: argparse.Namespace
) -> dict[str, float]:
    stamps = stem.with_suffix(".stamps")
    gate = Gate(stem.with_suffix(".gate"))
    argv = [*job, str(stamps), str(options.seconds)]
    submit_ms(queue, gate.argv)
    try:
        gate.wait_until_started()
        loop_s = submit_loop_s(queue, argv, options.jobs)
        each_ms = [submit_ms(queue, argv) for _ in range(options.jobs)]
    finally:
        gate.open()
    done = read_stamps(stamps, 2 * options.jobs, 120 + 10 * options.jobs)
    gaps = gaps_ms(done)
    assert min(gaps) > 0, f"{queue.name} ran two jobs at a time"
    return {
        "rate": options.jobs / loop_s,
        "submit": statistics.median(each_ms),
        "gap": statistics.median(gaps),
    }


if __name__ == "__main__":
    main()
