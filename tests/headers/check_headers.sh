#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every public header compiles alone, twice in a row, as C11 and as C++17, with gcc and clang, without a warning;
# with and without the experimental tier. check_headers.sh SOURCE_DIR
set -euo pipefail
source=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags="-Wall -Wextra -Wpedantic -Werror -fsyntax-only -I$source/include"
checked=0
for header in "$source"/include/esa/*.h; do
    name=esa/$(basename "$header")
    printf '#include <%s>\n#include <%s>\ntypedef int alone;\n' "$name" "$name" >"$work/alone.c"
    cp "$work/alone.c" "$work/alone.cc"
    for define in "" -DESA_EXPERIMENTAL; do
        for compiler in gcc clang; do $compiler -std=c11 $flags $define "$work/alone.c"; done
        for compiler in g++ clang++; do $compiler -std=c++17 $flags $define "$work/alone.cc"; done
        checked=$((checked + 4))
    done
done
[ "$checked" -ge 32 ] || { echo "only $checked compilations: headers are missing" >&2; exit 1; }
# esa.h is the manual: it must stay short enough to be read.
lines=$(wc -l <"$source/include/esa/esa.h")
[ "$lines" -lt 700 ] || { echo "esa.h has $lines lines, expected fewer than 700" >&2; exit 1; }
# Public structs hold fixed-width fields only.
if grep -nE '\b(bool|size_t|long|unsigned|int)\b +[a-z_]+(\[[^]]*\])?;' "$source"/include/esa/*.h; then
    echo "a public struct has a field without a fixed width" >&2
    exit 1
fi
echo "$checked compilations"
