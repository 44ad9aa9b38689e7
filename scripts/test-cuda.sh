#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The tests of the CUDA backend on a machine with a GPU: test-cuda.sh [FOLDER]. FOLDER holds esa, libesa_cuda.so and
# tests/ (build-cuda, or a bundle). It runs the programs listed in FOLDER/tests/gpu_tests.txt with ESA_TEST_DEVICE=cuda,
# checks through torch, and compute-sanitizer. The closing line counts single tests ("N passed, N failed"); logs and
# result.md are left in FOLDER/test-cuda. Without a GPU nothing is tested: it says so and exits with status 1.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$here                        # in a bundle this script lies at the top
if [ "$(basename "$here")" = scripts ]; then here=${here%/scripts}; folder=$here/build-cuda; fi
folder=$(cd "${1:-$folder}" 2>/dev/null && pwd) ||
    { echo "test-cuda.sh: there is no folder ${1:-build-cuda}: run make test-cuda" >&2; exit 1; }
export ESA_CUDA_LIB=$folder/libesa_cuda.so
export PYTHONDONTWRITEBYTECODE=1
# The command may need libraries that a bundle carries; python3 has its own and must not see those.
esa=(env "LD_LIBRARY_PATH=$folder/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$folder/esa")
unset ESA_CUDA ESA_TEST_DEVICE
out=$folder/test-cuda
mkdir -p "$out"
rm -f "$out"/*.log "$out/result.md"

[ -f "$ESA_CUDA_LIB" ] || { echo "test-cuda.sh: $ESA_CUDA_LIB was not built: nothing was tested" >&2; exit 1; }
"${esa[@]}" doctor >"$out/doctor.log" 2>&1
doctor=$?
gpu=$(sed -n 's/^gpu 0 *//p' "$out/doctor.log")
if [ -z "$gpu" ]; then
    why=$(sed -n 's/^cuda  *not in use: //p; s/^esa: //p' "$out/doctor.log" | head -n 1)
    echo "test-cuda.sh: no GPU here, nothing was tested: $why" >&2
    exit 1
fi
echo "$gpu"

passed=0
failed=0
table=()
names=()
pids=()
limit=${ESA_TEST_SECONDS:-420}

note() {    # note NAME PASSED FAILED [remark]
    passed=$((passed + $2))
    failed=$((failed + $3))
    table+=("| $1 | $2 | $3 | ${4:-} |")
    printf -- '---- %-34s %3d passed, %d failed %s\n' "$1" "$2" "$3" "${4:-}"
}

start() {   # start NAME [VARIABLE=value...] command...: in the background, at most as many as there are cores
    while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n || true; done
    local name=$1; shift
    (
        begin=$SECONDS
        env ESA_TEST_VERBOSE=1 "$@" >"$out/$name.log" 2>&1
        echo "status $? seconds $((SECONDS - begin))" >>"$out/$name.log"
    ) &
    names+=("$name")
    pids+=($!)
}

