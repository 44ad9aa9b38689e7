#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# libesa_video exports what esa_video.h declares and nothing else: neither libesa's calls nor those of the libraries it
# uses. check_video_symbols.sh SOURCE_DIR LIBRARY
set -euo pipefail
source=$1
library=$2
exported=$(nm -D --defined-only "$library" | awk '{print $3}' | sort -u)
names() {   # names HEADER...: the public functions that these headers declare
    printf '#include <esa/%s>\n' "$@" | cc -std=c11 -E -P -I"$source/include" -x c - | tr '\n' ' ' | tr ';' '\n' |
        grep 'visibility("default")' | sed -E 's/.*[ *](esa_[a-z0-9_]+) *\(.*/\1/' | sort -u
}
declared=$(comm -23 <(names esa_video.h) <(names esa.h esa_session.h))
[ "$(wc -l <<<"$declared")" -ge 12 ] || { echo "only these declarations were found: $declared" >&2; exit 1; }
difference=$(diff <(printf '%s\n' "$declared") <(printf '%s\n' "$exported") || true)
[ -z "$difference" ] || { printf 'declared (<) and exported (>) differ:\n%s\n' "$difference" >&2; exit 1; }
echo "$(wc -l <<<"$exported") symbols"
