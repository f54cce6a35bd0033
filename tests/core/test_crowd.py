"""A device shared with outsiders is another kind of device; a passing reading does not make it
one."""

from __future__ import annotations

from dataclasses import replace

from tests.core.machines import FACTS, A, gpu

from rlqd.core.crowd import Crowd
from rlqd.core.guard import SHARED, SHARED_AFTER_MS, Guard
from rlqd.core.model import Instant

ALONE = "A100"


class Gpu:
    """Read once a second; nothing of the queue runs on it, so that all load is outsiders'."""

    def __init__(self) -> None:
        self.guard = Guard()
        self.now = 0
        self.crowd = self.read(sm=0)

    def read(self, *, sm: int) -> Crowd:
        self.now += 1_000
        facts = replace(FACTS, gpus=(replace(gpu(A, sm=sm), kind=ALONE),))
        self.crowd = Crowd.of([], facts)
        self.crowd.observe(Instant(self.now), self.guard)
        return self.crowd

    @property
    def kind(self) -> str:
        return self.crowd.kind(self.guard, A)


def test_a_process_that_has_just_started_or_ended_is_no_outsider() -> None:
    device = Gpu()
    for _ in range(10):
        device.read(sm=100)
        assert device.kind == ALONE
        device.read(sm=0)
        assert device.kind == ALONE


def test_outsiders_who_stay_make_it_another_kind_until_they_have_left() -> None:
    device = Gpu()
    for _ in range(1 + SHARED_AFTER_MS // 1_000):
        assert device.kind == ALONE
        device.read(sm=100)
    assert device.kind == ALONE + SHARED
    device.read(sm=0)
    assert device.kind == ALONE + SHARED, "between two of their kernels"
    for _ in range(SHARED_AFTER_MS // 1_000):
        device.read(sm=0)
    assert device.kind == ALONE
