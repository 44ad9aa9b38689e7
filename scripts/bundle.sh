#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Packs what a machine without package installs needs: the command, libesa, its CUDA plugin (where nvcc is found), the
# tests, examples and benchmarks, and the shared libraries they load (cmocka, the CBLAS of this machine). Every binary
# finds its libraries relative to itself.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin          # ldconfig is not in the PATH of a Debian user
cd "$(dirname "$0")/.."
build=build-cuda
cmake --preset release -B $build -DESA_CUDA=AUTO >/dev/null
cmake --build $build -j "${JOBS:-2}" >/dev/null
rm -rf bundle
mkdir -p bundle/tests/cuda bundle/examples bundle/lib bundle/bench
cp -a $build/esa $build/libesa*.so* bundle/
[ -f bundle/libesa_cuda.so ] || echo "note: no nvcc, the bundle has no CUDA plugin"
# The core library's tests. The engine's tests need FFmpeg and more, and so a machine with packages.
while read -r name; do cp "$build/tests/$name" bundle/tests/; done <$build/tests/core_tests.txt
cp $build/tests/gpu_tests.txt bundle/tests/
cp $build/tests/libesa_stand_in.so $build/tests/libesa_other_abi.so bundle/tests/
find $build/examples -maxdepth 1 -type f -perm -u+x -name 'example_*' -exec cp {} bundle/examples/ \;
cp tests/cuda/check_torch.py tests/cuda/check_python.py tests/cuda/check_models.py bundle/tests/cuda/
mkdir -p bundle/tests/python
cp tests/python/minis.py tests/python/model_minis.py bundle/tests/python/
cp bench/*.py bench/shapes.def $build/bench/session_overhead bundle/bench/
# The Python package, read from where it stands; it finds the library beside its folder.
mkdir -p bundle/python
cp -r python/esa bundle/python/
find bundle/python -name __pycache__ -prune -exec rm -rf {} +
cp scripts/test-cuda.sh README.md LICENSE $build/generated/THIRD-PARTY.txt $build/generated/esa.cdx.json bundle/
bundle/esa --version | sed -n 's/.*(\(.*\)).*/\1/p' >bundle/COMMIT

# Shared libraries outside glibc: what ldd names, plus the CBLAS that the command opens at run time. Each brings along
# its copyright file, which the package that it is from has put on this machine.
mkdir -p bundle/licenses
bring() {
    local package file=$1 name=${1##*/}
    cp -L "$file" bundle/lib/
    file=$(realpath "$file")
    package=$({ dpkg-query -S "$file" || dpkg-query -S "*/${file##*/}"; } 2>/dev/null | sed -n '1s/:.*//p') || true
    cp -L "/usr/share/doc/${package:-unknown}/copyright" "bundle/licenses/$name.copyright" 2>/dev/null ||
        { echo "bundle.sh: found no copyright file of $name, which must travel with it" >&2; exit 1; }
}
libraries=$(ldconfig -p 2>/dev/null) || true
blas=$(sed -n 's/.*libopenblas\.so\.0 .*=> //p' <<<"$libraries")
blas=${blas%%$'\n'*}
{ find bundle/tests bundle/esa -type f -exec ldd {} \; ; [ -z "$blas" ] || ldd "$blas"; } 2>/dev/null |
    sed -n 's/.*=> \(\/[^ ]*\) .*/\1/p' | sort -u |
    grep -vE '/(libc|libm|libdl|libpthread|librt|ld-linux[^/]*|libesa[^/]*)\.so' |
    while read -r library; do bring "$library"; done
[ -z "$blas" ] || bring "$blas"
if ldd bundle/tests/test_attention | grep -q cmocka && ! ls bundle/lib/libcmocka* >/dev/null 2>&1; then
    echo "bundle.sh: cmocka did not get into the bundle" >&2
    exit 1
fi

cat >bundle/run-tests.sh <<'INNER'
#!/bin/sh
# Runs every test program of the bundle on the CPU and names those that failed. "run-tests.sh cuda" runs those of
# tests/gpu_tests.txt on the GPU, with compute-sanitizer.
here=$(cd "$(dirname "$0")" && pwd)
if [ "${1:-}" = cuda ]; then exec "$here/test-cuda.sh" "$here"; fi
export LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
passed=0; failed=0
for t in "$here"/tests/test_* "$here"/examples/example_*; do
    case "$t" in */test_gpu_*) continue ;; esac
    if out=$("$t" 2>&1); then passed=$((passed + 1)); continue; fi
    failed=$((failed + 1))
    echo "FAILED $t"
    echo "$out" | tail -n 20
done
echo "$passed passed, $failed failed"
[ ! -f "$here/libesa_cuda.so" ] || echo "the tests on a GPU: $0 cuda; its speed: python3 $here/bench/gpu.py"
[ "$failed" -eq 0 ]
INNER
cat >bundle/run.sh <<'INNER'
#!/bin/sh
# The esa command with the bundle's libraries: ./run.sh bench attention ...
here=$(cd "$(dirname "$0")" && pwd)
LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" exec "$here/esa" "$@"
INNER
chmod +x bundle/run-tests.sh bundle/run.sh
python3 tests/install/check_elf.py --packed --foreign lib bundle
name=esa-$(bundle/esa --version | awk '{print $2}')-linux-$(uname -m)
tar -czf "$name.tar.gz" --transform "s,^bundle,$name," bundle
echo "bundle/ and $name.tar.gz ($(du -h "$name.tar.gz" | cut -f1))"
