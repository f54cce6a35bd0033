"""`python -m tests.system.vm`: limits.py in a virtual machine, whose control groups (version 2)
have their controllers whatever this machine was booted with.

It needs qemu-system-x86_64, a static busybox and a kernel with its modules, as Debian packages
them (qemu-system-x86, busybox-static, linux-image-amd64), installed, or unpacked below
RLQ_VM_ROOT.  It needs no /dev/kvm: two processors are emulated, in some minutes.  This machine's
file system is the machine's own, read-only, below a throw-away layer.  Exit code 0 also where
something is missing: it says so.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ROOT = Path(os.environ.get("RLQ_VM_ROOT", "/"))
TIMEOUT_S = 600
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
#: Of no use here, and slow: one removes what is old in /tmp.
MASKED = (
    *("systemd-tmpfiles-setup.service", "systemd-tmpfiles-setup-dev.service"),
    *("systemd-udev-trigger.service", "systemd-hwdb-update.service", "ldconfig.service"),
    *("systemd-update-done.service", "systemd-journal-catalog-update.service"),
    "systemd-sysusers.service",
)
INIT = """#!/bin/busybox sh
B=/bin/busybox
$B mkdir -p /proc /sys /dev /host /layer /new
$B mount -t proc proc /proc; $B mount -t sysfs sys /sys; $B mount -t devtmpfs dev /dev
for m in $($B cat /modules/order); do $B insmod /modules/$m; done
nine=trans=virtio,version=9p2000.L,msize=512000,cache=loose
$B mount -t 9p -o $nine,ro host /host
$B mount -t tmpfs -o size=1g tmpfs /layer; $B mkdir /layer/u /layer/w
$B mount -t overlay overlay -o lowerdir=/host,upperdir=/layer/u,workdir=/layer/w /new
$B mkdir -p /new/payload
$B mount -t 9p -o $nine payload /new/payload
$B rm -rf /new/etc/systemd/system/*.wants /new/etc/machine-id /new/etc/fstab
for u in {masked}; do $B ln -sf /dev/null /new/etc/systemd/system/$u; done
$B cp /new/payload/limits.service /new/etc/systemd/system/
how=$($B sed 's/.*rlq.init=//; s/ .*//' /proc/cmdline)
$B umount /proc /sys; $B mount -o move /dev /new/dev
[ "$how" = systemd ] || exec $B switch_root /new /payload/plain
exec $B switch_root /new /lib/systemd/systemd systemd.unit=limits.service
"""
SERVICE = """[Unit]
Wants=basic.target
After=basic.target
SuccessAction=poweroff-force
FailureAction=poweroff-force
[Service]
Type=oneshot
ExecStart=/payload/run
StandardOutput=append:/payload/output
StandardError=inherit
"""
PLAIN = """#!/bin/bash
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs tmpfs /run
mkdir -p /dev/shm; mount -t tmpfs tmpfs /dev/shm; mount -t cgroup2 cgroup2 /sys/fs/cgroup
/payload/run >> /payload/output 2>&1
echo o > /proc/sysrq-trigger; sleep 60
"""
RUN = """#!/bin/bash
cd /payload/repository
PYTHONPATH=scheduler:client:. PYTHONDONTWRITEBYTECODE=1 {python} tests/system/limits.py
echo $? > /payload/code
sync
"""


def main() -> int:
    qemu = ROOT / "usr/bin/qemu-system-x86_64"
    busybox = ROOT / "bin/busybox"
    kernels = sorted((ROOT / "boot").glob("vmlinuz-*"))
    modules = [ROOT / "lib/modules" / one.name.removeprefix("vmlinuz-") for one in kernels[-1:]]
    for needed in (qemu, busybox, *(modules or [ROOT / "boot/vmlinuz-*"])):
        if not needed.exists():
            print(f"SKIPPED the limits in a virtual machine: there is no {needed}")
            return 0
    with tempfile.TemporaryDirectory(prefix="rlq-vm-") as folder:
        payload = Path(folder) / "payload"
        payload.mkdir()
        write_payload(payload)
        initrd = write_initrd(Path(folder), busybox, modules[0])
        codes = [boot(qemu, kernels[-1], initrd, payload, init) for init in ("plain", "systemd")]
    return max(codes)


def boot(qemu: Path, kernel: Path, initrd: Path, payload: Path, init: str) -> int:
    (payload / "code").unlink(missing_ok=True)
    (payload / "output").write_text("")
    libraries = [ROOT / "usr/lib/x86_64-linux-gnu", ROOT / "lib/x86_64-linux-gnu"]
    host = "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"
    own = f"local,path={payload},mount_tag=payload,security_model=none"
    print(f"in a virtual machine, {init}:", flush=True)
    try:
        done = subprocess.run(
            [
                *(
                    str(qemu),
                    "-accel",
                    "tcg,thread=multi",
                    "-cpu",
                    "max",
                    "-smp",
                    "2",
                    "-m",
                    "2500",
                ),
                *("-L", f"{ROOT}/usr/share/qemu", "-L", f"{ROOT}/usr/share/seabios"),
                *("-nographic", "-nodefaults", "-no-reboot", "-serial", "stdio"),
                *("-kernel", str(kernel), "-initrd", str(initrd)),
                *("-append", f"console=ttyS0 quiet panic=-1 rlq.init={init} "),
                *("-virtfs", host, "-virtfs", own),
            ],
            env={**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, libraries))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
        )
        console = done.stdout
    except subprocess.TimeoutExpired as error:
        console = error.stdout or b""
    print((payload / "output").read_text(errors="replace"), flush=True)
    if not (payload / "code").exists():
        print(f"it did not end:\n{console.decode(errors='replace')[-4000:]}")
        return 1
    return int((payload / "code").read_text())


def write_payload(payload: Path) -> None:
    for name in ("scheduler", "client", "tests"):
        shutil.copytree(REPOSITORY / name, payload / "repository" / name)
    (payload / "limits.service").write_text(SERVICE)
    for name, text in (
        ("run", RUN.format(python=shlex.quote(sys.executable))),
        ("plain", PLAIN),
    ):
        (payload / name).write_text(text)
        (payload / name).chmod(0o755)


def write_initrd(folder: Path, busybox: Path, modules: Path) -> Path:
    root = folder / "initrd"
    for name in ("bin", "modules", "dev"):
        (root / name).mkdir(parents=True)
    shutil.copy(busybox, root / "bin/busybox")
    (root / "init").write_text(INIT.format(masked=" ".join(MASKED)))
    (root / "init").chmod(0o755)
    order = []
    for file in in_order(modules):
        shutil.copy(file, root / "modules" / file.name)
        order.append(file.name)
    (root / "modules/order").write_text("\n".join(order))
    initrd = folder / "initrd.cpio"
    with initrd.open("wb") as out:
        names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
        pack = [str(busybox), "cpio", "-o", "-H", "newc"]
        subprocess.run(
            pack,
            cwd=root,
            input=names.encode(),
            stdout=out,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    return initrd


def in_order(modules: Path) -> list[Path]:
    """The modules' files, each after those it depends on."""
    files = {path.stem.replace("-", "_"): path for path in modules.glob("kernel/**/*.ko")}
    found: list[Path] = []

    def add(name: str) -> None:
        if (file := files.get(name)) is None or file in found:
            return  # built in, or there already
        said = re.search(rb"\0depends=([^\0]*)\0", file.read_bytes())
        for other in (said[1].decode() if said else "").split(","):
            add(other.replace("-", "_"))
        found.append(file)

    # The transports of virtio depend on it by no symbol that tells.
    for name in ("virtio", "virtio_ring", *MODULES):
        add(name)
    return found


if __name__ == "__main__":
    sys.exit(main())
