#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Collects what a machine without package installs needs: the command, libesa, the tests and examples, and the shared
# libraries they load (cmocka, the CBLAS of this machine). Every binary finds its libraries relative to itself.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin          # ldconfig: not in the PATH of a Debian user
cd "$(dirname "$0")/.."
cmake --preset release >/dev/null
cmake --build build -j "${JOBS:-2}" >/dev/null
rm -rf bundle
mkdir -p bundle/tests bundle/examples bundle/lib
cp -a build/esa build/libesa.so* bundle/
find build/tests -maxdepth 1 -type f -perm -u+x -exec cp {} bundle/tests/ \;
find build/examples -maxdepth 1 -type f -perm -u+x -name 'example_*' -exec cp {} bundle/examples/ \;
cp README.md LICENSE bundle/

# Shared libraries outside glibc: what ldd names, plus the CBLAS that the command opens at run time.
libraries=$(ldconfig -p 2>/dev/null) || true
blas=$(sed -n 's/.*libopenblas\.so\.0 .*=> //p' <<<"$libraries")
blas=${blas%%$'\n'*}
{ find bundle/tests -type f -exec ldd {} \; ; [ -z "$blas" ] || ldd "$blas"; } 2>/dev/null |
    sed -n 's/.*=> \(\/[^ ]*\) .*/\1/p' | sort -u |
    grep -vE '/(libc|libm|libdl|libpthread|librt|ld-linux[^/]*|libesa)\.so' | while read -r library; do cp -L "$library" bundle/lib/; done
[ -z "$blas" ] || cp -L "$blas" bundle/lib/

cat >bundle/run-tests.sh <<'INNER'
#!/bin/sh
# Runs every test program of the bundle and says which failed.
here=$(cd "$(dirname "$0")" && pwd)
export LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
passed=0; failed=0
for t in "$here"/tests/test_* "$here"/examples/example_*; do
    if out=$("$t" 2>&1); then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED $t"; echo "$out" | tail -n 20; fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
INNER
cat >bundle/run.sh <<'INNER'
#!/bin/sh
# The esa command with the bundle's libraries: ./run.sh bench attention ...
here=$(cd "$(dirname "$0")" && pwd)
LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" exec "$here/esa" "$@"
INNER
chmod +x bundle/run-tests.sh bundle/run.sh
name=esa-$(bundle/esa --version | awk '{print $2}')-linux-$(uname -m)
tar -czf "$name.tar.gz" --transform "s,^bundle,$name," bundle
echo "bundle/ and $name.tar.gz ($(du -h "$name.tar.gz" | cut -f1))"
