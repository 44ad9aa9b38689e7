#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts every preset through srun at once, each with a GPU of its own, with a log in experiments/logs/<tag>.log. Waits
# for all of them, says how each ended, and fails if one did. Started again, it leaves out what is complete.
#
#   experiments/launch_all.sh [PRESETS]         a file like experiments/presets.txt (the default)
#
# From the environment: ESA, the command (build/esa, else the one in the PATH); RESULTS, the results folder (results);
# SRUN_OPTIONS, more options of srun, e.g. SRUN_OPTIONS="--partition=a100 --account=video", which override those below.
set -uo pipefail
cd "$(dirname "$0")/.."
case $PWD in */compat) cd .. ;; esac     # called by its real path, compat/experiments/launch_all.sh
presets=${1:-experiments/presets.txt}
results=${RESULTS:-results}
logs=experiments/logs

die() { echo "launch_all.sh: $*" >&2; exit 1; }
[ $# -le 1 ] || die "expected at most one word, a file of presets, but was given $#"
command -v srun >/dev/null || die "srun was not found; is this a machine with Slurm?"
[ -r "$presets" ] || die "cannot read '$presets'"
esa=${ESA:-}
[ -n "$esa" ] || { [ -x build/esa ] && esa=build/esa; } || esa=$(command -v esa) ||
    die "no esa: build it (make), or say where it is (ESA=...)"
[ -x "$(command -v "$esa")" ] || die "'$esa' cannot be run"
mkdir -p "$logs" || die "cannot make $logs"

tags=() pids=()
trap 'kill ${pids[@]+"${pids[@]}"} 2>/dev/null; wait; exit 130' INT TERM
while read -r tag rest || [ -n "$tag" ]; do
    case "$tag" in ''|'#'*) continue ;; esac
    for other in ${tags[@]+"${tags[@]}"}; do
        [ "$other" != "$tag" ] || die "'$presets' names $tag twice; two jobs would work in one folder"
    done
    read -r -a options <<<"$rest"
    # shellcheck disable=SC2086 -- SRUN_OPTIONS are several words
    srun --job-name="esa-$tag" --ntasks=1 --gres=gpu:1 --cpus-per-task=8 --mem=64G --time=6:00:00 ${SRUN_OPTIONS:-} \
        "$esa" experiment run ${options[@]+"${options[@]}"} --tag "$tag" --results "$results" \
        </dev/null >"$logs/$tag.log" 2>&1 &
    pids+=($!)
    tags+=("$tag")
    echo "$tag: started, log in $logs/$tag.log"
done <"$presets"
[ ${#tags[@]} -gt 0 ] || die "'$presets' holds no presets"
echo "squeue -u $(id -un) shows them; tail -f $logs/*.log follows them"

failed=0
for i in "${!tags[@]}"; do
    if wait "${pids[$i]}"; then echo "${tags[$i]}: done, results in $results/${tags[$i]}"
    else
        echo "${tags[$i]}: FAILED: $(tail -n 1 "$logs/${tags[$i]}.log")"
        failed=$((failed + 1))
    fi
done
[ "$failed" -eq 0 ] || die "$failed of ${#tags[@]} failed; started again, they go on where they were"
