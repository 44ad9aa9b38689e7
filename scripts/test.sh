#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests: test.sh short | all. Every stage runs even if an earlier one failed. A skip that is not in
# tests/allowed_skips.txt is a failure. The closing line counts single tests ("N passed, N failed"), and the exit status
# is 0 only if none failed. "all" also writes docs/results/test-all.md.
set -uo pipefail
cd "$(dirname "$0")/.."
mode=${1:-short}
case "$mode" in
    short) fuzz_seconds=${ESA_FUZZ_SECONDS:-30} live_long=0 ;;
    all) fuzz_seconds=${ESA_FUZZ_SECONDS:-1200} live_long=1 ;;
    *) echo "test.sh: unknown mode '$mode', expected short or all" >&2; exit 2 ;;
esac
jobs=${JOBS:-2}
scratch=$(mktemp -d)
: >"$scratch/notes"
: >"$scratch/skips"
python_group=       # the process group of the Python stages, which run beside the others
build_group=        # that of the first build
trap 'kill ${fuzz_pids[@]+"${fuzz_pids[@]}"} 2>/dev/null
      for group in $python_group $build_group; do kill -- "-$group" 2>/dev/null; done
      rm -rf "$scratch"' EXIT

note() {    # note NAME PASSED FAILED SKIPPED SECONDS [remark]: into a file, because some stages are other processes
    printf '%s|%d|%d|%d|%d|%s\n' "$1" "$2" "$3" "$4" "$5" "${6:-}" >>"$scratch/notes"
    printf -- '---- %s: %d passed, %d failed, %d skipped (%d s) %s\n' "$1" "$2" "$3" "$4" "$5" "${6:-}"
}

count() {   # count NAME START FILE: books a JUnit file of ctest or pytest
    local name=$1 seconds=$((SECONDS - $2)) passed failed skipped
    python3 scripts/count_tests.py "$3" tests/allowed_skips.txt >"$3.count"
    read -r passed failed skipped <"$3.count"
    sed 1d "$3.count" | sed "s/^/$name: /" | tee -a "$scratch/skips"
    note "$name" "${passed:-0}" "${failed:-1}" "${skipped:-0}" "$seconds"
}

# The CUDA plugin takes minutes to compile, and without a GPU nothing can run it: there the short run leaves it to the
# complete one.
cuda=()
if [ "$mode" = short ] && [ ! -e /proc/driver/nvidia/version ]; then cuda=(-DESA_CUDA=OFF); fi

build() {   # build PRESET [target...]: configures and builds; a build that fails is one failed test
    local preset=$1 log=$scratch/build-$1; shift
    cmake --preset "$preset" ${cuda[@]+"${cuda[@]}"} >"$log" 2>&1 &&
        cmake --build --preset "$preset" -j $((jobs + 1)) ${1:+--target "$@"} >"$log" 2>&1 && return 0
    grep -nE 'error|Error|undefined|warning' "$log" | head -n 20
    tail -n 5 "$log"
    return 1
}

run_ctest() {   # run_ctest PRESET FILE [ctest arguments]: prints the results, writes FILE as JUnit
    local preset=$1 file=$2; shift 2
    # One more than there are cores: many tests wait for a signal, a child or the disk.
    ctest --preset "$preset" -j $((jobs + 1)) --no-tests=error --output-junit "$file" \
        --test-output-size-passed 10000000 "$@" 2>&1 | grep -vE '^\s*Start +[0-9]+:'
}

stage() {   # stage NAME PRESET [ctest arguments]: builds the preset and runs its tests
    local name=$1 preset=$2 start=$SECONDS; shift 2
    printf '==== %s\n' "$name"
    if ! build "$preset"; then note "$name" 0 1 0 $((SECONDS - start)) "did not build"; return; fi
    run_ctest "$preset" "$scratch/$preset.xml" "$@"
    count "$name" "$start" "$scratch/$preset.xml"
}

