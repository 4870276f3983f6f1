#!/usr/bin/env bash
# All checks on a machine with one NVIDIA GPU, about 16 cores, Python 3.11 or newer and a CUDA build of torch, in less
# than nine minutes:
#
#     perf/gpu.sh [any flag of python -m perf.gpu]
#
# Writes one JSON file, $OUT/gpu.json (perf/out/gpu.json where OUT is unset), anew after every stage. PYTHON names the
# Python that has torch. Packages that are missing are put into a temporary folder that comes before all others: from
# the folder of wheels $WHEELS (`make gpu-wheels` gathers it), for which neither a network nor pip is needed, or by pip
# where WHEELS is unset. torch and NumPy stay as they are. Stages that lack a package are left out by name.
# `perf/gpu.sh --device cpu` rehearses everything, in about two minutes on two cores.
set -uo pipefail
cd "$(dirname "$0")/.."
begin=$SECONDS
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
timeout 150 "$python" perf/gpu_packages.py install "$site" ${WHEELS:+--wheels "$WHEELS"}
"$python" -m perf.gpu --limit $((530 - SECONDS + begin)) "$@"