collect() { # reads the logs of what was started; a program that died counts as one failed test more
    local name status seconds good bad all unclean skipped remark
    wait "${pids[@]}" 2>/dev/null       # some may have been waited for already
    for name in "${names[@]}"; do
        status=$(sed -n 's/^status \([0-9]*\) .*/\1/p' "$out/$name.log" | tail -n 1)
        seconds=$(sed -n 's/^status .* seconds //p' "$out/$name.log" | tail -n 1)
        # Three ways to count: cmocka (which lists tests that failed while cleaning up apart), its stand-in (all tests
        # and the failed ones), and the Python checks.
        good=$(sed -n -e 's/^\[  PASSED  \] \([0-9]*\) test(s)\..*/\1/p' -e 's/^\([0-9]*\) passed, .*/\1/p' \
                      "$out/$name.log" | tail -n 1)
        bad=$(sed -n -e 's/^\[  FAILED  \] \([0-9]*\) test(s).*/\1/p' -e 's/^[0-9]* passed, \([0-9]*\) failed$/\1/p' \
                     -e 's/^\[==========\] .* run, \([0-9]*\) failed\.$/\1/p' "$out/$name.log" | tail -n 1)
        all=$(sed -n 's/^\[==========\] .*: \([0-9]*\) test(s) run, [0-9]* failed\.$/\1/p' "$out/$name.log" | tail -n 1)
        [ -z "$all" ] || good=$((all - ${bad:-0}))
        unclean=$(sed -n 's/^\[  ERROR   \] \([a-z_0-9]*\)$/\1/p' "$out/$name.log" | sort -u | wc -l)
        bad=$((${bad:-0} + unclean))
        skipped=$(sed -n 's/^\[  SKIPPED \] \([a-z_0-9]*\)$/\1/p' "$out/$name.log" | sort -u | paste -sd' ')
        remark="${seconds:-?} s${skipped:+, skipped: $skipped}"
        case ${status:-none} in
            0) ;;
            124) remark="$remark, stopped after $limit s"; bad=$((${bad:-0} + 1)) ;;
            9) if grep -q '^=========' "$out/$name.log"; then
                   remark="$remark, the sanitizer found errors"; bad=$((${bad:-0} + 1))
               fi ;;
            *) [ "${bad:-0}" -gt 0 ] || { remark="$remark, died with status ${status:-none}"; bad=1; } ;;
        esac
        [ "${status:-1}" -eq 0 ] || [ "${bad:-0}" -gt 0 ] || bad=1
        if grep -q '^no case of ' "$out/$name.log"; then    # ESA_TEST_CASE matches nothing
            remark="$remark, $(grep -m 1 '^no case of ' "$out/$name.log")"
            [ "${bad:-0}" -gt 0 ] || bad=1
        fi
        note "$name" "${good:-0}" "${bad:-0}" "$remark"
        if [ "${bad:-0}" -gt 0 ]; then
            grep -nE 'WRONG|FAILED|LINE  |ERROR|on_gpu:|differ|=========|Error|rows wrong|instead of' "$out/$name.log" |
                head -n 30
        fi
    done
    names=()
    pids=()
}

# ---- the one list of programs that run on a GPU (cmake/EsaTests.cmake), one process each
[ -s "$folder/tests/gpu_tests.txt" ] || { echo "test-cuda.sh: $folder/tests/gpu_tests.txt is missing" >&2; exit 1; }
while read -r name; do
    start "$name" ESA_TEST_DEVICE=cuda timeout "$limit" "$folder/tests/$name"
done <"$folder/tests/gpu_tests.txt"
levels=(sm80)                       # those below sm90a that the GPU has: 8 bits have other kernels there
case $gpu in *"capability 8.9,"* | *"capability 9."* | *"capability 12."*) levels+=(sm89) ;; esac
for name in test_eight_bit test_gpu_eight_bit; do
    for level in "${levels[@]}"; do
        start "$name-$level" ESA_CUDA="$level" ESA_TEST_DEVICE=cuda timeout "$limit" "$folder/tests/$name"
    done
done
case " ${levels[*]} " in *" sm89 "*)    # a carry in 8 bits; test_carry has those of sm90a and sm80
    start test_carry-sm89 ESA_CUDA=sm89 ESA_TEST_DEVICE=cuda ESA_TEST_CASE='carry/*eight*' \
        timeout "$limit" "$folder/tests/test_carry" ;;
esac
for program in "$folder"/tests/test_*_gpu; do       # of the engine, if it was built: model/ and golden files
    case $program in */test_no_gpu) continue ;; esac        # it comes below, without the plugin
    [ -x "$program" ] && start "$(basename "$program")" ESA_TEST_GOLDEN="$here/tests/golden" \
        ESA_TEST_MODELS="$here/models" timeout "$limit" "$program"
done
start test_no_gpu ESA_CUDA_LIB= timeout "$limit" "$folder/tests/test_no_gpu"
collect
note "esa doctor" $((doctor == 0)) $((doctor != 0))
[ "$doctor" -eq 0 ] || cat "$out/doctor.log"

# ---- the command, and what only torch can show
start bench_attention timeout "$limit" "${esa[@]}" bench attention --device cuda --shape 1,4,4096,128 \
    --dtype bf16,f16,f32 --selector random,entropy,rf_v2,ada_bsa --grid 16,16,16 --tail none,pooled --density 1,0.2 \
    --rounds 3 --json "$out/bench_attention.json"
start bench_error timeout "$limit" "${esa[@]}" bench attention --device cuda --shape 1,4,4096,128 \
    --dtype bf16,f16,f32 --selector error --order adaptive --grid 16,16,16 --tail none,pooled,levels --density 1,0.2 \
    --rounds 3 --json "$out/bench_error.json"
