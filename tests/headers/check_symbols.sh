#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_symbols.sh SOURCE_DIR LIBRARY COMMAND
# The shared library exports exactly the functions that the public headers declare and those that src/base/engine.h
# marks for the engine, all named esa_. It needs only libc, libm, libdl and pthread. The command needs no BLAS to start.
set -euo pipefail
source=$1
library=$2
command=$3
exported=$(nm -D --defined-only "$library" | awk '{print $3}' | sort -u)
foreign=$(grep -v '^esa_' <<<"$exported" || true)
[ -z "$foreign" ] || { echo "exported without the prefix esa_: $foreign" >&2; exit 1; }
# The preprocessor, not a pattern, decides what is declared: ESA_API becomes a mark.
# esa_video.h and esa_frames.h belong to libesa_video.
declared=$(for h in "$source"/include/esa/*.h; do
    case "$(basename "$h")" in esa_video.h|esa_frames.h) continue ;; esac
    { echo '#define ESA_EXPERIMENTAL'; echo "#include <esa/$(basename "$h")>"; } |
        cc -std=c11 -E -P -I"$source/include" -x c - ; done | tr '\n' ' ' | tr ';' '\n' |
    grep 'visibility("default")' | sed -E 's/.*[ *](esa_[a-z0-9_]+) *\(.*/\1/' | sort -u)
engine=$(sed -nE 's/^ESA_ENGINE .*[ *](esa_[a-z0-9_]+)\(.*/\1/p' "$source"/src/*/*.h | sort -u)
[ "$(wc -l <<<"$engine")" -ge 20 ] || { echo "only these marks for the engine were found: $engine" >&2; exit 1; }
declared=$(sort -u <<<"$declared"$'\n'"$engine")
missing=$(comm -13 <(printf '%s\n' "$exported") <(printf '%s\n' "$declared"))
hidden=$(comm -23 <(printf '%s\n' "$exported") <(printf '%s\n' "$declared"))
[ "$(wc -l <<<"$declared")" -ge 50 ] || { echo "only these declarations were found: $declared" >&2; exit 1; }
[ -z "$missing" ] || { echo "declared in a header but not exported: $missing" >&2; exit 1; }
[ -z "$hidden" ] || { echo "exported, but neither public nor marked for the engine: $hidden" >&2; exit 1; }
needed=$(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
    grep -vE '^(libc|libm|libdl|libpthread|ld-linux.*)\.so' || true)
[ -z "$needed" ] || { echo "the library needs more than libc, libm, libdl, pthread: $needed" >&2; exit 1; }
if readelf -d "$command" | grep -E 'NEEDED.*(blas|mkl)'; then echo "the command links to a BLAS" >&2; exit 1; fi
echo "$(wc -l <<<"$exported") symbols"
