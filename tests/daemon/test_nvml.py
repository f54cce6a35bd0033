"""What the NVML monitor says of GPUs, through the real binding and a stub driver."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.nvml_stub import (
    DRIVER_NOT_LOADED,
    NOT_SUPPORTED,
    VERSION_MISMATCH,
    StubGpu,
    StubNvml,
    stub_uuid,
)
from tests.support.nvml_stub.reader import NvmlReader
from tests.support.waiting import wait_until

from rlqd.readings import GpuProcessReading, GpuReading, GpusReading

FUNCTION_NOT_FOUND = 13
UNKNOWN = 999

Open = Callable[..., NvmlReader]


@pytest.fixture
def stub(tmp_path: Path) -> StubNvml:
    return StubNvml(tmp_path)


@pytest.fixture
def open_reader(stub: StubNvml) -> Iterator[Open]:
    opened: list[NvmlReader] = []

    def open_one(env: dict[str, str] | None = None, **options: float) -> NvmlReader:
        opened.append(NvmlReader(stub.env if env is None else env, **options))
        return opened[-1]

    yield open_one
    for reader in opened:
        assert reader.close() == 0, "the monitor did not close cleanly"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    if process.returncode is None:
        process.kill()
        process.wait()
    assert process.stdin is not None
    process.stdin.close()


def only(reading: GpusReading) -> GpuReading:
    assert reading.problem == ""
    assert len(reading.gpus) == 1, reading
    return reading.gpus[0]


def test_a_healthy_gpu_is_read_in_full(stub: StubNvml, open_reader: Open) -> None:
    gpu = StubGpu(
        mem_external_mib=1000, sm_external=7, temperature=61, power_w=213, cpu_affinity="f0f,1"
    )
    stub.set_gpus([gpu])
    before = time.monotonic_ns() // 1_000_000
    reading = open_reader().read()
    assert before <= reading.taken_at_ms <= time.monotonic_ns() // 1_000_000
    assert not reading.absent
    assert only(reading) == GpuReading(
        uuid=stub_uuid(0),
        index=0,
        name="NVIDIA A100-PCIE-40GB",
        mem_mib_total=40960,
        mem_mib_free=40960 - 1000 - 512,
        mem_mib_reserved=512,
        sm_pct=7,
        temperature_c=61,
        power_w=213,
        mig=False,
        cores_near=(0, 1, 2, 3, 8, 9, 10, 11, 64),
    )


def test_a_machine_without_the_library_has_no_gpus_and_no_failure(
    tmp_path: Path, open_reader: Open
) -> None:
    reader = open_reader({"LD_LIBRARY_PATH": str(tmp_path)})
    for _ in range(2):
        reading = reader.read()
        assert reading.absent
        assert reading.gpus == ()
        assert "no NVIDIA driver" in reading.problem


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="this machine has a GPU")
def test_the_library_without_a_driver_or_device_files_means_no_gpus(
    stub: StubNvml, open_reader: Open
) -> None:
    stub.fail(DRIVER_NOT_LOADED)
    reading = open_reader().read()
    assert reading.absent
    assert "driver is not loaded" in reading.problem


def test_a_driver_that_is_unloaded_under_us_is_a_problem_not_an_absence(
    stub: StubNvml, open_reader: Open
) -> None:
    stub.set_gpus([{}])
    reader = open_reader()
    assert only(reader.read()).mem_mib_free is not None
    stub.fail(DRIVER_NOT_LOADED)
    for _ in range(2):  # found out in the middle of a reading, then at the new initialisation
        reading = reader.read()
        assert not reading.absent
        assert "driver is not loaded" in reading.problem
        [gpu] = reading.gpus
        assert (gpu.uuid, gpu.mem_mib_free, gpu.sm_pct) == (stub_uuid(0), None, None)


def test_a_driver_that_is_loaded_again_is_found_again(stub: StubNvml, open_reader: Open) -> None:
    stub.fail(DRIVER_NOT_LOADED)
    reader = open_reader()
    assert reader.read().problem
    stub.set_gpus([{}, {}])
    stub.fail(0)
    assert [gpu.index for gpu in reader.read().gpus] == [0, 1]


def test_a_version_mismatch_says_what_to_do(stub: StubNvml, open_reader: Open) -> None:
    stub.set_gpus([{}])
    stub.fail(VERSION_MISMATCH)
    reading = open_reader().read()
    assert not reading.absent
    assert "reboot or reload the driver" in reading.problem


def test_an_init_error_without_a_text_of_its_own_shows_its_code(
    stub: StubNvml, open_reader: Open
) -> None:
    stub.fail(UNKNOWN)
    reading = open_reader().read()
    assert not reading.absent
    assert "999" in reading.problem


def test_init_is_not_tried_again_before_its_time(stub: StubNvml, open_reader: Open) -> None:
    stub.fail(VERSION_MISMATCH)
    reader = open_reader(retry_s=3600)
    assert reader.read().problem
    stub.fail(0)
    assert "reboot" in reader.read().problem


def test_one_lost_gpu_is_one_lost_gpu(stub: StubNvml, open_reader: Open) -> None:
    stub.set_gpus([{"name": "first"}, {"name": "second"}])
    reader = open_reader()
    reader.read()
    stub.lose(0)
    for _ in range(3):  # as a device, then as one that NVML no longer even identifies
        reading = reader.read()
        assert reading.problem == ""
        lost, well = reading.gpus
        assert (lost.uuid, lost.index, lost.name) == (stub_uuid(0), 0, "first")
        assert "lost" in lost.problem
        assert (lost.mem_mib_free, lost.sm_pct, lost.processes) == (None, None, ())
        assert lost.mem_mib_total == 40960, "what a request is checked against stays known"
        assert (well.problem, well.mem_mib_free) == ("", 40960 - 512)


def test_a_lost_gpu_that_comes_back_is_used_again(stub: StubNvml, open_reader: Open) -> None:
    stub.set_gpus([{}])
    reader = open_reader()
    reader.read()
    stub.lose(0)
    assert "lost" in reader.read().gpus[0].problem
    assert "lost" in reader.read().gpus[0].problem
    stub.update(0, error=0)
    wait_until(lambda: only(reader.read()), lambda gpu: gpu.mem_mib_free == 40960 - 512)


def test_a_gpu_lost_before_we_start_is_still_listed(stub: StubNvml, open_reader: Open) -> None:
    stub.set_gpus([{}, {}])
    stub.lose(1)
    well, lost = open_reader().read().gpus
    assert well.problem == ""
    assert (lost.index, lost.mem_mib_free) == (1, None)
    assert "lost" in lost.problem


def test_a_gpu_that_the_driver_no_longer_lists_is_told_by_its_uuid_not_its_index(
    stub: StubNvml, open_reader: Open
) -> None:
    first, second = StubGpu(uuid="GPU-a"), StubGpu(uuid="GPU-b", index=1)
    stub.set_gpus([first, second])
    reader = open_reader()
    reader.read()
    stub.set_gpus([StubGpu(uuid="GPU-b", index=0)])
    wait_until(
        lambda: {gpu.uuid: (bool(gpu.problem), gpu.mem_mib_free) for gpu in reader.read().gpus},
        lambda seen: seen == {"GPU-a": (True, None), "GPU-b": (False, 40960 - 512)},
    )


def test_a_field_that_cannot_be_read_is_none_and_the_rest_is_there(
    stub: StubNvml, open_reader: Open
) -> None:
    fields = ["GetTemperature", "GetPowerUsage", "GetMigMode", "GetCpuAffinity"]
    stub.set_gpus([{"fail": tuple((field, NOT_SUPPORTED) for field in fields)}])
    gpu = only(open_reader().read())
    assert (gpu.temperature_c, gpu.power_w, gpu.mig, gpu.cores_near) == (None, None, None, ())
    assert (gpu.problem, gpu.mem_mib_free, gpu.sm_pct) == ("", 40960 - 512, 0)


def test_a_sensor_with_an_unknown_error_does_not_lose_the_gpu(
    stub: StubNvml, open_reader: Open
) -> None:
    stub.set_gpus([{"fail": (("GetTemperature", UNKNOWN),)}])
    gpu = only(open_reader().read())
    assert (gpu.problem, gpu.temperature_c, gpu.mem_mib_free) == ("", None, 40960 - 512)


def test_unreadable_memory_is_a_problem_of_that_gpu(stub: StubNvml, open_reader: Open) -> None:
    broken = (("GetMemoryInfo", UNKNOWN), ("GetMemoryInfo_v2", UNKNOWN))
    stub.set_gpus([{"fail": broken}, {}])
    reading = open_reader().read()
    assert [bool(gpu.problem) for gpu in reading.gpus] == [True, False]
    assert reading.gpus[0].mem_mib_free is None


def test_an_old_driver_tells_free_memory_but_not_reserved(
    stub: StubNvml, open_reader: Open
) -> None:
    stub.set_gpus([{"fail": (("GetMemoryInfo_v2", FUNCTION_NOT_FOUND),)}])
    reader = open_reader()
    for _ in range(2):
        gpu = only(reader.read())
        assert (gpu.mem_mib_free, gpu.mem_mib_reserved) == (40960 - 512, None)


def test_a_process_has_its_memory_and_the_mean_of_its_samples(
    stub: StubNvml, open_reader: Open
) -> None:
    stub.set_gpus([{}])
    stub.set_process(os.getpid(), mem_mib=3000, sm=[10, 30, 50])
    gpu = only(open_reader().read())
    assert gpu.processes == (GpuProcessReading(pid=os.getpid(), mem_mib=3000, sm_pct=30),)
    assert gpu.mem_mib_free == 40960 - 512 - 3000
    assert gpu.sm_pct == 30


def test_process_shares_beyond_100_per_cent_are_clamped(stub: StubNvml, open_reader: Open) -> None:
    stub.set_gpus([{}])
    stub.set_process(os.getpid(), sm=180)
    gpu = only(open_reader().read())
    assert gpu.processes[0].sm_pct == 100
    assert gpu.sm_pct == 100


def test_compute_graphics_and_mps_entries_of_one_process_are_one_process(
    stub: StubNvml, open_reader: Open
) -> None:
    stub.set_gpus([{}])
    stub.set_process_lines(os.getpid(), ["0 500 - G", "0 2000 5 C", "0 2000 - M"])
    [process] = only(open_reader().read()).processes
    assert (process.pid, process.mem_mib) == (os.getpid(), 2000)


@pytest.mark.parametrize("kind", ["C", "G", "M"])
def test_a_process_of_any_kind_is_listed(stub: StubNvml, open_reader: Open, kind: str) -> None:
    stub.set_gpus([{}])
    stub.set_process(os.getpid(), mem_mib=800, kind=kind)
    [process] = only(open_reader().read()).processes
    assert (process.pid, process.mem_mib) == (os.getpid(), 800)


def test_process_memory_that_is_not_available_is_none(stub: StubNvml, open_reader: Open) -> None:
    stub.set_gpus([{"proc_mem_known": 0}])
    stub.set_process(os.getpid(), mem_mib=700, sm=5)
    gpu = only(open_reader().read())
    assert gpu.processes == (GpuProcessReading(pid=os.getpid(), mem_mib=None, sm_pct=5),)
    assert gpu.mem_mib_free == 40960 - 512 - 700


def test_without_samples_a_share_is_unknown_unless_the_gpu_is_idle(
    stub: StubNvml, open_reader: Open
) -> None:
    stub.set_gpus([{"sm_external": 20}])
    stub.set_process(os.getpid(), sm=None)
    reader = open_reader()
    assert only(reader.read()).processes[0].sm_pct is None
    stub.update(0, sm_external=0)
    assert only(reader.read()).processes[0].sm_pct == 0


def test_where_others_have_samples_a_process_without_did_not_run(
    stub: StubNvml, open_reader: Open, child: subprocess.Popen[bytes]
) -> None:
    stub.set_gpus([{}])
    stub.set_process(os.getpid(), sm=40)
    stub.set_process(child.pid, sm=None)
    gpu = only(open_reader().read())
    assert {process.pid: process.sm_pct for process in gpu.processes} == {
        os.getpid(): 40,
        child.pid: 0,
    }


def test_without_utilisation_shares_are_unknown_and_memory_is_not(
    stub: StubNvml, open_reader: Open
) -> None:
    stub.set_gpus([{"util_supported": 0}])
    stub.set_process(os.getpid(), mem_mib=100, sm=40)
    gpu = only(open_reader().read())
    assert (gpu.problem, gpu.sm_pct, gpu.mem_mib_free) == ("", None, 40960 - 512 - 100)
    assert gpu.processes == (GpuProcessReading(pid=os.getpid(), mem_mib=100, sm_pct=None),)


def test_memory_returns_when_its_process_has_died_reaped_or_not(
    stub: StubNvml, open_reader: Open, child: subprocess.Popen[bytes]
) -> None:
    stub.set_gpus([{}])
    stub.set_process(child.pid, mem_mib=5000, sm=10)
    reader = open_reader()
    assert only(reader.read()).mem_mib_free == 40960 - 512 - 5000
    child.kill()  # not reaped before the end of the test: a zombie
    gpu = wait_until(lambda: only(reader.read()), lambda gpu: gpu.processes == ())
    assert gpu.mem_mib_free == 40960 - 512


def test_what_changes_on_the_gpu_is_seen_at_the_next_reading(
    stub: StubNvml, open_reader: Open
) -> None:
    stub.set_gpus([{}])
    reader = open_reader()
    reader.read()
    stub.update(0, mem_external_mib=30000, sm_external=90)
    gpu = only(reader.read())
    assert (gpu.mem_mib_free, gpu.sm_pct) == (40960 - 512 - 30000, 90)


MIG = (("MIG-a", 4864, 100), ("MIG-b", 9856, 0))


def test_mig_devices_stand_in_their_boards_place(stub: StubNvml, open_reader: Open) -> None:
    stub.set_gpus([{"mig": 1, "mig_devices": MIG, "cpu_affinity": "3", "power_w": 80}, {}])
    stub.set_process_lines(os.getpid(), ["0 600 50 C MIG-b"])
    first, second, other = open_reader().read().gpus
    assert (first.uuid, first.mem_mib_total, first.mem_mib_free) == ("MIG-a", 4864, 4764)
    assert (second.uuid, second.mem_mib_total, second.mem_mib_free) == ("MIG-b", 9856, 9256)
    for part in (first, second):
        assert (part.index, part.mig, part.problem, part.sm_pct) == (0, True, "", None)
        assert (part.cores_near, part.power_w) == ((0, 1), 80)
    assert first.processes == ()
    assert second.processes == (GpuProcessReading(pid=os.getpid(), mem_mib=600, sm_pct=None),)
    assert (other.uuid, other.mig) == (stub_uuid(1), False)


def test_mig_switched_on_and_off_again_leaves_no_ghosts(stub: StubNvml, open_reader: Open) -> None:
    stub.set_gpus([{}])
    reader = open_reader()
    assert [gpu.uuid for gpu in reader.read().gpus] == [stub_uuid(0)]
    stub.update(0, mig=1, mig_devices=MIG)
    assert [gpu.uuid for gpu in reader.read().gpus] == ["MIG-a", "MIG-b"]
    stub.update(0, mig_devices=MIG[:1])
    assert [gpu.uuid for gpu in reader.read().gpus] == ["MIG-a"]
    stub.update(0, mig=0)
    assert [gpu.uuid for gpu in reader.read().gpus] == [stub_uuid(0)]
    stub.lose(0)
    for _ in range(3):
        assert [gpu.uuid for gpu in reader.read().gpus] == [stub_uuid(0)]


def test_mig_mode_without_a_mig_device_is_a_problem(stub: StubNvml, open_reader: Open) -> None:
    stub.set_gpus([{"mig": 1}])
    gpu = only(open_reader().read())
    assert (gpu.mem_mib_free, gpu.sm_pct) == (None, None)
    assert "MIG" in gpu.problem


def test_mig_devices_are_lost_with_their_board(stub: StubNvml, open_reader: Open) -> None:
    stub.set_gpus([{"mig": 1, "mig_devices": MIG}])
    reader = open_reader()
    reader.read()
    stub.lose(0)
    for _ in range(3):
        gpus = reader.read().gpus
        assert [gpu.uuid for gpu in gpus] == ["MIG-a", "MIG-b"]
        assert all("lost" in gpu.problem and gpu.mem_mib_free is None for gpu in gpus)


def test_a_driver_that_hangs_does_not_hang_us_and_is_forgiven(
    stub: StubNvml, open_reader: Open
) -> None:
    stub.set_gpus([{}])
    reader = open_reader(patience_s=0.5)
    wait_until(reader.read, lambda reading: not reading.problem)
    stub.hang(2)
    for _ in range(2):
        reading = reader.read()
        assert "not answered" in reading.problem
        assert not reading.absent
        assert [(gpu.uuid, gpu.mem_mib_free) for gpu in reading.gpus] == [(stub_uuid(0), None)]
    stub.hang(0)
    stub.update(0, mem_external_mib=1000)
    reading = wait_until(reader.read, lambda reading: not reading.problem)
    assert only(reading).mem_mib_free == 40960 - 512 - 1000, "an answer from before is stale"


def test_a_driver_that_hangs_does_not_keep_us_from_ending(
    stub: StubNvml, open_reader: Open
) -> None:
    stub.set_gpus([{}])
    stub.hang(600)
    assert "not answered" in open_reader(patience_s=0.1).read().problem