wait "${pids[@]}" 2>/dev/null
for name in bench_attention bench_error; do
    if [ "$(sed -n 's/^status \([0-9]*\) .*/\1/p' "$out/$name.log")" = 0 ]; then note "esa ${name/_/ }" 1 0
    else note "esa ${name/_/ }" 0 1; tail -n 5 "$out/$name.log"; fi
done
names=()
pids=()
if python3 -c 'import torch' 2>/dev/null; then
    start check_torch timeout "$limit" python3 "$here/tests/cuda/check_torch.py" "$folder/libesa.so"
    collect                         # alone on the GPU: the next program looks at the memory of the whole GPU
    start check_python timeout "$limit" python3 "$here/tests/cuda/check_python.py" "$folder/libesa.so"
    collect
    if python3 -c 'import diffusers' 2>/dev/null; then
        start check_models timeout "$limit" python3 "$here/tests/cuda/check_models.py" "$folder/libesa.so"
        collect
    else
        echo "---- check_models: not run, python3 has no diffusers"
    fi
else
    echo "---- check_torch: not run, python3 has no torch"
fi

# ---- compute-sanitizer, on few and small cases; tight: nothing lies behind a tensor, so it sees reads past the end
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
watch() {   # watch TOOL PROGRAM [VARIABLE=value...]; label: what is added to the name of the log
    local tool=$1 program=$2; shift 2
    start "$tool-$program${label:-}" ESA_TEST_DEVICE=cuda ESA_TEST_SMALL=1 ESA_TEST_TIGHT=1 "$@" timeout "$limit" \
        "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 20 \
        ${api_errors:+--report-api-errors "$api_errors"} "$folder/tests/$program"
}
if [ -z "$sanitizer" ] || [ -n "${ESA_TEST_NO_SANITIZER:-}" ]; then
    echo "---- compute-sanitizer: not run"
else
    # The slowest come first.
    watch racecheck test_gpu_order
    watch racecheck test_gpu_select
    for tool in racecheck memcheck synccheck; do
        api_errors=no watch "$tool" test_gpu_products    # cuBLASLt tries calls that some GPUs refuse
    done
    # Of the programs that run tests/cases/attention.def, the cases of the size of the kernels' tiles.
    cases=(test_attention test_gpu_eight_bit test_levels test_exact_rows test_carry)
    tiles='ESA_TEST_CASE=*/tiles/*,*_short,*_tiles,names,no_growth'
    for name in "${cases[@]}"; do
        watch memcheck "$name" "$tiles"
    done
    for name in test_gpu_sm80_8bit test_gpu_select test_gpu_order test_gpu_session test_gpu_rows test_gpu_latents \
                test_gpu_biased test_gpu_planes test_plan test_golden; do
        watch memcheck "$name"
    done
    for level in "${levels[@]}"; do
        label=-$level watch memcheck test_gpu_eight_bit ESA_CUDA="$level"
    done
    case " ${levels[*]} " in *" sm89 "*) label=-sm89 watch racecheck test_gpu_eight_bit ESA_CUDA=sm89 ;; esac
    for name in test_gpu_calls test_gpu_transfer; do    # they ask for more memory than there is, and expect the refusal
        api_errors=no watch memcheck "$name"
    done
    for name in "${cases[@]}"; do
        watch racecheck "$name" "$tiles" ESA_CUDA=sm80
        case $gpu in *"sm90a kernels"*) watch synccheck "$name" "$tiles" ESA_CUDA=sm90a ;; esac
    done
    for name in test_gpu_rows test_gpu_latents test_gpu_biased test_gpu_planes; do
        watch racecheck "$name" ESA_CUDA=sm80
        watch synccheck "$name"
        watch initcheck "$name"
    done
    watch initcheck test_gpu_order
    watch initcheck test_carry "$tiles"
    watch synccheck test_gpu_order
    collect
fi

{
    echo "# Last run of \`make test-cuda\`"
    echo
    echo "Commit $("${esa[@]}" --version 2>/dev/null), $(date -u +%Y-%m-%d), $gpu."
    echo
    echo "| stage | passed | failed | remark |"
    echo "|---|---|---|---|"
    printf '%s\n' "${table[@]}"
    echo
    echo "$passed passed, $failed failed"
} >"$out/result.md"
[ ! -d "$here/docs/results" ] || cp "$out/result.md" "$here/docs/results/test-cuda.md"
printf '%d passed, %d failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ]
