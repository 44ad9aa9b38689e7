#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests: test.sh short | all. Every stage runs even if an earlier one failed; the closing line counts single tests
# ("N passed, N failed"), and the exit status is 0 only if none failed. "all" also writes docs/results/test-all.md.
set -uo pipefail
cd "$(dirname "$0")/.."
mode=${1:-short}
case "$mode" in
    short) fuzz_seconds=${ESA_FUZZ_SECONDS:-30} ;;
    all) fuzz_seconds=${ESA_FUZZ_SECONDS:-1200} ;;
    *) echo "test.sh: unknown mode '$mode', expected short or all" >&2; exit 2 ;;
esac
jobs=${JOBS:-2}
scratch=$(mktemp -d)
: >"$scratch/notes"
python_group=       # the process group of the Python stages, which run beside the others
trap 'kill ${fuzz_pids[@]+"${fuzz_pids[@]}"} ${python_group:+-- "-$python_group"} 2>/dev/null; rm -rf "$scratch"' EXIT

note() {    # note NAME PASSED FAILED SECONDS [remark]: into a file, because stages run in processes of their own
    printf '%s|%d|%d|%d|%s\n' "$1" "$2" "$3" "$4" "${5:-}" >>"$scratch/notes"
    printf -- '---- %s: %d passed, %d failed (%d s) %s\n' "$1" "$2" "$3" "$4" "${5:-}"
}

build() {   # build PRESET [target...]: configures and builds; a build that fails is one failed test
    local preset=$1 log=$scratch/build-$1; shift
    cmake --preset "$preset" >"$log" 2>&1 &&
        cmake --build --preset "$preset" -j "$jobs" ${1:+--target "$@"} >"$log" 2>&1 && return 0
    grep -nE 'error|Error|undefined|warning' "$log" | head -n 20
    tail -n 5 "$log"
    return 1
}

stage() {   # stage NAME PRESET [ctest arguments]: builds the preset and runs its tests
    local name=$1 preset=$2 start=$SECONDS; shift 2
    printf '==== %s\n' "$name"
    if ! build "$preset"; then note "$name" 0 1 $((SECONDS - start)) "did not build"; return; fi
    ctest --preset "$preset" -j "$jobs" --no-tests=error "$@" 2>&1 | tee "$scratch/ctest" | grep -vE '^\s*Start +[0-9]+:'
    count_ctest "$name" "$start" "$scratch/ctest"
}

count_ctest() {   # count_ctest NAME START FILE: books what ctest wrote to FILE
    local name=$1 start=$2 file=$3 total bad skipped
    total=$(sed -n 's/.*tests failed out of \([0-9]*\).*/\1/p' "$file")
    bad=$(sed -n 's/.*tests passed, \([0-9]*\) tests failed.*/\1/p' "$file")
    if [ -z "$total" ]; then note "$name" 0 1 $((SECONDS - start)) "ctest ran no tests"; return; fi
    skipped=$(grep -cF '***Skipped' "$file")         # neither passed nor failed
    note "$name" $((total - bad - skipped)) "$bad" $((SECONDS - start)) "$([ "$skipped" -eq 0 ] || echo "$skipped skipped")"
}

