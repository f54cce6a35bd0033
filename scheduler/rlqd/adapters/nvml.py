"""Reading NVIDIA GPUs through NVML (package nvidia-ml-py, module pynvml).

NVML fails in many ways on a lab's machine: the driver is upgraded under it, a board falls off
the bus, MIG hides utilisation, and now and then a call does not come back at all.  So:

- `_call` is the one place where NVML's errors are caught.  A field that cannot be read is
  None; a device that is lost stays listed, with a `problem`; neither touches the other devices.
- All calls are made in one thread of ours, and `read` waits for it a bounded time.  A process
  stuck in the driver cannot be interrupted; its monitor can only stop waiting.
- After a failure of the driver or of a device, NVML is shut down and initialised again, at most
  once per `retry_s` (for one device, whose neighbours still work, a sixth as often).  Static
  fields (name, UUID, affinity) are read once per initialisation.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pynvml

from rlqd.readings import GpuProcessReading, GpuReading, GpusReading

_MIB = 1 << 20
_AFFINITY_WORDS = 16  # 64 CPUs each

_PROBLEMS = {
    pynvml.NVML_ERROR_UNINITIALIZED: "NVML lost its connection to the driver",
    pynvml.NVML_ERROR_NO_PERMISSION: "the driver refuses access (permissions of /dev/nvidia*?)",
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: "its external power cable is not connected",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
    pynvml.NVML_ERROR_TIMEOUT: "the driver timed out",
    pynvml.NVML_ERROR_IRQ_ISSUE: "the kernel reports an interrupt problem with it",
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "there is no NVIDIA driver (libnvidia-ml.so.1)",
    pynvml.NVML_ERROR_CORRUPTED_INFOROM: "its infoROM is corrupted",
    pynvml.NVML_ERROR_GPU_IS_LOST: "lost (fell off the bus); a reboot usually brings it back",
    pynvml.NVML_ERROR_RESET_REQUIRED: "it needs a reset (nvidia-smi --gpu-reset, or reboot)",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "the NVIDIA driver was upgraded while its old version is still loaded: "
        "reboot or reload the driver, then restart rlqd"
    ),
}

#: What one device can suffer by itself.  Another code from a device's calls is a field that
#: this device does not have, or does not show to us.
_DEVICE_FATAL = {
    pynvml.NVML_ERROR_IRQ_ISSUE,
    pynvml.NVML_ERROR_GPU_IS_LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED,
}
#: What means that NVML as a whole no longer works.
_DRIVER_FATAL = {
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
}


class NvmlMonitor:
    """Reads all GPUs.  Never raises for anything NVML does.

    `patience_s`: how long `read` waits for an answer.  Generous, because initialising boards
    that nobody holds open takes seconds.  While a call hangs, further reads answer at once.
    """

    def __init__(self, *, retry_s: float = 10.0, patience_s: float = 5.0) -> None:
        self._nvml = _Nvml(retry_s)
        self._patience_s = patience_s
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting: _Request | None = None
        self._last: GpusReading | None = None

    def read(self) -> GpusReading:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="nvml", daemon=True)
            self._thread.start()
        if self._waiting is not None and not self._waiting.done.is_set():
            return self._not_answering(self._waiting)
        # An answer that came after we stopped waiting is stale: it is thrown away.
        self._waiting = request = _Request()
        self._requests.put(request)
        if not request.done.wait(self._patience_s):
            return self._not_answering(request)
        assert request.reading is not None
        self._last = request.reading
        return request.reading

    def close(self) -> None:
        """Safe to repeat.  A call that hangs is left behind: its thread ends with the process."""
        if self._thread is not None:
            self._requests.put(None)
            hangs = self._waiting is not None and not self._waiting.done.is_set()
            self._thread.join(0 if hangs else self._patience_s)
            self._thread = None
            self._waiting = None

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                request.reading = self._nvml.read()
            except Exception as error:
                # Not NVML's doing (those are caught in `_call`), so ours: shown, not hidden, and
                # without it `read` would wait for a dead thread for ever.
                request.reading = GpusReading(
                    taken_at_ms=_now_ms(), problem=f"a bug in rlqd's NVML monitor: {error!r}"
                )
            request.done.set()
        self._nvml.shut_down()

    def _not_answering(self, request: _Request) -> GpusReading:
        now = _now_ms()
        problem = f"the NVIDIA driver has not answered for {(now - request.asked_ms) // 1000} s"
        known = self._last.gpus if self._last else ()
        return GpusReading(
            taken_at_ms=now,
            problem=problem,
            gpus=tuple(_blank(gpu, problem) for gpu in known),
        )


class _Request:
    def __init__(self) -> None:
        self.asked_ms = _now_ms()
        self.done = threading.Event()
        self.reading: GpusReading | None = None


@dataclass(slots=True)
class _Device:
    """A board, or a MIG device on one."""

    handle: Any
    board_handle: Any  # for a board, the same as `handle`
    board_uuid: str
    index: int
    uuid: str
    name: str
    cores_near: tuple[int, ...]
    mig: bool | None
    #: NVML's time stamps of samples: microseconds of CLOCK_REALTIME.
    sampled_us: int
    #: Old drivers have no version 2, which alone tells reserved memory.
    memory_v2: bool = True


@dataclass(slots=True)
class _Board:
    index: int
    device: _Device | None  # None: it cannot even be identified, because of
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _Known:
    board_uuid: str
    reading: GpuReading


def _call(codes: set[int], function: str, *arguments: object) -> Any:
    """Call NVML.  If that fails: None, and the error's code is added to `codes`."""
    try:
        return getattr(pynvml, function)(*arguments)
    except pynvml.NVMLError as error:
        codes.add(error.value)
    except (AttributeError, ValueError, OSError):
        # A binding older than the function; a name that is not UTF-8; a broken library.
        codes.add(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    return None


@dataclass(slots=True)
class _Nvml:
    """NVML itself, with what is known of the devices.  Used from one thread only."""

    retry_s: float
    _boards: list[_Board] | None = None  # None: not initialised
    _initialised_at: float | None = None
    _problem: tuple[str, bool] = ("", False)  # and whether there is no driver at all
    #: Every device seen, as last read, by UUID: what is lost now is still listed.
    _seen: dict[str, _Known] = field(default_factory=dict)
    #: What failed since it was last cleared: at initialisation and for each board.
    _codes: set[int] = field(default_factory=set)

    def _ask(self, function: str, *arguments: object) -> Any:
        return _call(self._codes, function, *arguments)

    def read(self) -> GpusReading:
        taken_at_ms = _now_ms()
        if self._boards is None and self._may_retry():
            self._initialise()
        readings: list[GpuReading] = []
        suffering = False
        for board in self._boards or ():
            self._codes.clear()
            readings += self._read_board(board)
            suffering |= board.device is None or bool(self._codes & _DEVICE_FATAL)
            if fatal := self._codes & _DRIVER_FATAL:
                self._fail(max(fatal))
                break
        if self._boards is None:
            problem, absent = self._problem
            return GpusReading(
                taken_at_ms=taken_at_ms,
                problem=problem,
                absent=absent,
                gpus=tuple(_blank(known.reading, problem) for known in self._seen.values()),
            )
        gone = self._gone({reading.uuid for reading in readings})
        if (suffering or gone) and self._may_retry(patience=6):
            # A lost board comes back, if at all, only for a fresh NVML.
            self.shut_down()
        gpus = sorted([*readings, *gone], key=lambda reading: reading.index)
        return GpusReading(taken_at_ms=taken_at_ms, gpus=tuple(gpus))

    def shut_down(self) -> None:
        if self._boards is not None:
            self._ask("nvmlShutdown")
            self._boards = None

    def _may_retry(self, patience: int = 1) -> bool:
        at = self._initialised_at
        return at is None or time.monotonic() - at >= patience * self.retry_s

    def _initialise(self) -> None:
        self._initialised_at = time.monotonic()
        self._codes.clear()
        self._ask("nvmlInit")
        if self._codes:
            return self._fail(max(self._codes))
        count = self._ask("nvmlDeviceGetCount")
        if count is None:
            self._ask("nvmlShutdown")
            return self._fail(max(self._codes))
        self._boards = [self._open_board(index) for index in range(count)]
        return None

    def _fail(self, code: int) -> None:
        text = _PROBLEMS.get(code, f"NVML fails with error {code}")
        absent = code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND or (
            # The library without the module: a CPU-only machine made from a GPU image, unless
            # the device files say that there was a driver.
            code == pynvml.NVML_ERROR_DRIVER_NOT_LOADED and not os.path.exists("/dev/nvidia0")
        )
        # A machine that had GPUs a moment ago is not a machine without.
        self._problem = (text, absent and not self._seen)
        self.shut_down()

    def _open_board(self, index: int) -> _Board:
        self._codes.clear()
        handle = self._ask("nvmlDeviceGetHandleByIndex", index)
        uuid = None if handle is None else self._ask("nvmlDeviceGetUUID", handle)
        if uuid is None:
            code = max(self._codes)
            return _Board(index, None, _PROBLEMS.get(code, f"NVML fails with error {code}"))
        words = self._ask("nvmlDeviceGetCpuAffinity", handle, _AFFINITY_WORDS)
        return _Board(
            index, self._open(handle, None, index=index, uuid=str(uuid), near=_bits(words or ()))
        )

    def _open(
        self, handle: Any, board: _Device | None, *, index: int, uuid: str, near: tuple[int, ...]
    ) -> _Device:
        return _Device(
            handle=handle,
            board_handle=board.handle if board else handle,
            board_uuid=board.uuid if board else uuid,
            index=index,
            uuid=uuid,
            name=str(self._ask("nvmlDeviceGetName", handle) or "unknown GPU"),
            cores_near=near,
            mig=None if board is None else True,
            sampled_us=_wall_us() - 1_000_000,
        )

    def _read_board(self, board: _Board) -> Sequence[GpuReading]:
        device = board.device
        if device is None:
            return self._unidentified(board)
        mode = self._ask("nvmlDeviceGetMigMode", device.handle)
        parts = self._parts(device) if mode is not None and mode[0] else []
        if problem := self._device_problem():
            # Its MIG devices, if it had any, are lost with it.
            known = [k.reading for k in self._seen.values() if k.board_uuid == device.uuid]
            return [_blank(r, problem) for r in known] or [self._unread(device, problem)]
        device.mig = None if mode is None else bool(mode[0])
        if device.mig and not parts:
            problem = "MIG mode is on, but no MIG device has been made on it"
            readings = [self._unread(device, problem)]
        else:
            readings = [self._read_device(part) for part in parts or [device]]
        # MIG devices come and go at their administrator's wish, and stand in their board's
        # place: what this board no longer shows is not lost.
        for uuid in [u for u, k in self._seen.items() if k.board_uuid == device.uuid]:
            del self._seen[uuid]
        self._seen |= {r.uuid: _Known(device.uuid, r) for r in readings}
        return readings

    def _parts(self, board: _Device) -> list[_Device]:
        """The MIG devices of a board: looked up at every reading, they need no new `nvmlInit`."""
        found = []
        for position in range(self._ask("nvmlDeviceGetMaxMigDeviceCount", board.handle) or 0):
            handle = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", board.handle, position)
            uuid = None if handle is None else self._ask("nvmlDeviceGetUUID", handle)
            if uuid is not None:
                part = self._open(
                    handle, board, index=board.index, uuid=str(uuid), near=board.cores_near
                )
                found.append(part)
        return found

    def _read_device(self, device: _Device) -> GpuReading:
        total, free, reserved = self._memory(device)
        utilisation = self._ask("nvmlDeviceGetUtilizationRates", device.handle)
        sm_pct = None if utilisation is None else min(100, int(utilisation.gpu))
        processes = self._processes(device, sm_pct)
        temperature = self._ask(
            "nvmlDeviceGetTemperature", device.board_handle, pynvml.NVML_TEMPERATURE_GPU
        )
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", device.board_handle)
        if problem := self._device_problem():
            return self._unread(device, problem)
        return GpuReading(
            uuid=device.uuid,
            index=device.index,
            name=device.name,
            problem="" if free is not None else "its free memory cannot be read",
            mem_mib_total=total,
            mem_mib_free=free,
            mem_mib_reserved=reserved,
            sm_pct=sm_pct,
            temperature_c=None if temperature is None else int(temperature),
            power_w=None if milliwatts is None else round(milliwatts / 1000),
            mig=device.mig,
            cores_near=device.cores_near,
            processes=processes,
        )

    def _memory(self, device: _Device) -> tuple[int | None, int | None, int | None]:
        """Total, free and reserved MiB."""
        memory = None
        if device.memory_v2:
            version = getattr(pynvml, "nvmlMemory_v2", None)
            memory = self._ask("nvmlDeviceGetMemoryInfo", device.handle, version)
        reserved = getattr(memory, "reserved", None)
        if memory is None:
            memory = self._ask("nvmlDeviceGetMemoryInfo", device.handle)
            device.memory_v2 = device.memory_v2 and memory is None
        if memory is None or not memory.total:
            return None, None, None
        return (
            memory.total // _MIB,
            memory.free // _MIB,
            None if reserved is None else -(-reserved // _MIB),
        )

    def _processes(self, device: _Device, sm_pct: int | None) -> tuple[GpuProcessReading, ...]:
        memory: dict[int, int | None] = {}
        # One process may stand in more than one list, with the same memory in each.  Under MPS,
        # clients are listed apart.
        for kind in ("Compute", "Graphics", "MPSCompute"):
            listed = self._ask(f"nvmlDeviceGet{kind}RunningProcesses", device.handle)
            for process in listed or ():
                used = process.usedGpuMemory
                mib = None if used is None else -(-int(used) // _MIB)
                known = memory.get(int(process.pid))
                memory[int(process.pid)] = mib if known is None else max(known, mib or 0)
        shares = self._shares(device) if memory and not device.mig else None
        # NVML's rule: a process without a sample, where others have one, did not run.  Without
        # any samples, only an idle device tells that.
        absent = 0 if shares or (shares is not None and sm_pct == 0) else None
        return tuple(
            GpuProcessReading(pid=pid, mem_mib=mib, sm_pct=(shares or {}).get(pid, absent))
            for pid, mib in sorted(memory.items())
        )

    def _shares(self, device: _Device) -> dict[int, int] | None:
        """Mean SM per cent of each process since the last reading; None: not supported.

        Empty when there are no samples, which NVML reports as an error.
        """
        now_us = _wall_us()
        if device.sampled_us > now_us + 1_000_000:
            # The clock was set back: without this there are no samples until it has caught up.
            device.sampled_us = now_us - 1_000_000
        since = device.sampled_us
        codes: set[int] = set()
        samples = _call(codes, "nvmlDeviceGetProcessUtilization", device.handle, since)
        self._codes |= codes
        if samples is None:
            return {} if codes == {pynvml.NVML_ERROR_NOT_FOUND} else None
        seen: dict[int, list[int]] = {}
        for sample in samples:
            # Some drivers pad the answer with old or empty samples.
            if sample.pid and sample.timeStamp > since:
                seen.setdefault(int(sample.pid), []).append(min(100, int(sample.smUtil)))
                device.sampled_us = max(device.sampled_us, int(sample.timeStamp))
        return {pid: round(sum(shares) / len(shares)) for pid, shares in seen.items()}

    def _device_problem(self) -> str:
        fatal = self._codes & _DEVICE_FATAL
        return _PROBLEMS[max(fatal)] if fatal else ""

    def _unread(self, device: _Device, problem: str) -> GpuReading:
        known = self._seen.get(device.uuid)
        return GpuReading(
            uuid=device.uuid,
            index=device.index,
            name=device.name,
            problem=problem,
            mem_mib_total=known.reading.mem_mib_total if known else None,
            mig=device.mig,
            cores_near=device.cores_near,
        )

    def _unidentified(self, board: _Board) -> list[GpuReading]:
        """A board that does not even tell its UUID: what was seen at this index, if anything."""
        known = [
            _blank(gone, board.problem) for gone in self._gone(set()) if gone.index == board.index
        ]
        return known or [
            GpuReading(
                uuid=f"unreadable-{board.index}",
                index=board.index,
                name="unknown GPU",
                problem=board.problem,
            )
        ]

    def _gone(self, listed: set[str]) -> list[GpuReading]:
        """What was seen on boards that NVML no longer identifies, and is not `listed` yet."""
        identified = {board.device.uuid for board in self._boards or () if board.device}
        return [
            _blank(known.reading, "gone: the driver no longer lists it")
            for uuid, known in self._seen.items()
            if known.board_uuid not in identified and uuid not in listed
        ]


def _blank(gpu: GpuReading, problem: str) -> GpuReading:
    """What stays known of a device that cannot be read now: identity, size, place."""
    return replace(
        gpu,
        problem=problem,
        mem_mib_free=None,
        mem_mib_reserved=None,
        sm_pct=None,
        temperature_c=None,
        power_w=None,
        processes=(),
    )


def _bits(words: Iterable[int]) -> tuple[int, ...]:
    return tuple(
        64 * position + bit
        for position, word in enumerate(words)
        for bit in range(64)
        if word >> bit & 1
    )


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _wall_us() -> int:
    return time.time_ns() // 1_000
