#!/usr/bin/env bash
# boot.sh PAYLOAD PYTHON BIND...: boots this machine's own systemd in a container on a throw-away
# copy of /, with PAYLOAD (a folder) at /payload, and runs PAYLOAD/run there as a service.
#
# Every change is in memory and gone afterwards.  PAYLOAD/booted appears once systemd runs it.
# Each BIND is a folder to be seen at its own place, read-only: what / does not hold by itself.
set -euo pipefail
payload=$(readlink -f "$1") python=$2
shift 2

if [ "${STAGE:-outer}" = outer ]; then
  # A control group of our own, so that nothing is left in the root one.
  cgroups=(/sys/fs/cgroup)
  [ -d /sys/fs/cgroup/unified ] && cgroups=(/sys/fs/cgroup/unified /sys/fs/cgroup/systemd)
  name=rlq-test-system.$$
  trap 'for one in "${cgroups[@]}"; do
          find "$one/$name" -depth -type d -exec rmdir {} + 2>/dev/null || true
        done' EXIT
  for one in "${cgroups[@]}"; do mkdir -p "$one/$name"; done
  (
    for one in "${cgroups[@]}"; do echo $BASHPID > "$one/$name/cgroup.procs"; done
    STAGE=inner exec unshare --mount --propagation private "$0" "$payload" "$python" "$@"
  )
  exit
fi

scratch=$(mktemp -d "${TMPDIR:-/tmp}/rlq-system.XXXXXX")
trap 'umount -l "$scratch" && rmdir "$scratch"' EXIT
mount -t tmpfs -o size=1g,mode=755 tmpfs "$scratch"
mkdir "$scratch"/{upper,work,root}
mount -t overlay overlay -o "lowerdir=/,upperdir=$scratch/upper,workdir=$scratch/work" "$scratch/root"
root=$scratch/root

# The machine's own services are no part of the test.
rm -rf "$root"/etc/systemd/system/*.wants "$root"/etc/systemd/system/rlqd.service*
rm -f "$root/etc/machine-id"
# What is below somebody's closed home folder, a Python perhaps, is to be reached by all users here.
for folder in "$python" "$@"; do
  while [ "$folder" != / ]; do
    if [ -d "$root$folder" ]; then chmod o+x "$root$folder"; fi
    folder=$(dirname "$folder")
  done
done
cp -r "$payload/opt/." "$root/opt/"
cat > "$root/etc/systemd/system/rlq-test.service" <<EOF
[Unit]
Description=the tests
Wants=basic.target
After=basic.target
SuccessAction=exit-force
FailureAction=exit-force
[Service]
Type=oneshot
ExecStart=/payload/run
StandardOutput=append:/payload/output
StandardError=inherit
TimeoutStartSec=400
EOF

binds=()
for folder in "$@"; do binds+=("--bind-ro=$folder"); done
export SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1
systemd-nspawn --quiet --directory="$root" --register=no --keep-unit --private-network \
  --bind="$payload:/payload" "${binds[@]}" --console=pipe --kill-signal=SIGRTMIN+3 \
  --boot systemd.unit=rlq-test.service systemd.show_status=no systemd.log_level=warning
