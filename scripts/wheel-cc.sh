#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The compiler of `make wheel`: gcc compiles, as in every other build, and zig links, because it knows the symbols of
# every glibc and so makes files for an old one. A symbol that the old glibc lacks is an error of the linker.
# $ESA_WHEEL_PYTHON has the package ziglang, $ESA_WHEEL_GLIBC is the version (2.28), $ESA_WHEEL_GCC the compiler (gcc).
#   only objects and libraries          zig
#   -c, -E, -S, a source, a question    gcc
set -euo pipefail
gcc=${ESA_WHEEL_GCC:-gcc}
objects=no
for word in "$@"; do
    case "$word" in
        -c|-E|-S|-M|-MM|-x|*.c|*.cc|*.cpp|*.ii|*.i) exec "$gcc" "$@" ;;
        *.o) objects=yes ;;
    esac
done
[ $objects = yes ] || exec "$gcc" "$@"

# What zig calls otherwise: binding inside the library, and gcc's runtimes, in whose place it links its own, statically.
# Read-only tables, early binding and a stack without code are what it does anyway.
# Code of nvcc needs the one of C++.
language=cc
words=()
for word in "$@"; do
    case "$word" in
        -lcudart_static) language=c++; words+=("$word") ;;
        -Wl,-Bsymbolic-functions) words+=(-Wl,-Bsymbolic) ;;
        -static-libstdc++|-static-libgcc) ;;
        -Wl,-z,relro,-z,now,-z,noexecstack) ;;
        *) words+=("$word") ;;
    esac
done
exec "$ESA_WHEEL_PYTHON" -m ziglang $language -target "x86_64-linux-gnu.${ESA_WHEEL_GLIBC:-2.28}" "${words[@]}"
