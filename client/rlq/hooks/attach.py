"""Inside a job: what is attached to Stable-Baselines3 and torch once they are imported.

Loaded by path/sitecustomize.py, by path, as `_rlq_hooks`.  Standard library of Python 3.8; see
the rules in rlq/hooks.

Everything that a program could tell apart is left alone: no random number is drawn, no
attribute of a model, environment or callback is set, and no reference to the training's
variables is kept.  The same seed gives the same weights with hooks and without.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import socket
import sys
import time
import zlib
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

#: As often as rlq.job sends at most.
INTERVAL_S = 0.5
#: A program that imports rlq.job is expected to report by itself; if it does not by then, the
#: hooks do.  Its steps may be of another kind than ours, and the two must not be mixed.
OWN_REPORTS_WAIT_S = 60.0

_HERE = os.path.dirname(os.path.abspath(__file__))
_job: Any = None
#: The Reporter of the learn() that is running.
_current: Any = None


def off(reason: object) -> None:
    """Say that the hooks are off, and why: path/sitecustomize.py puts its own in this place."""
    print(f"rlq: hooks off: {reason}", file=sys.stderr)


def stable_baselines3(base_class: Any) -> None:
    """Attach a reporting callback inside every learn() of every algorithm.

    `base_class`: the module stable_baselines3.common.base_class, just imported.  SBX and
    sb3-contrib build on the same BaseAlgorithm; where an algorithm has an `_init_callback` of
    its own (MaskablePPO), that one is wrapped too.
    """
    if os.environ.get("RLQ_PROGRESS_FROM"):
        return  # the user has named another source
    algorithm: Any = base_class.BaseAlgorithm
    callbacks: Any = sys.modules["stable_baselines3.common.callbacks"]
    reporter, both = _callback_classes(callbacks, algorithm)

    def wrap(cls: Any) -> None:
        original = cls.__dict__["_init_callback"]

        @functools.wraps(original)
        def _init_callback(self: Any, *args: Any, **kwargs: Any) -> Any:
            callback = original(self, *args, **kwargs)
            if isinstance(callback, both):
                return callback  # a subclass's own called its parent's
            try:
                ours = reporter()
                ours.init_callback(self)
                together = both([callback, ours])
                together.init_callback(self)
            except Exception as error:
                off(f"{type(error).__name__}: {error}")
                return callback
            return together

        cls._init_callback = _init_callback

    wrap(algorithm)
    own = algorithm.__dict__.get("__init_subclass__")

    def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:
        if own is not None:
            own.__get__(None, cls)(**kwargs)
        else:
            super(algorithm, cls).__init_subclass__(**kwargs)
        # What is defined in the program itself may be pickled by value, and then must not
        # refer to us.
        if "_init_callback" in cls.__dict__ and cls.__module__ != "__main__":
            wrap(cls)

    algorithm.__init_subclass__ = classmethod(__init_subclass__)


def _callback_classes(callbacks: Any, algorithm: Any) -> tuple[Any, Any]:
    class RlqReport(callbacks.BaseCallback):  # type: ignore[misc]
        """Reports; decides nothing, and survives whatever it meets."""

        def __init__(self) -> None:
            super().__init__(verbose=0)
            self.due_s = math.inf
            self.target = math.inf
            self.updates_before = 0
            self.is_warm = False

        def update_locals(self, locals_: dict[str, Any]) -> None:
            return  # keeps nothing of the training alive

        def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
            try:
                self._start()
            except Exception as error:
                self._give_up(error)

        def on_step(self) -> bool:
            try:
                if time.monotonic() >= self.due_s:
                    self._tell()
            except Exception as error:
                self._give_up(error)
            return True

        _on_step = on_step

        def on_training_end(self) -> None:
            try:
                if self.due_s != math.inf:
                    self._tell()
                    reporter().flush()  # or a short learn() after it would replace it
                    self._end()
            except Exception as error:
                self._give_up(error)

        def _start(self) -> None:
            global _current
            if _is_within_another_learn(self.model, algorithm):
                return
            target = getattr(self.model, "_total_timesteps", None)
            if isinstance(target, (int, float)) and math.isfinite(target) and target > 0:
                self.target = target
            self.updates_before = _updates(self.model)
            self.started_s = time.monotonic()
            self.due_s = 0.0
            _current = self
            if not _reports_itself(0.0):
                _is_ours_to_report()

        def _tell(self) -> None:
            now_s = time.monotonic()
            self.due_s = now_s + INTERVAL_S
            if _current is not self:
                self._end()  # another learn() has begun; this one was left by an exception
                return
            if _reports_itself(now_s - self.started_s) or not _is_ours_to_report():
                return
            model = self.model
            if not self.is_warm:
                self.is_warm = _is_warm(model, self.updates_before)
            metrics = {"warming_up": 0.0 if self.is_warm else 1.0}
            rewards = [float(episode["r"]) for episode in list(model.ep_info_buffer or ())]
            if rewards:
                mean = sum(rewards) / len(rewards)
                if math.isfinite(mean):
                    metrics["ep_rew_mean"] = mean
            total = None if self.target == math.inf else int(self.target)
            reporter().report(int(model.num_timesteps), total, **metrics)

        def _end(self) -> None:
            global _current
            self.due_s = math.inf
            if _current is self:
                _current = None
                _leave_to_others()

        def _give_up(self, error: Exception) -> None:
            self.due_s = math.inf
            off(f"{type(error).__name__}: {error}")

    class RlqCallbacks(callbacks.CallbackList):  # type: ignore[misc]
        """The program's callback, then ours.  The program's has been initialised already."""

        def _init_callback(self) -> None:
            return

    return RlqReport, RlqCallbacks


def _is_within_another_learn(model: Any, algorithm: Any) -> bool:
    """Is this learn() called from inside another model's (from its callback, its environment)?

    Told by the stack: what a learn() leaves behind when it ends by an exception could be
    mistaken for a running one."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "learn":
            caller = frame.f_locals.get("self")
            if isinstance(caller, algorithm) and caller is not model:
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _updates(model: Any) -> int:
    return int(getattr(model, "_n_updates", 0))


