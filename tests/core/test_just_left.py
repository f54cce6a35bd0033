"""What a job would start on but for a GPU's next reading is nobody else's meanwhile."""

from __future__ import annotations

from dataclasses import replace

from tests.core.machines import FACTS, A, Desk, cores, gpu, spec


def test_a_lesser_job_does_not_take_the_cores_while_a_gpu_is_read_again() -> None:
    desk = Desk(replace(FACTS, gpus=(gpu(A),), cores=cores(1)))
    (first,) = desk.run(spec(gpus=1))
    (high,) = desk.submit(spec(gpus=1))
    (low,) = desk.submit(spec(priority=-5))
    desk.sample(after=100)
    desk.exit(first, after=100)
    assert low not in desk.launched
    desk.sample(after=100)
    assert high in desk.launched
