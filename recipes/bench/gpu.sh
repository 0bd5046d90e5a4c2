#!/bin/sh
# Everything that this project wants to know about a GPU, in ten minutes: tests first, then times, with tables and
# pictures. What was interrupted goes on if it is run again. From the checkout's root:
# sh recipes/bench/gpu.sh [FOLDER, by default work/bench/gpu]
out=${1:-work/bench/gpu}
python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "gpu.sh needs a GPU, and torch finds none")' ||
    exit 1
mkdir -p "$out"
python -m common.kernels | tee "$out/kernels.txt"

# Kernels against the formulas, and the comparison before the first use of each mechanism, forward and backward.
if [ ! -e "$out/tests.done" ]; then
    timeout 240 python -m pytest -n 8 tests/gpu tests/common/ops/gpu/kernels >"$out/tests.log" 2>&1
    status=$?
    tail -n 20 "$out/tests.log"
    [ $status -eq 124 ] || echo $status >"$out/tests.done"
fi

# Least first: what is left after the minutes is measured by the next run.
python -m recipes.bench --device cuda --dtype bfloat16 --minutes 6 --out "$out/times" \
    --only gpu_sequence gpu_sequences gpu_training gpu_hier gpu_reduce_overhead gpu_compiled