def _is_warm(model: Any, updates_before: int) -> bool:
    """Has training proper begun?

    Before `learning_starts` no gradient step is done, and the first one is compiled under JAX:
    steps per second up to there say nothing of the rate after.  An update that is counted is
    finished."""
    if _updates(model) > updates_before:
        return True
    if hasattr(model, "_n_updates") and getattr(model, "gradient_steps", 1) != 0:
        return False
    return bool(model.num_timesteps > getattr(model, "learning_starts", 0))


# ---- reporting ---------------------------------------------------------------------


def reporter() -> Any:
    """rlq/job.py, a copy of the hooks' own: in the program's, `_has_reported` is the program's."""
    global _job
    if _job is None:
        _job = _load("_rlq_job", os.path.join(os.path.dirname(_HERE), "job.py"))
    return _job


def _load(name: str, file: str) -> Any:
    module = ModuleType(name)
    module.__file__ = file
    SourceFileLoader(name, file).exec_module(module)
    return module


def _reports_itself(running_s: float) -> bool:
    own = sys.modules.get("rlq.job")
    if own is None:
        return False
    return getattr(own, "_has_reported", True) or running_s < OWN_REPORTS_WAIT_S


#: (descriptor, inode) of the socket that says: this process reports for the job.
_claim: tuple[int, int] | None = None


def _is_ours_to_report() -> bool:
    """A job has one progress: of several processes that train, the first one reports.

    It holds a socket whose name exists once on the machine and goes away with the process."""
    global _claim
    if _claim is not None:
        return True
    env = os.environ
    home = zlib.crc32(os.fsencode(env.get("RLQ_REPORT_SOCKET", "")))
    name = (
        f"\0rlq-report-{os.getuid()}-{home:08x}-{env.get('RLQ_JOB_ID')}-{env.get('RLQ_ATTEMPT')}"
    )
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(name[:100])
    except OSError as error:
        claim.close()
        return error.errno != errno.EADDRINUSE
    descriptor = claim.detach()  # a socket object would complain of not being closed, at exit
    _claim = (descriptor, os.fstat(descriptor).st_ino)
    return True


def _leave_to_others() -> None:
    global _claim
    if _claim is None:
        return
    (descriptor, inode), _claim = _claim, None
    try:
        if os.fstat(descriptor).st_ino == inode:  # unless the program closed it and took another
            os.close(descriptor)
    except OSError:
        return


def _forget() -> None:
    """In a forked child: the training that runs is the parent's."""
    global _current
    _current = None
    _leave_to_others()


os.register_at_fork(after_in_child=_forget)


# ---- torch -------------------------------------------------------------------------


def torch(module: Any) -> None:
    """Hold torch to the job's cores and its declared GPU memory.

    Threads: OMP_NUM_THREADS is set for every job, and torch obeys it; this is for a program
    that removed it.  A number that stands there, the user's own, is never overridden.

    Memory: RLQ_GPU_MEM_FRACTION is set by the daemon for a declared amount.  Where the
    allocator's variable does not say it already (torch before 2.10 does not know the key), the
    fraction is set when CUDA is initialised: doing it earlier would initialise CUDA in programs
    that fork first.  Unproven on a real GPU: tested against a stand-in for torch 2.4 only.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    wanted = int(threads) if threads.isdigit() else len(os.sched_getaffinity(0))
    if 0 < wanted < module.get_num_threads():
        module.set_num_threads(wanted)
    share = os.environ.get("RLQ_GPU_MEM_FRACTION")
    configured = [os.environ.get(f"PYTORCH{kind}_ALLOC_CONF", "") for kind in ("", "_CUDA")]
    if not share or any("per_process_memory_fraction" in text for text in configured):
        return
    fraction = float(share)

    def cap() -> None:
        try:
            for device in range(module.cuda.device_count()):
                module.cuda.set_per_process_memory_fraction(fraction, device)
        except Exception as error:  # here it would end the job
            off(f"GPU memory is not capped: {type(error).__name__}: {error}")

    module.cuda._lazy_call(cap)


# ---- other programs ----------------------------------------------------------------


def follow(path: str) -> None:
    """Report from the file (or newest file in the folder) that the program writes its progress
    to.  The first Python process of the job does."""
    if not _is_ours_to_report():
        return
    module = _load("_rlq_follow", os.path.join(_HERE, "follow.py"))
    total = os.environ.get("RLQ_PROGRESS_TOTAL", "")
    module.start(path, int(total) if total.isdigit() else None, reporter().report, off)
