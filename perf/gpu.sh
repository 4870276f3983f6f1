#!/usr/bin/env bash
# All checks on a machine with one NVIDIA GPU, about 16 cores, Python 3.11 or newer and a CUDA build of torch, in less than 9 minutes:
#
#     perf/gpu.sh [any flag of python -m perf.gpu]
#
# Writes one JSON file, $OUT/gpu.json (perf/out/gpu.json where OUT is unset). What is missing is installed beside the Python that there
# is, whose torch and NumPy stay as they are; from the folder $WHEELS where it is set, for machines without a network. An environment
# family that cannot be installed costs its own checks only. `perf/gpu.sh --device cpu` rehearses everything, in about two minutes on two cores.
set -uo pipefail
cd "$(dirname "$0")/.."
begin=$SECONDS
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${VENV:-$work/venv} log=$work/pip.log

python3 -m venv --system-site-packages "$venv" || exit 1
python="$venv/bin/python"
# A virtual environment made from another one sees the first one's base only, not its packages.
export PYTHONPATH="$PWD:$(python3 -c 'import site; print(":".join(site.getsitepackages()))')${PYTHONPATH:+:$PYTHONPATH}"
"$python" -c 'import torch' || { echo "this Python has no torch: $(command -v python3)"; exit 1; }
"$python" -c 'import numpy, torch; print(f"torch=={torch.__version__}\nnumpy=={numpy.__version__}")' > "$venv/constraints.txt"

install() { # seconds, then what
  local limit=$1; shift
  local from=(); [ -n "${WHEELS:-}" ] && from=(--no-index --find-links "$WHEELS")
  timeout "$limit" "$python" -m pip install --quiet --disable-pip-version-check --no-build-isolation --retries 1 --timeout 10 \
    -c "$venv/constraints.txt" "${from[@]}" "$@" >> "$log" 2>&1 || echo "not installed: $*; the end of what pip said: $(tail -n 1 "$log")"
}

"$python" -c 'import tyro, gymnasium, faster_fifo, numba, cloudpickle, psutil, rich, safetensors, tensorboard, yaml' 2>> "$log" || install 90 .
"$python" -c 'import ale_py, cv2' 2>> "$log" || install 45 'ale-py>=0.11' 'opencv-python-headless>=4.8'
"$python" -c 'import vizdoom' 2>> "$log" || install 45 'vizdoom>=1.3'
"$python" -c 'import mujoco' 2>> "$log" || install 45 'mujoco>=3.1'
"$python" -m perf.gpu --limit $((530 - SECONDS + begin)) "$@"
