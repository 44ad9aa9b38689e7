#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs into a temporary prefix, moves it, builds a small program outside the tree with pkg-config (shared, static)
# and with find_package, and runs each of them and the installed command. check_install.sh SOURCE_DIR BUILD_DIR
set -euo pipefail
source=$1
build=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$build" --prefix "$work/first" >/dev/null
mv "$work/first" "$work/prefix"         # an installed tree may be moved
prefix=$work/prefix
python3 "$source/tests/install/check_elf.py" --packed "$prefix"
python3 "$source/tests/install/check_notices.py" "$source" "$prefix"
pc=$(find "$prefix" -name esa.pc)
export PKG_CONFIG_PATH=$(dirname "$pc")
libdir=$(dirname "$PKG_CONFIG_PATH")
version=$(sed -n 's/#define ESA_VERSION_[A-Z]* //p' "$source/include/esa/version.h" | paste -sd.)
said=$(pkg-config --modversion esa)
[ "$said" = "$version" ] || { echo "pkg-config says $said, expected $version" >&2; exit 1; }

cc -std=c11 -Wall -Werror "$source/tests/install/use.c" -o "$work/by_pc" $(pkg-config --cflags --libs esa) -lm
LD_LIBRARY_PATH=$libdir "$work/by_pc"
cc -std=c11 -Wall -Werror "$source/tests/install/use.c" -o "$work/by_pc_static" $(pkg-config --cflags esa) \
    "$libdir/libesa.a" $(pkg-config --libs-only-l --static esa | sed 's/-lesa//')
"$work/by_pc_static"

cmake -S "$source/tests/install" -B "$work/build" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build "$work/build" >/dev/null
"$work/build/use_shared"
"$work/build/use_static"

api=$(sed -n 's/#define ESA_API_VERSION //p' "$source/include/esa/version.h")
[ "$(readelf -d "$libdir/libesa.so" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')" = "libesa.so.$api" ]
"$prefix/bin/esa" --version             # finds its library without LD_LIBRARY_PATH
if [ -e "$libdir/libesa_video.so" ]; then      # and the engine, and the model that comes with it
    env -u ESA_MODELS "$prefix/bin/esa" generate --check
    cc -std=c11 -Wall -Werror "$source/tests/install/use_video.c" -o "$work/video_by_pc" \
        $(pkg-config --cflags --libs esa_video)
    LD_LIBRARY_PATH=$libdir "$work/video_by_pc" "$work/a.png"
    [ -s "$work/a.png" ]
fi
