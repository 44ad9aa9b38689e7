#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the release wheel, into dist/: libesa, the esa command and the CUDA plugin for glibc 2.28 and
# newer. Variables: ESA_CUDA=AUTO (default: the plugin, if nvcc is found), ON or OFF; CUDACXX, the nvcc; JOBS. nvcc 13
# gives a plugin for drivers from 580 on, nvcc 12 one for drivers from 525 on. auditwheel checks the result.
set -euo pipefail
cd "$(dirname "$0")/.."
platform=manylinux_2_28_x86_64
limit=40                            # MB
[ "$(uname -m)" = x86_64 ] || { echo "wheel.sh: builds for x86_64, this machine is $(uname -m)" >&2; exit 1; }
cuda=${ESA_CUDA:-AUTO}
if [ "$cuda" = AUTO ] && [ -z "${CUDACXX:-}" ] && ! command -v nvcc >/dev/null; then
    echo "note: nvcc was not found, the wheel has no CUDA plugin"
    cuda=OFF
fi
[ "$cuda" = OFF ] || cuda=ON
ESA_WHEEL_PYTHON=$(scripts/python-env.sh scripts/requirements-wheel.txt)
export ESA_WHEEL_PYTHON PATH=${ESA_WHEEL_PYTHON%/*}:$PATH
export CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-2}
folder=build-wheel
rm -rf $folder/raw $folder/repaired $folder/raw-again $folder/again
# The times in the zip file are those of the commit, so that two builds of one commit are equal.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 315532800)}

# gcc compiles and zig links (scripts/wheel-cc.sh). Nothing of this machine's libraries may be needed at run time, so
# jansson is linked into the command, and the engine, which needs several, stays out.
defines=(
    CMAKE_C_COMPILER="$PWD/scripts/wheel-cc.sh" ESA_CUDA_LINKER="$PWD/scripts/wheel-cc.sh"
    CMAKE_LINK_DEPENDS_USE_LINKER=OFF ESA_STATIC_JANSSON=ON ESA_VIDEO=OFF ESA_CUDA="$cuda" "ESA_CUDA_MORE=100;120"
    ESA_LINKER_RUNTIME=zig ESA_LINKER_VERSION="$("$ESA_WHEEL_PYTHON" -m ziglang version)"
)
launcher=$(command -v ccache || true)
[ -z "$launcher" ] || defines+=(CMAKE_C_COMPILER_LAUNCHER="$launcher" CMAKE_CUDA_COMPILER_LAUNCHER="$launcher")
pack() {    # pack RAW REPAIRED: builds what is not built yet, and packs it
    mkdir -p "$1"
    "$ESA_WHEEL_PYTHON" -m pip wheel . --quiet --disable-pip-version-check --no-build-isolation --no-deps \
        --wheel-dir "$1" -Cbuild-dir=$folder/cmake "${defines[@]/#/-Ccmake.define.}"
    "$ESA_WHEEL_PYTHON" -m auditwheel repair --plat $platform --only-plat --wheel-dir "$2" "$1"/*.whl \
        >$folder/auditwheel.log 2>&1 || { cat $folder/auditwheel.log >&2; exit 1; }
}
pack $folder/raw $folder/repaired
pack $folder/raw-again $folder/again
wheel=$(ls $folder/repaired/*.whl)
cmp "$wheel" $folder/again/*.whl || { echo "wheel.sh: packed twice, the wheel differs" >&2; exit 1; }
"$ESA_WHEEL_PYTHON" -m auditwheel show "$wheel"
parts=$("$ESA_WHEEL_PYTHON" -m zipfile -l "$wheel")
for part in esa/lib/libesa.so esa/bin/esa; do
    grep -q "$part" <<<"$parts" || { echo "wheel.sh: $part is missing in $wheel" >&2; exit 1; }
done
for check in check_elf.py:--packed "check_notices.py:$PWD"; do
    rm -rf $folder/files
    "$ESA_WHEEL_PYTHON" -m zipfile -e "$wheel" $folder/files
    "$ESA_WHEEL_PYTHON" "tests/install/${check%%:*}" "${check#*:}" $folder/files
done
[ "$cuda" = OFF ] || grep -q esa/lib/libesa_cuda.so <<<"$parts" ||
    { echo "wheel.sh: the CUDA plugin is missing in $wheel" >&2; exit 1; }
bytes=$(stat -c %s "$wheel")
[ "$bytes" -lt $((limit * 1000000)) ] || { echo "wheel.sh: $wheel has $bytes bytes, at most $limit MB" >&2; exit 1; }
rm -rf dist
mv $folder/repaired dist
echo "dist/${wheel##*/}, $((bytes / 1000)) kB, CUDA plugin: ${cuda/ON/yes}"
