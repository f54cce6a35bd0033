"""`python -m bench [NAME…]`: run the named benchmarks, or all but the long ones, one by one."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

#: What `make bench` runs, in this order; about 15 minutes together.
DEFAULT = (
    "submit_rate",
    "submit_time",
    "turnaround",
    "list_latency",
    "scheduling_pass",
    "idle",
    "host_monitor",
    "rivals",
)
#: Only by name: each takes minutes.
LONG = ("sac_packing", "policies")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(DEFAULT + LONG))
    names: list[str] = parser.parse_args().names
    unknown = sorted(set(names) - {*DEFAULT, *LONG})
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]}; there are: {', '.join(DEFAULT + LONG)}")
    folder = Path(__file__).parent
    failed = []
    for name in names or DEFAULT:
        # A process each: no benchmark sees another's memory, threads or warm caches.
        print(f"\n== {name}", flush=True)
        child = subprocess.Popen([sys.executable, str(folder / f"{name}.py")])
        try:
            code = child.wait()
        except SystemExit:
            child.terminate()  # told to stop: it ends its own daemons, so it is not just killed
            child.wait()
            raise
        if code != 0:
            failed.append(name)
    if not names:
        print(f"\nnot run, because long: {', '.join(LONG)} (python -m bench NAME)")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
