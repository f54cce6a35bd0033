"""A process that owns an NvmlMonitor: the loader reads LD_LIBRARY_PATH only when one starts.

Each line on stdin asks for one reading; the answer is one line of JSON on stdout.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from rlqd.adapters.nvml import NvmlMonitor
from rlqd.readings import GpuProcessReading, GpuReading, GpusReading


class NvmlReader:
    """The test's end: start with `StubNvml.env`, then `read` as often as wanted."""

    def __init__(
        self, env: Mapping[str, str], *, retry_s: float = 0.0, patience_s: float = 60.0
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-X", "dev", "-W", "error", __file__, str(retry_s), str(patience_s)],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self) -> GpusReading:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("read\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the reader died: see its traceback on stderr"
        fields = json.loads(line)
        return GpusReading(**{**fields, "gpus": tuple(_gpu(gpu) for gpu in fields["gpus"])})

    def close(self) -> int:
        """Close the monitor; the process's exit status."""
        self._process.communicate(timeout=60)
        return self._process.returncode


def _gpu(fields: dict[str, Any]) -> GpuReading:
    processes = tuple(GpuProcessReading(**process) for process in fields["processes"])
    near = tuple(fields["cores_near"])
    return GpuReading(**{**fields, "processes": processes, "cores_near": near})


def main() -> None:
    monitor = NvmlMonitor(retry_s=float(sys.argv[1]), patience_s=float(sys.argv[2]))
    for _ in sys.stdin:
        print(json.dumps(dataclasses.asdict(monitor.read())), flush=True)
    monitor.close()


if __name__ == "__main__":
    main()
