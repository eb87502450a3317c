#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# DISC's tests and benchmarks on a machine with a GPU, in one go: torch 2.11 to 2.13 with CUDA 13, transformers
# and Triton are there, a package index is not.
#
#   benchmarks/gpu_suite.sh [WHAT] [WHEELS]
#
#   WHAT    tests | bench | all (the default), or parts with commas between: build,tests,bert
#           parts: build tests cpu bert stream kernels vit resnet50 unet gpt2 train1 train8 train32 train_unet
#   WHEELS  a folder of wheels: what is missing or older here is unpacked from them into a temporary folder
#
#   OUT=build/gpu     logs, results.jsonl and junit.xml; at most four files
#   LIMIT=3300        seconds for all of it; what there is no time for is said
#   PART_LIMIT=270    seconds for one part; a part that fails or runs out of time does not stop the others
#   TESTS=...         pytest's arguments instead of the tests that carry the marker "gpu"
#   CPU_TESTS=...     what the part "cpu" runs
#   BENCH_ARGS=...    further arguments of bench_gpu.py;  DRY_RUN=1: all of it, tiny and on the CPU
#   JOBS=6            test processes
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

what=${1:-all} wheels=${2:-}
OUT=${OUT:-build/gpu} LIMIT=${LIMIT:-3300} PART_LIMIT=${PART_LIMIT:-270} JOBS=${JOBS:-6}
BENCH_ARGS=${BENCH_ARGS:-} DRY_RUN=${DRY_RUN:-}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd)
log=$OUT/suite.log
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
unset BLADE_BACKENDS BLADE_CACHE_DIR
summary=()

say() { printf '%s\n' "$*" | tee -a "$log"; }

left() { echo $((LIMIT - SECONDS)); }

# part NAME LIMIT COMMAND...: within its time, whatever the others did
part() {
  local name=$1 limit=$2 begin=$SECONDS status signal=TERM
  shift 2
  ((limit > PART_LIMIT)) && limit=$PART_LIMIT
  (($(left) < limit)) && limit=$(left)
  if ((limit < 20)); then
    summary+=("$(printf '%-12s left out: %s s are left' "$name" "$(left)")")
    return 1
  fi
  say "== $name (at most $limit s)"
  [[ $name == tests || $name == cpu ]] && signal=INT # pytest still says what it found
  timeout --signal=$signal --kill-after=15 "$((limit - 5))" "$@" 2>&1 | tee -a "$log"
  status=${PIPESTATUS[0]}
  case $status in
    0) status=ok ;;
    124 | 137) status="out of time" ;;
    *) status="FAILED, exit code $status" ;;
  esac
  summary+=("$(printf '%-12s %s (%s s)' "$name" "$status" $((SECONDS - begin)))")
  [ "$status" = ok ]
}

# Every wheel whose package is missing or older here. One at a time: a wheel for another Python stops no other.
unpack_wheels() {
  [ -n "$wheels" ] || return 0
  local wheel
  mkdir -p "$temporary/site"
  for wheel in "$wheels"/*.whl; do
    "$PYTHON" - "$wheel" 2> /dev/null <<'PY' && continue
import importlib.metadata, pathlib, re, sys
name, wanted = pathlib.Path(sys.argv[1]).name.split("-")[:2]
order = lambda text: [int(n) for n in re.findall(r"\d+", text)]
sys.exit(order(importlib.metadata.version(name)) < order(wanted))
PY
    "$PYTHON" -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
      --upgrade --target "$temporary/site" "$wheel" > /dev/null 2> "$temporary/pip" && say "unpacked $(basename "$wheel")" \
      || say "not unpacked: $(basename "$wheel"): $(tail -n 1 "$temporary/pip")"
  done
  export PYTHONPATH=$PYTHONPATH:$temporary/site
}

facts() {
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2> /dev/null || echo "no nvidia-smi"
  "$PYTHON" - <<'PY'
import importlib.metadata, sys
import torch
names = "triton transformers diffusers pydantic torch-mlir numpy pytest pytest-xdist".split()
found = []
for name in names:
    try:
        found.append(f"{name} {importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
        found.append(f"no {name}")
print(f"python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda},", ", ".join(found))
PY
}

build() {
  "$PYTHON" setup.py -q build_ext --inplace > "$temporary/build" 2>&1
  local status=$?
  ((status)) && tail -n 40 "$temporary/build"
  ls -l blade/*.so 2> /dev/null
  "$PYTHON" -m blade doctor
  return $status
}

# What fails is printed at once (tests/gpu/conftest.py): a run that is cut short has said it. Stacks of what takes long, too.
run_pytest() {
  local more=()
  "$PYTHON" -c 'import xdist' 2> /dev/null && ((JOBS > 1)) && more=(-n "$JOBS" --dist worksteal --max-worker-restart 40)
  "$PYTHON" -c 'import pytest_timeout' 2> /dev/null && more+=(--timeout=150 --timeout-method=thread)
  "$PYTHON" -m pytest -q -rfE --tb=short --maxfail=200 --durations=8 --continue-on-collection-errors \
    -p no:benchmark -p no:cacheprovider -o faulthandler_timeout=90 "${more[@]}" --junitxml="$OUT/junit_$1.xml" "${@:2}"
}

# Without TESTS: every file that has tests with the marker; the others may need what is not installed.
tests() {
  # shellcheck disable=SC2086,SC2046 # words
  run_pytest gpu -m gpu ${TESTS:-tests/gpu $(grep -rlE 'mark\.gpu\b' tests --include='test_*.py' | grep -v '^tests/gpu/')}
}

cpu_tests() {
  # shellcheck disable=SC2086 # words
  run_pytest cpu ${CPU_TESTS:-tests/test_config.py tests/graph tests/clustering tests/runtime}
}

bench() {
  local name=$1
  shift
  # shellcheck disable=SC2086 # words
  part "$name" 290 "$PYTHON" benchmarks/bench_gpu.py "$@" --seconds "$((PART_LIMIT - 30))" \
    --json "$OUT/results.jsonl" ${DRY_RUN:+--dry-run} $BENCH_ARGS
}

run_part() {
  case $1 in
    build) part build 200 bash -c build ;;
    tests) part tests 600 bash -c tests ;;
    cpu) part cpu 600 bash -c cpu_tests ;;
    bert) bench bert bert ;;
    stream) bench stream stream --random 200 ;;
    kernels) bench kernels kernels ;;
    vit | resnet50 | unet) bench "$1" models --models "$1" ;;
    gpt2) bench gpt2 models --models gpt2_decode ;;
    train1 | train8 | train32) bench "$1" train --tasks bert_base --batches "${1#train}" ;;
    train_unet) bench train_unet train --tasks unet --batches 1 --alone ;;
    *) say "no part $1" && summary+=("$1: there is no such part") ;;
  esac
}

benches="bert stream kernels vit resnet50 unet gpt2 train1 train8 train32 train_unet"
case $what in
  tests) parts="build tests" ;;
  bench) parts="build $benches" ;;
  all) parts="build tests $benches" ;;
  *) parts=${what//,/ } ;;
esac

: > "$log"
export PYTHON OUT JOBS temporary TESTS=${TESTS:-} CPU_TESTS=${CPU_TESTS:-}
export -f build tests cpu_tests run_pytest # timeout starts programs, so the parts are started by another bash
unpack_wheels
facts 2>&1 | tee -a "$log"
for one in $parts; do
  run_part "$one"
done
say "== summary after $SECONDS s"
failed=0
for line in "${summary[@]}"; do
  say "$line"
  [[ $line == *" ok ("* ]] || failed=1
done
exit $failed
