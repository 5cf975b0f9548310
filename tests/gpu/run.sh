#!/bin/sh
# On a machine with an NVIDIA GPU: writes docs/gpu-findings.md. Needs Python 3.10 or later, root; torch for most steps.
# STALLSCOPE_GPU_TESTS: unset = runs where a GPU is, else skips; 1 = a missing GPU is a failure; 0 = skips.
cd "$(dirname "$0")/../.." || exit 1
if [ "${STALLSCOPE_GPU_TESTS:-}" = 0 ]; then echo "skipped: STALLSCOPE_GPU_TESTS=0"; exit 0; fi

usable='import sys; sys.exit(sys.version_info < (3, 10))'
with_torch='import importlib.util as u, sys; sys.exit(sys.version_info < (3, 10) or not u.find_spec("torch"))'
python=
for check in "$with_torch" "$usable"; do
	for candidate in ${PYTHON:-} python3 .venv/bin/python /usr/bin/python3; do
		if [ -z "$python" ] && "$candidate" -c "$check" 2>/dev/null; then python=$candidate; fi
	done
done
if [ -z "$python" ]; then echo "failed: no Python 3.10 or later"; exit 1; fi

"$python" tests/gpu/findings.py "$@"
status=$?
if [ "$status" != 3 ]; then exit "$status"; fi
if [ "${STALLSCOPE_GPU_TESTS:-}" = 1 ]; then echo "failed: STALLSCOPE_GPU_TESTS=1, but there is no GPU"; exit 1; fi
echo "skipped: no GPU"
