#!/usr/bin/env bash
# Makes .venv with everything that runs and tests the project. Safe to repeat; a second run takes about a second.
#
#   ./setup.sh                    finds Python and the device by itself
#   DEVICE=cpu|tpu|gpu ./setup.sh
#   PYTHON=/path/to/python ./setup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

die() { echo "setup.sh: $*" >&2; exit 1; }

# A Python counts when it is new enough and can make environments (Debian splits that off into python3-venv).
suitable() { "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    suitable "$PYTHON" || die "PYTHON=$PYTHON is not Python 3.11 or newer with the venv module"
    echo "$PYTHON"
    return
  fi
  local candidate
  for candidate in .venv/bin/python python3.13 python3.12 python3.11 python3 python; do
    if suitable "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  die "no suitable Python: install Python 3.11 or newer with its venv module (Debian and Ubuntu: apt install python3-venv)," \
    "or name one with PYTHON=/path/to/python"
}

# TPUs show as /dev/accel* (v4 and older) or as VFIO groups of a Google PCI device other than the network card (0x0042).
has_tpu() {
  compgen -G '/dev/accel[0-9]*' >/dev/null && return
  compgen -G '/dev/vfio/[0-9]*' >/dev/null || return
  local device
  for device in /sys/bus/pci/devices/*; do
    if [ "$(cat "$device/vendor" 2>/dev/null)" = 0x1ae0 ] && [ "$(cat "$device/device" 2>/dev/null)" != 0x0042 ]; then
      return
    fi
  done
  return 1
}

find_device() {
  if [ -n "${DEVICE:-}" ]; then
    echo "$DEVICE"
  elif has_tpu; then
    echo tpu
  elif nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo gpu
  else
    echo cpu
  fi
}

device=$(find_device)
case "$device" in cpu | tpu | gpu) ;; *) die "DEVICE=$device: must be cpu, tpu or gpu" ;; esac
python=$(find_python)
version=$("$python" -c 'import platform; print(platform.python_version())')

stamp=.venv/setup-stamp
want="device=$device python=$version requirements=$(cksum < requirements.txt)"
if [ "$(cat $stamp 2>/dev/null)" = "$want" ] && .venv/bin/python -c '' 2>/dev/null; then
  echo ".venv is ready ($device, Python $version)"
  exit 0
fi

if [ "$(.venv/bin/python -c 'import platform; print(platform.python_version())' 2>/dev/null)" != "$version" ]; then
  [ ! -e .venv ] || "$python" -m venv --clear .venv || die "cannot replace .venv; remove it and try again"
  [ -e .venv/bin/python ] || "$python" -m venv .venv || die "cannot make .venv with $python"
fi
rm -f $stamp
echo "installing for $device into .venv (Python $version)"
requirements=requirements.txt
if [ "$device" = tpu ]; then  # the libtpu that this JAX was made with: a newer one compiles faster kernels, but cannot be traced
  requirements=.venv/requirements-tpu.txt
  sed -e '/^libtpu/d' -e 's/^jax\([<>=].*\)/jax[tpu]\1/' requirements.txt > $requirements
fi
packages=(-r "$requirements")
if [ "$device" = gpu ]; then
  packages+=("$(sed -n 's/^jax\([<>=].*\)/jax[cuda12]\1/p' requirements.txt)")
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check "${packages[@]}" \
  || die "pip could not install the requirements (message above); it is safe to run this again"

.venv/bin/python - "$device" <<'PYTHON'
import sys

import MaxText  # noqa: F401  its settings keep JAX from looking for TPUs that are not there
import jax

found, wanted = jax.default_backend(), sys.argv[1]
print(f"JAX {jax.__version__} sees {len(jax.devices())} {found} device(s)")
if found != wanted:
  print(f"warning: DEVICE={wanted} was asked for, JAX runs on {found}", file=sys.stderr)
PYTHON
echo "$want" > $stamp
echo ".venv is ready ($device, Python $version)"
