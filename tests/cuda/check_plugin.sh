#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# libesa_cuda exports one function, needs only the C library, answers as cuda.h says with and without a GPU, and holds
# the machine code it promises. check_plugin.sh SOURCE_DIR PLUGIN
set -euo pipefail
source=$1
plugin=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

exported=$(nm -D --defined-only "$plugin" | awk '{print $3}')
[ "$exported" = esa_cuda_entry ] || { echo "exported beside or instead of esa_cuda_entry: $exported" >&2; exit 1; }
foreign=$(nm -D --undefined-only "$plugin" | awk '{print $2}' | grep -E '^(esa_|cuda|cu[A-Z]|_Z)' || true)
[ -z "$foreign" ] || { echo "looked up outside the plugin: $foreign" >&2; exit 1; }
needed=$(readelf -d "$plugin" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
    grep -vE '^(libc|libm|libdl|libpthread|librt|ld-linux.*)\.so' || true)
[ -z "$needed" ] || { echo "the plugin needs more than libc, libm, libdl, libpthread, librt: $needed" >&2; exit 1; }

# One binary for sm_80, Hopper's own instructions, and PTX for every newer GPU.
if command -v cuobjdump >/dev/null; then
    held=$(cuobjdump --list-elf --list-ptx "$plugin" | grep -oE 'sm_[0-9]+a?\.(cubin|ptx)' | sort -u | paste -sd' ')
    for wanted in sm_80.cubin sm_90a.cubin sm_80.ptx; do
        [[ " $held " == *" $wanted "* ]] || { echo "the plugin holds $held, $wanted is missing" >&2; exit 1; }
    done
fi

cc -std=c11 -D_GNU_SOURCE -Wall -Wextra -Werror -I"$source/include" -I"$source/src" \
    -I"$(dirname "$plugin")/generated" "$source/tests/cuda/use_plugin.c" -o "$work/use_plugin" -ldl
"$work/use_plugin" "$plugin"
CUDA_VISIBLE_DEVICES= "$work/use_plugin" "$plugin"      # a GPU that is hidden is no GPU

# An old driver is refused in one sentence that says which one will do.
cc -shared -fPIC -Wall -Wextra -Werror "$source/tests/cuda/old_driver.c" -o "$work/libcuda.so.1"
said=$(LD_LIBRARY_PATH=$work "$work/use_plugin" "$plugin")
wanted='^no GPU: the NVIDIA driver is too old: it supports CUDA 11\.4, and libesa_cuda, built with '
wanted+='CUDA 1[0-9]\.[0-9]+, needs driver 5[0-9]+ or newer$'
[[ $said =~ $wanted ]] || { echo "with an old driver the plugin said: $said" >&2; exit 1; }
echo "$(stat -Lc %s "$plugin") bytes"
