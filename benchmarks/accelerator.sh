#!/usr/bin/env bash
# Measures on whatever accelerator is here, in under 8 minutes: the digits job, parity with the CPU, and a bf16 training
# step at 0.5 to 2 B parameters. Writes one JSON (benchmarks/results/accelerator.json, or --out FILE). Without an
# accelerator it says so and ends with 0.
#
# Needs torch 2.11 or newer, transformers 5.17 or newer, pydantic, ruamel.yaml, click, pillow and scikit-learn; the project
# need not be installed. `--device cpu --tiny` runs the same code on a CPU in a minute or two.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="${root}${PYTHONPATH:+:${PYTHONPATH}}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
exec "${PYTHON:-python3}" -m benchmarks.accelerator "$@"
