"""`python -m tests.system [pytest arguments]`: the tests of this folder, in a booted systemd.

It boots this machine's own systemd in a container on a throw-away copy of the file system
(boot.sh) and runs pytest in there.  Exit code 0 also where that cannot be done: it says so.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
PACKAGES = ("scheduler/rlqd", "scheduler/rlq_sac", "client/rlq")
#: Two versions, for upgrades.
VERSIONS = {"rlq-old": "0.0.9", "rlq-new": "99.1.0"}
TIMEOUT_S = 450


def main(pytest_args: list[str]) -> int:
    if os.geteuid() != 0:
        return skipped("it needs root")
    if missing := [name for name in ("systemd-nspawn", "unshare") if shutil.which(name) is None]:
        return skipped(f"{' and '.join(missing)} is not installed (Debian: systemd-container)")
    with tempfile.TemporaryDirectory(prefix="rlq-system-") as folder:
        payload = Path(folder)
        first, *others = VERSIONS
        build(payload / "opt" / first)
        for name in others:
            shutil.copytree(payload / "opt" / first, payload / "opt" / name, symlinks=True)
        for name, version in VERSIONS.items():
            finish(payload / "opt" / name, Path("/opt") / name, version)
        write_run(payload, pytest_args)
        return boot(payload)


def boot(payload: Path) -> int:
    output = payload / "output"
    output.touch()
    command = [str(HERE / "boot.sh"), str(payload), sys.base_prefix, *map(str, binds())]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    # Of what hangs in there the service's own limit makes an end first.
    timer = threading.Timer(TIMEOUT_S, os.killpg, (process.pid, signal.SIGTERM))
    timer.start()
    assert process.stdout is not None
    said = process.stdout.read().decode(errors="replace")
    process.wait()
    timer.cancel()
    sys.stdout.write(output.read_text(errors="replace"))
    if not (payload / "booted").exists():
        return skipped(f"this machine cannot boot it: {said.strip() or process.returncode}")
    code = payload / "code"
    if not code.exists():
        print(f"the tests in the container did not end:\n{said}")
        return 1
    return int(code.read_text())


def skipped(reason: str) -> int:
    print(f"SKIPPED the tests in a booted systemd: {reason}")
    return 0


def binds() -> list[Path]:
    """Folders that the tests need at their places, none within another."""
    wanted = {REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)}
    wanted |= {Path(entry) for entry in sys.path if entry.endswith("site-packages")}
    return sorted(
        one for one in wanted if not any(other in one.parents for other in wanted) and one.is_dir()
    )


def write_run(payload: Path, pytest_args: list[str]) -> None:
    """What systemd starts in there."""
    args = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *pytest_args, "tests/system"]
    script = f"""#!/bin/bash
touch /payload/booted
export RLQ_TEST_BOOTED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/root LANG=C.UTF-8
export PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin
cd {shlex.quote(str(REPOSITORY))}
{shlex.join(args)}
echo $? > /payload/code
"""
    run = payload / "run"
    run.write_text(script)
    run.chmod(0o755)


def build(folder: Path) -> None:
    """An installation of rlq and all it needs, as pip makes it.

    Compiled files are taken along, with the times by which Python knows that they are fresh.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = site_packages(folder)
    for package in PACKAGES:
        source = REPOSITORY / package
        shutil.copytree(source, site / source.name)
    shutil.copytree(REPOSITORY / "systemd", folder / "share/rlq/systemd")
    for name in ("click", "msgspec", "nvidia-ml-py", "psutil", "pyzmq", "rich"):
        for distribution, file in files_of(name):
            target = site / file
            source = Path(str(distribution.locate_file(file)))
            if source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)


def finish(folder: Path, installed: Path, version: str) -> None:
    """Give it its version, and the commands of a place where it is not yet: `installed`."""
    version_py = site_packages(folder) / "rlq" / "version.py"
    text, count = re.subn(r'VERSION = "[^"]+"', f'VERSION = "{version}"', version_py.read_text())
    assert count == 1
    version_py.write_text(text)
    for command, module in (("rlq", "rlq.cli"), ("rlqd", "rlqd.__main__")):
        script = folder / "bin" / command
        script.write_text(
            f"#!{installed}/bin/python\nimport sys\nfrom {module} import main\nsys.exit(main())\n"
        )
        script.chmod(0o755)


def site_packages(folder: Path) -> Path:
    return next(folder.glob("lib/python3*/site-packages"))


def files_of(name: str) -> Iterator[tuple[importlib.metadata.Distribution, str]]:
    """Of a distribution and of all it needs, as paths in site-packages."""
    done: set[str] = set()
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one in done:
            continue
        done.add(one)
        found = importlib.metadata.distribution(one)
        waiting += plain_requirements(found.requires or ())
        for file in found.files or ():
            if ".." not in file.parts:
                yield found, str(file)


def plain_requirements(requires: Iterable[str]) -> list[str]:
    return [re.split(r"[^\w.-]", line)[0] for line in requires if ";" not in line]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
