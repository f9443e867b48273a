#!/bin/sh
# Everything of gpu_check.py in one command, under 8 minutes on a card: benchmarks/gpu_check.sh [--out FILE] ...
# PYTHON names an interpreter that has torch (default: the project's own, else python3).
set -eu
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
export PYTHONUNBUFFERED=1
exec "$PYTHON" benchmarks/gpu_check.py "$@"
