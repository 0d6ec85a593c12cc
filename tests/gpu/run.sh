#!/usr/bin/env bash
# Check Maniple on one CUDA device, or rehearse that on the CPU: tests/gpu/run.sh [--device cpu] [--json FILE] [--only NAME].
# Nothing has to be installed but what tests/gpu/requirements.txt names; the sources are found from here. See docs/gpu.md.
set -eu -o pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python3)}
export PYTHONPATH="$root:$root/gen:$root/kernels:$root/tests:$root/tests/gpu${PYTHONPATH:+:$PYTHONPATH}"
export TRITON_DEFAULT_FP_FUSION=1 PYTHONUNBUFFERED=1
exec "$python" "$root/tests/gpu/main.py" "$@"