# Fuzzing is a matter of minutes, not of work: the targets run beside the other stages, from the committed seeds. A finding or a crash is a failure.
fuzz_pids=()
fuzz_names=()
fuzz_begin=0
fuzz_start() {
    local target name seeds
    fuzz_begin=$SECONDS
    printf '==== fuzz, %d s per target, in the background\n' "$fuzz_seconds"
    if ! build fuzz fuzzers; then note fuzz 0 1 $((SECONDS - fuzz_begin)) "did not build"; return; fi
    for target in build-fuzz/fuzz_*; do
        { [ -f "$target" ] && [ -x "$target" ]; } || continue
        name=$(basename "$target")
        mkdir -p "$scratch/$name"
        seeds=()
        [ -d "tests/fuzz/corpus/$name" ] && seeds=("tests/fuzz/corpus/$name")
        nice "$target" -max_total_time="$fuzz_seconds" -timeout=60 -rss_limit_mb=2048 -print_final_stats=1 \
            -artifact_prefix="$scratch/$name-" "$scratch/$name" ${seeds[@]+"${seeds[@]}"} >"$scratch/$name.log" 2>&1 &
        fuzz_pids+=($!)
        fuzz_names+=("$name")
    done
    [ ${#fuzz_pids[@]} -gt 0 ] || note fuzz 0 1 0 "no fuzz targets"
}

fuzz_collect() {
    local i name runs ok=0 bad=0 remark=""
    [ ${#fuzz_pids[@]} -gt 0 ] || return
    for i in "${!fuzz_pids[@]}"; do
        name=${fuzz_names[$i]}
        if wait "${fuzz_pids[$i]}"; then
            runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$scratch/$name.log")
            ok=$((ok + 1))
            remark="$remark$name: $runs executions; "
        else
            bad=$((bad + 1))
            tail -n 40 "$scratch/$name.log"
            for artifact in "$scratch/$name"-*; do
                if [ -f "$artifact" ]; then echo "input (base64): $(base64 -w0 "$artifact")"; fi
            done
        fi
    done
    note "fuzz, $fuzz_seconds s each" "$ok" "$bad" $((SECONDS - fuzz_begin)) "$remark"
}

# python_tests NAME REQUIREMENTS [pytest arguments]: the package's tests, then the engine held against diffusers live, in an environment of
# those versions.
python_tests() {
    local name=$1 requirements=$2 start=$SECONDS python; shift 2
    if ! python=$(scripts/python-env.sh "$requirements"); then note "$name" 0 1 $((SECONDS - start)) "no environment"; return; fi
    until [ -e "$scratch/release-done" ]; do sleep 1; done
    printf '==== %s\n' "$name"
    start=$SECONDS
    if ! build release; then note "$name" 0 1 $((SECONDS - start)) "did not build"; return; fi
    ESA_LIB=$PWD/build/libesa.so OMP_NUM_THREADS=1 "$python" -m pytest -q --junitxml="$scratch/pytest.xml" "$@" 2>&1 | tail -n 60
    # shellcheck disable=SC2046
    note "$name" $("$python" scripts/count_junit.py "$scratch/pytest.xml" $((SECONDS - start)))
    rm -f "$scratch/pytest.xml"
    start=$SECONDS
    ESA_PYTHON=$python ctest --preset release -L live --no-tests=error >"$scratch/live" 2>&1
    grep -q '100% tests passed' "$scratch/live" || tail -n 40 "$scratch/live"
    count_ctest "$name, live parity" "$start" "$scratch/live"
    if grep -q 'live\.diffusers .*Skipped' "$scratch/live"; then note "$name, live parity" 0 1 0 "skipped although its packages are there"; fi
}

# Fetching and unpacking torch is mostly waiting, and pytest keeps one core busy: the Python stages run beside the others, from the release stage
# on, whose library they use. A process group of their own, so that all of it ends if this script does; what they print follows at the end.
python_start() {
    set -m
    {
        if [ "$mode" = all ]; then
            python_tests "python" tests/python/requirements.txt --slow
            python_tests "python, diffusers 0.36" tests/python/requirements-036.txt
        else
            python_tests "python" tests/python/requirements.txt
        fi
    } >"$scratch/python" 2>&1 </dev/null &
    python_group=$!
    set +m
}

python_collect() {
    wait "$python_group"
    python_group=
    cat "$scratch/python"
    grep -q '^python|' "$scratch/notes" || note python 0 1 0 "ended without a count"
}

fresh() {   # the two commands of the README in a clone with nothing built, demo and install
    local start=$SECONDS
    printf '==== fresh clone: make demo, make install\n'
    if git clone -q . "$scratch/clone" && (cd "$scratch/clone" && make demo JOBS="$jobs" &&
        make install JOBS="$jobs" PREFIX="$scratch/prefix" && "$scratch/prefix/bin/esa" doctor) >"$scratch/log" 2>&1; then
        note "fresh clone" 1 0 $((SECONDS - start))
    else
        tail -n 20 "$scratch/log"
        note "fresh clone" 0 1 $((SECONDS - start))
    fi
}

# The long run draws its random problems anew each time; failures print the seed.
[ "$mode" = short ] || export ESA_TEST_SEED=${ESA_TEST_SEED:-$(date +%s)}
fuzz_start
python_start
# Tests labelled long (a browser, the tutorial, a cluster) belong to the complete run, once.
# Live parity with diffusers needs torch: the Python stage runs it, in the environment it makes.
if [ "$mode" = all ]; then stage "release" release -LE '^live$'
else stage "release" release -LE '^(long|live)$'
fi
touch "$scratch/release-done"
stage "asan + ubsan" asan -LE '^(long|live)$'
# Emulation is some thirty times slower than the machine, so the short run takes what depends on the processor; sessions and
# mask files, which do not, follow in the complete run.
if [ "$mode" = all ]; then stage "NEON under qemu" neon
else stage "NEON under qemu, all but sessions" neon -E '^session'
fi
if [ "$mode" = all ]; then
    stage "tsan" tsan -L unit
    stage "clang" clang -LE '^(long|live)$'
    fresh
fi
python_collect
fuzz_collect
passed=$(awk -F'|' '{ n += $2 } END { print n + 0 }' "$scratch/notes")
failed=$(awk -F'|' '{ n += $3 } END { print n + 0 }' "$scratch/notes")
if [ "$mode" = all ]; then
    {
        echo "# Last complete run of \`make test-all\`"
        echo
        echo "Commit $(git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown), $(date -u +%Y-%m-%d)," \
             "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) cores."
        echo
        echo "| stage | passed | failed | seconds | remark |"
        echo "|---|---|---|---|---|"
        sed 's/|/ | /g; s/^/| /; s/$/ |/' "$scratch/notes"
        echo
        echo "$passed passed, $failed failed"
    } >"$scratch/test-all.md"
    mv "$scratch/test-all.md" docs/results/test-all.md
fi
printf '%d passed, %d failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ]
