#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_symbols.sh SOURCE_DIR LIBRARY COMMAND
# The shared library exports exactly the functions that the public headers declare and those that src/base/engine.h
# marks for the engine, all named esa_: the first under the version of the API, the second under ESA_PRIVATE. It needs
# only libc, libm, libdl and pthread. The command needs no BLAS to start, and no function under ESA_PRIVATE.
set -euo pipefail
source=$1
library=$2
command=$3
node=ESA_$(sed -n 's/#define ESA_API_VERSION //p' "$source/include/esa/version.h")
exported=$(nm -D --defined-only "$library" | awk '$2 != "A" {print $3}' | sort -u)     # A: the versions themselves
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
[ "$(wc -l <<<"$declared")" -ge 50 ] || { echo "only these declarations were found: $declared" >&2; exit 1; }
versioned=$({ sed "s/\$/@@$node/" <<<"$declared"; sed 's/$/@@ESA_PRIVATE/' <<<"$engine"; } | sort -u)
difference=$(diff <(printf '%s\n' "$versioned") <(printf '%s\n' "$exported") || true)
[ -z "$difference" ] || { printf 'declared (<) and exported (>) differ:\n%s\n' "$difference" >&2; exit 1; }
private=$(nm -D --undefined-only "$command" | grep '@ESA_PRIVATE' || true)
[ -z "$private" ] || { echo "the command uses private functions: $private" >&2; exit 1; }
needed=$(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
    grep -vE '^(libc|libm|libdl|libpthread|ld-linux.*)\.so' || true)
[ -z "$needed" ] || { echo "the library needs more than libc, libm, libdl, pthread: $needed" >&2; exit 1; }
if readelf -d "$command" | grep -E 'NEEDED.*(blas|mkl)'; then echo "the command links to a BLAS" >&2; exit 1; fi
echo "$(wc -l <<<"$exported") symbols"
