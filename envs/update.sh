#!/usr/bin/env bash
# Make lock.txt and dflash.yaml anew from requirements.in, in a fresh environment.
set -euo pipefail
cd "$(dirname "$0")"
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install -q -r requirements.in
{
    echo "# All packages of the project's environment, pinned (made by envs/update.sh from requirements.in)."
    "$venv/bin/pip" freeze --all | grep -v -i -E '^pip==' | sed 's/+cpu$//'
} > lock.txt
"${PYTHON:-python3}" conda.py > dflash.yaml
