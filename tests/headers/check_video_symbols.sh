#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_video_symbols.sh SOURCE_DIR LIBRARY
# libesa_video exports what esa_video.h declares, under a version of its own, and nothing else. It holds no copy of
# libesa: it needs libesa, and every function that src/base/engine.h marks is one it uses.
set -euo pipefail
source=$1
library=$2
node=ESA_VIDEO_$(sed -n 's/#define ESA_API_VERSION //p' "$source/include/esa/version.h")
exported=$(nm -D --defined-only "$library" | awk '$2 != "A" {print $3}' | sort -u)
names() {   # names HEADER...: the public functions that these headers declare
    printf '#include <esa/%s>\n' "$@" | cc -std=c11 -E -P -I"$source/include" -x c - | tr '\n' ' ' | tr ';' '\n' |
        grep 'visibility("default")' | sed -E 's/.*[ *](esa_[a-z0-9_]+) *\(.*/\1/' | sort -u
}
declared=$(comm -23 <(names esa_video.h) <(names esa.h esa_session.h))
[ "$(wc -l <<<"$declared")" -ge 12 ] || { echo "only these declarations were found: $declared" >&2; exit 1; }
difference=$(diff <(sed "s/\$/@@$node/" <<<"$declared" | sort -u) <(printf '%s\n' "$exported") || true)
[ -z "$difference" ] || { printf 'declared (<) and exported (>) differ:\n%s\n' "$difference" >&2; exit 1; }
readelf -d "$library" | grep -qE 'NEEDED.*\[libesa\.so' || { echo "libesa_video does not link libesa" >&2; exit 1; }
used=$(nm -D --undefined-only "$library" | awk '{print $2}' | sed -n 's/^\(esa_.*\)@ESA_PRIVATE$/\1/p' | sort -u)
marked=$(sed -nE 's/^ESA_ENGINE .*[ *](esa_[a-z0-9_]+)\(.*/\1/p' "$source"/src/*/*.h | sort -u)
stale=$(comm -23 <(printf '%s\n' "$marked") <(printf '%s\n' "$used"))
[ -z "$stale" ] || { echo "marked for the engine, which does not use them: $stale" >&2; exit 1; }
echo "$(wc -l <<<"$exported") symbols"
