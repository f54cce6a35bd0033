"""GPUs made of files: a stub `libnvidia-ml.so.1`, and the Python side that drives it.

LD_LIBRARY_PATH is read when a process starts, so the process that calls NVML must be started
with `StubNvml.env` in its environment.  What the files hold: see the top of nvml_stub.c.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).with_name("nvml_stub.c")

GPU_IS_LOST = 15
DRIVER_NOT_LOADED = 9
VERSION_MISMATCH = 18
NOT_SUPPORTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StubGpu:
    """One board; the defaults are an idle 40 GB A100.  Memory in MiB, shares in per cent."""

    index: int = 0
    uuid: str = ""  # "": made from the index
    name: str = "NVIDIA A100-PCIE-40GB"
    mem_total_mib: int = 40960
    #: Used by nobody who can be seen.
    mem_external_mib: int = 0
    mem_reserved_mib: int = 512
    sm_external: int = 0
    temperature: int = 40
    power_w: int = 60
    mig: int = 0
    util_supported: int = 1
    proc_mem_known: int = 1
    #: An NVML code: what every call on this device answers.  0: it works.
    error: int = 0
    #: Masks of 64 CPUs each in hex, the lowest first: "f0f,1"; or "none".
    cpu_affinity: str = "none"
    #: One function's failures: ("GetTemperature", 3).
    fail: tuple[tuple[str, int], ...] = ()
    #: (uuid, total, external), used while `mig` is 1.
    mig_devices: tuple[tuple[str, int, int], ...] = ()

    def lines(self) -> list[str]:
        plain = (
            *("index", "name", "mem_total_mib", "mem_external_mib", "mem_reserved_mib"),
            *("sm_external", "temperature", "power_w", "mig", "util_supported"),
            *("proc_mem_known", "error", "cpu_affinity"),
        )
        return [
            *(f"{key}={getattr(self, key)}" for key in plain),
            f"uuid={self.uuid or stub_uuid(self.index)}",
            *(f"fail={function}:{code}" for function, code in self.fail),
            *(f"mig_device={uuid},{total},{used}" for uuid, total, used in self.mig_devices),
        ]


def stub_uuid(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


class StubNvml:
    """The stub's folder.  Every change is seen at the next NVML call, in whichever process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._gpus: dict[int, StubGpu] = {}
        self._globals: dict[str, object] = {}
        (folder / "procs").mkdir(parents=True, exist_ok=True)
        self._library = _compiled()
        self._write()

    @property
    def env(self) -> dict[str, str]:
        """To be laid over the environment of the process that is to see these GPUs."""
        return {
            "LD_LIBRARY_PATH": str(self._library.parent),
            "RLQ_NVML_STUB": str(self.folder),
        }

    def set_gpus(self, gpus: Sequence[StubGpu | Mapping[str, Any]]) -> None:
        """Replace all boards; a mapping's missing fields are StubGpu's, `index` its position."""
        made = [
            gpu if isinstance(gpu, StubGpu) else StubGpu(**{"index": position, **gpu})
            for position, gpu in enumerate(gpus)
        ]
        self._gpus = {gpu.index: gpu for gpu in made}
        self._write()

    def update(self, index: int, **fields: Any) -> None:
        self._gpus[index] = replace(self._gpus[index], **fields)
        self._write()

    def fail(self, code: int) -> None:
        """Every init, and every call of a process that has NVML open, fails; 0: works again."""
        self._globals["init_error"] = code
        self._write()

    def hang(self, seconds: float) -> None:
        """Every device call takes so long; 0: answers at once again."""
        self._globals["hang_s"] = seconds
        self._write()

    def lose(self, index: int) -> None:
        """The board falls off the bus.  `update(index, error=0)` brings it back."""
        self.update(index, error=GPU_IS_LOST)

    def set_process(
        self,
        pid: int,
        *,
        gpu: int = 0,
        mem_mib: int = 0,
        sm: int | Sequence[int] | None = 0,
        kind: str = "C",
        mig_uuid: str = "",
    ) -> None:
        """What a live process holds; a sequence: several samples, None: no sample.

        `kind`: C compute, G graphics, M an MPS client.
        """
        self.set_process_lines(pid, [process_line(gpu, mem_mib, sm, kind, mig_uuid)])

    def set_process_lines(self, pid: int, lines: Sequence[str]) -> None:
        _replace(self.folder / "procs" / str(pid), lines)

    def drop_process(self, pid: int) -> None:
        (self.folder / "procs" / str(pid)).unlink(missing_ok=True)

    def _write(self) -> None:
        lines = [f"{key}={value}" for key, value in self._globals.items()]
        for gpu in self._gpus.values():
            lines += gpu.lines()
        _replace(self.folder / "gpus", lines)


def process_line(
    gpu: int,
    mem_mib: int,
    sm: int | Sequence[int] | None,
    kind: str = "C",
    mig_uuid: str = "",
) -> str:
    """A line of a process's file: a fake training script writes its own."""
    samples = [] if sm is None else [sm] if isinstance(sm, int) else sm
    return f"{gpu} {mem_mib} {','.join(map(str, samples)) or '-'} {kind} {mig_uuid}".rstrip()


def _replace(path: Path, lines: Sequence[str]) -> None:
    # Not in `procs/` itself: the stub would take a half-written file there for a process.
    fresh = path.parent / f".{path.name}.{os.getpid()}"
    fresh.write_text("".join(f"{line}\n" for line in lines))
    fresh.replace(path)


def _compiled() -> Path:
    """The library, compiled once for this source and kept in the user's temporary folder."""
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"rlq-nvml-stub-{os.getuid()}-{digest}"
    library = folder / "libnvidia-ml.so.1"
    if not library.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        fresh = folder / f".{os.getpid()}.so"
        compiler = shutil.which("cc") or shutil.which("gcc") or "cc"
        flags = ["-std=gnu11", "-O1", "-Wall", "-shared", "-fPIC"]
        soname = "-Wl,-soname,libnvidia-ml.so.1"
        subprocess.run([compiler, *flags, soname, str(_SOURCE), "-o", str(fresh)], check=True)
        fresh.replace(library)  # whole or not at all, for test processes side by side
    return library