# Fuzzing takes time, not work: the targets run beside the other stages, from the committed seeds. A finding or a crash
# is a failure.
fuzz_pids=()
fuzz_names=()
fuzz_begin=0
fuzz_start() {
    local target name seeds
    fuzz_begin=$SECONDS
    printf '==== fuzz, %d s per target, in the background\n' "$fuzz_seconds"
    if ! build fuzz fuzzers; then note fuzz 0 1 0 $((SECONDS - fuzz_begin)) "did not build"; return; fi
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
    [ ${#fuzz_pids[@]} -gt 0 ] || note fuzz 0 1 0 0 "no fuzz targets"
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
    note "fuzz, $fuzz_seconds s each" "$ok" "$bad" 0 $((SECONDS - fuzz_begin)) "$remark"
}

# python_tests NAME REQUIREMENTS [pytest arguments]: the package's tests, then the engine against diffusers, in an
# environment of those versions.
python_tests() {
    local name=$1 requirements=$2 start=$SECONDS python; shift 2
    if ! python=$(scripts/python-env.sh "$requirements"); then
        note "$name" 0 1 0 $((SECONDS - start)) "no environment"
        return
    fi
    until [ -e "$scratch/release-built" ]; do sleep 1; done
    printf '==== %s\n' "$name"
    start=$SECONDS
    ESA_LIB=$PWD/build/libesa.so OMP_NUM_THREADS=1 \
        "$python" -m pytest -q --junitxml="$scratch/pytest.xml" "$@" 2>&1 | tail -n 60
    count "$name" "$start" "$scratch/pytest.xml"
    rm -f "$scratch/pytest.xml"
    until [ -e "$scratch/release-done" ]; do sleep 1; done
    start=$SECONDS
    ESA_PYTHON=$python ESA_LIVE_LONG=$live_long run_ctest release "$scratch/live.xml" -L live >"$scratch/live"
    grep -q '100% tests passed' "$scratch/live" || tail -n 40 "$scratch/live"
    count "$name, live parity" "$start" "$scratch/live.xml"
}

# python_check NAME REQUIREMENTS FILE: one file of tests that needs packages of its own, in an environment of them.
python_check() {
    local name=$1 requirements=$2 file=$3 start=$SECONDS python
    if ! python=$(scripts/python-env.sh "$requirements"); then
        note "$name" 0 1 0 $((SECONDS - start)) "no environment"
        return
    fi
    start=$SECONDS
    ESA_LIB=$PWD/build/libesa.so OMP_NUM_THREADS=1 \
        "$python" -m pytest -q --junitxml="$scratch/check.xml" "$file" 2>&1 | tail -n 60
    count "$name" "$start" "$scratch/check.xml"
    rm -f "$scratch/check.xml"
}

site() {    # the pages of docs/ as a site, strictly
    local start=$SECONDS
    printf '==== documentation site\n'
    if make --no-print-directory docs >"$scratch/site" 2>&1; then note "docs" 1 0 0 $((SECONDS - start))
    else
        tail -n 20 "$scratch/site"
        note "docs" 0 1 0 $((SECONDS - start))
    fi
}

# Fetching and unpacking torch is mostly waiting, and pytest keeps one core busy: the Python stages run beside the
# others. They make their environment at once and run as soon as the libraries are built. They form a process group of
# their own, so that all of it ends if this script does; their output follows at the end.
python_start() {
    set -m
    {
        if [ "$mode" = all ]; then
            python_tests "python" tests/python/requirements.txt --slow
            python_tests "python, diffusers 0.36" tests/python/requirements-036.txt
            python_check "python, quantised layers" tests/python/requirements-quantised.txt \
                tests/python/check_quantised.py
            python_check "python, GGUF" tests/nn/requirements-gguf.txt tests/nn/check_gguf.py
            python_check "python, clients of esa serve" tests/cli/requirements-serve.txt \
                tests/cli/check_serve_clients.py
            site
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
    grep -q '^python|' "$scratch/notes" || note python 0 1 0 0 "ended without a count"
}

fresh() {   # what the README tells a reader to type, in a clone with nothing built
    local start=$SECONDS
    printf '==== fresh clone: make demo, make install\n'
    if git clone -q . "$scratch/clone" && (cd "$scratch/clone" && make demo JOBS="$jobs" &&
        make install JOBS="$jobs" PREFIX="$scratch/prefix" &&
        "$scratch/prefix/bin/esa" doctor) >"$scratch/log" 2>&1; then
        note "fresh clone" 1 0 0 $((SECONDS - start))
    else
        tail -n 20 "$scratch/log"
        note "fresh clone" 0 1 0 $((SECONDS - start))
    fi
}

table() {   # the closing table: a row per stage
    echo "| stage | passed | failed | skipped | seconds | remark |"
    echo "|---|---|---|---|---|---|"
    sed 's/|/ | /g; s/^/| /; s/$/ |/' "$scratch/notes"
}

# The long run draws its random problems anew each time; failures print the seed.
[ "$mode" = short ] || export ESA_TEST_SEED=${ESA_TEST_SEED:-$(date +%s)}
python_start
# pytest waits for the libraries and the command, so these are built first, beside the fuzz targets: while torch is
# unpacked there is time for both. The rest of the release build, which may include the CUDA plugin, follows while
# pytest runs.
set -m
{ build release esa esa_cli >/dev/null; touch "$scratch/release-built"; } </dev/null &
build_group=$!
set +m
fuzz_start
wait "$build_group"
build_group=
# Tests labelled long (a browser, the tutorial, a cluster) belong to the complete run, once. So do those labelled
# faults, which have a stage of their own.
# Live parity with diffusers needs torch: the Python stage runs it, in the environment it makes.
if [ "$mode" = all ]; then stage "release" release -LE '^(live|faults)$'
else stage "release" release -LE '^(long|live|faults)$'
fi
touch "$scratch/release-done"
# Sanitizers and emulation are slow: there the short run takes a part of the problems.
[ "$mode" = all ] || export ESA_TEST_SMALL=1
# Whole networks on the stand-in, and reports of the command, take minutes under a sanitizer and follow in the
# complete run; so does the size of mask files, a number that the release run has measured.
if [ "$mode" = all ]; then stage "asan + ubsan" asan -LE '^(long|live)$'
else
    networks='stand_in\.test_(carry|hunyuan|limits|pipeline|store_forward|vae|wan)_gpu'
    stage "asan + ubsan, without networks on the stand-in" asan -LE '^(long|live)$' \
        -E "^($networks|cli\.(schemas|report|export)|maskfile\.test_mask_size)\$"
fi
# Emulation is some thirty times slower than the machine. The short run takes what depends on the processor; sessions,
# mask files and the examples that use them do not, and follow in the complete run.
# qemu's user mode cannot fork a process that has threads, which two tests do.
if [ "$mode" = all ]; then stage "NEON under qemu" neon -E '^(base\.test_process|kern\.test_amx_process)$'
else
    export ESA_TEST_EMULATED=1
    stage "NEON under qemu, without sessions and mask files" neon \
        -E '^(session|maskfile|example\.0[3-6]|base\.test_process$|kern\.test_amx_process$)'
fi
if [ "$mode" = all ]; then
    stage "tsan" tsan -L unit
    stage "clang" clang -LE '^(long|live|faults)$'
    stage "faults" release -L '^faults$'
    fresh
fi
python_collect
fuzz_collect
passed=$(awk -F'|' '{ n += $2 } END { print n + 0 }' "$scratch/notes")
failed=$(awk -F'|' '{ n += $3 } END { print n + 0 }' "$scratch/notes")
echo
table
cat "$scratch/skips"
if [ "$mode" = all ]; then
    {
        echo "# Last complete run of \`make test-all\`"
        echo
        echo "Commit $(git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown), $(date -u +%Y-%m-%d)," \
             "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) cores."
        echo
        table
        echo
        if [ -s "$scratch/skips" ]; then sed 's/^/* /' "$scratch/skips"; echo; fi
        echo "$passed passed, $failed failed"
    } >"$scratch/test-all.md"
    mv "$scratch/test-all.md" docs/results/test-all.md
fi
printf '%d passed, %d failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ]
