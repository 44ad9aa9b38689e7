#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The published CPU measurements, each a command anyone can repeat. Tables on stdout, JSON in build/bench/.
set -euo pipefail
cd "$(dirname "$0")/.."
out=build/bench
mkdir -p "$out"

run() {     # run NAME arguments...: one table
    local name=$1; shift
    printf '\n## %s: esa bench attention %s\n' "$name" "$*"
    build/esa bench attention "$@" --json "$out/$name.json"
}

# Dense and sparse speed beside sgemm, then the short types beside f32 in the same rounds.
run d128 --selector random --shape 1,4,4096,128 --density 1,0.5,0.2,0.1 --rounds 25
run d64 --selector random --shape 1,4,4096,64 --density 1,0.5,0.2,0.1 --rounds 25
run dtypes --selector random --shape 1,4,4096,128 --dtype f32,bf16,f16 --density 1,0.2 --rounds 15
# The cost of the tail.
run tails --selector random --shape 1,4,4096,128 --tail none,pooled,centroid --density 1,0.2 --rounds 15
# Selection as a share of dense time, N = 16384.
run select --shape 1,4,16384,128 --grid 16,32,32 --selector entropy,rf_v2,ada_bsa --density 1,0.2 --rounds 15
# Memory beyond inputs and outputs at the largest Wan shape; it hardly depends on the density.
run memory --selector random --shape wan-1.3b-720p --density 0.02 --rounds 1
# Microseconds per session call with almost nothing to compute.
printf '\n## session overhead\n'
build/bench/session_overhead
