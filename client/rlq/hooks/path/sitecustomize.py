"""Loaded by every Python of a job before its program: see rlq/hooks.

Python imports the first `sitecustomize` on its path, which is this one.  It hands over to the
one that would have been found without it, as if it were not there, and then waits for
Stable-Baselines3 and torch to be imported.  Nothing else happens at start: the rest of rlq's
hooks is loaded only when one of them is.

This file has to be read by any Python a job may start, so it keeps to what 3.6 understands;
below 3.8 it only hands over.  It imports nothing that Python has not loaded by then.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_is_off = False
_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _off(reason: object) -> None:
    """Say so, once, in one line; the job goes on without hooks."""
    global _is_off
    _waiting.clear()
    if _is_off:
        return
    _is_off = True
    try:
        text = " ".join(str(reason).split())[:300]
        sys.stderr.write(f"rlq: hooks off: {text}\n")
    except Exception:
        return  # stderr is closed or None: nobody to tell


def _parts() -> "Any":
    """The module rlq/hooks/attach.py, by its path: this Python may have no rlq."""
    module = sys.modules.get("_rlq_hooks")
    if module is None:
        from importlib.machinery import SourceFileLoader

        file = os.path.join(os.path.dirname(_FOLDER), "attach.py")
        module = type(sys)("_rlq_hooks")
        module.__file__ = file
        SourceFileLoader("_rlq_hooks", file).exec_module(module)
        vars(module)["off"] = _off
        sys.modules["_rlq_hooks"] = module
    return module


def _attach(module: "Any", to: str) -> None:
    try:
        getattr(_parts(), to)(module)
    except Exception as error:
        _off(f"{type(error).__name__}: {error}")


#: Modules to hook into once they have been imported -> the function in attach.py.
_waiting = {"stable_baselines3.common.base_class": "stable_baselines3", "torch": "torch"}


class _Finder:
    """First on sys.meta_path: sees each import that is about to happen, and does none itself."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        to = _waiting.pop(name, None)
        if to is None:
            if _waiting:
                _catch_up()
            return None
        spec: Any = None
        try:
            for finder in list(sys.meta_path):
                find = getattr(finder, "find_spec", None)
                if finder is not self and find is not None:
                    spec = find(name, path, target)
                    if spec is not None:
                        break
        finally:
            if spec is None or spec.loader is None:
                _waiting[name] = to  # not found, for now
        if spec is None or spec.loader is None:
            return spec
        try:
            _arm(name, spec.loader, to)
        except Exception as error:
            _off(f"{type(error).__name__}: {error}")
        return spec


def _arm(name: str, loader: "Any", to: str) -> None:
    """The loader itself does its work and stays what the module gets to see; it tells us after.

    For that its `exec_module` is shadowed on the instance, for this one call."""
    execute = loader.exec_module

    def exec_module(module: "Any") -> None:
        vars(loader).pop("exec_module", None)
        try:
            execute(module)
        except BaseException:
            _waiting[name] = to  # the program may try again
            raise
        _attach(module, to)

    loader.exec_module = exec_module


def _catch_up() -> None:
    """Another finder, put before this one, may have imported what is waited for."""
    for name in list(_waiting):
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        if module is not None and not getattr(spec, "_initializing", False):
            to = _waiting.pop(name, None)
            if to is not None:
                _attach(module, to)


def _install() -> None:
    try:
        env = os.environ
        if sys.version_info < (3, 8) or "RLQ_REPORT_SOCKET" not in env:
            return
        if env.get("RLQ_HOOKS") == "0":
            return
        sys.meta_path.insert(0, _Finder())
        if env.get("RLQ_PROGRESS_FROM"):
            _parts().follow(env["RLQ_PROGRESS_FROM"])
    except Exception as error:
        _off(f"{type(error).__name__}: {error}")


# The program's own sitecustomize, or the ImportError that Python's `site` gets where there is
# none; and afterwards the path, and sys.modules, look as if this file did not exist.
sys.path[:] = [_part for _part in sys.path if _part != _FOLDER]
sys.modules.pop("sitecustomize", None)
try:
    __import__("sitecustomize")
finally:
    _install()
