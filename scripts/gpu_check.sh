#!/usr/bin/env bash
# Everything that needs a GPU, in nine minutes on one H200: writes one JSON.
#   scripts/gpu_check.sh [--dry-run] [--out FILE]
# --dry-run goes through the same steps at tiny sizes on this machine's CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec uv run --no-sync python scripts/gpu_check.py "$@"
