#!/usr/bin/env bash
# Measures on whatever accelerator is here, in under 10 minutes: what is fast by default against what it replaced, A B A B
# in one process (part promises: towers, attention, windows, fused and compiled blocks, late numbers, experts, plans,
# checkpoints, bytes of pictures, fp8), bf16 training steps of a language model at 0.5 to 2 B
# parameters and of a Wan2.1-shaped video generator at 1.3 B, parity with the CPU, the mechanisms of parallel plans that
# one device can run, the digits job, answers of models of those sizes, and the step compiled, with fused kernels and in
# fp8. Writes one JSON (benchmarks/results/accelerator.json, or --out FILE) and beside it one page of text that says which
# promise held. Without an accelerator it says so and ends
# with 0. `--parts generator` measures the generator alone; the parts are promises, step, generator, parity, mechanisms, job,
# answers (in batches, beside transformers' generate), speed, offload (what lives on the host, pinned and not) and kernels
# (grouped products by type, packed attention).
#
# Needs torch 2.11 or newer, transformers 5.17 or newer, pydantic, ruamel.yaml, click, pillow and scikit-learn; the
# generator's step needs diffusers 0.42 or newer as well. The project need not be installed. `--device cpu --tiny` runs
# the same code on a CPU in a minute or two.
#
# Where nothing can be downloaded, bring what is missing as wheels. diffusers needs importlib_metadata (which needs zipp),
# filelock, huggingface-hub 1.32 or newer, numpy, regex, requests, safetensors 0.8 or newer and Pillow; most images with
# transformers have all but the first:
#   pip download --no-deps -d wheels diffusers==0.42.1 importlib_metadata zipp pydantic pydantic_core annotated_types …
#   python3 -m pip install --no-index --no-deps --target site wheels/*.whl; PYTHONPATH=site benchmarks/accelerator.sh
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="${root}${PYTHONPATH:+:${PYTHONPATH}}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
exec "${PYTHON:-python3}" -m benchmarks.accelerator "$@"
