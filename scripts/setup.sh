#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes sure the packages for one job are there: setup.sh build | video | bench | test | test-all. video is what the
# engine (libesa_video) uses; test-all adds what only the long tests need. Installs what is missing with apt if it may
# (root or passwordless sudo); otherwise prints the line to run and fails. Fast and silent when nothing is missing.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin          # ldconfig: not in the PATH of a Debian user
job=${1:-build}
case "$job" in
    build|video|bench|test) long=no ;;
    test-all) job=test; long=yes ;;
    *) echo "setup.sh: unknown job '$job', expected build, video, bench, test or test-all" >&2; exit 2 ;;
esac

have() { command -v "$1" >/dev/null 2>&1; }

# The default clang of this distribution (14 on Debian 12, 18 on Ubuntu 24.04), for the name of its runtime package.
clang_major() {
    local major=""
    if have clang; then
        major=$(clang -dumpversion | cut -d. -f1)
    elif have apt-cache; then
        major=$(apt-cache depends clang 2>/dev/null | sed -n 's/.*clang-\([0-9]\+\)$/\1/p' | head -n 1)
    fi
    if [ -z "$major" ]; then
        case "$(. /etc/os-release && echo "$ID $VERSION_ID")" in "ubuntu 24"*) major=18 ;; *) major=14 ;; esac
    fi
    echo "$major"
}

# Only gcc or clang with a working libc will do.
compiler_works() {
    have cc && have make &&
        printf '#include <stdio.h>\nint main(void){return 0;}\n' | cc -x c -o /dev/null - 2>/dev/null
}

cmake_works() {
    have cmake || return 1
    local v; v=$(cmake --version | sed -n 's/^cmake version \([0-9]*\)\.\([0-9]*\).*/\1 \2/p')
    set -- $v
    [ "$1" -gt 3 ] || { [ "$1" -eq 3 ] && [ "$2" -ge 25 ]; }
}

# libFuzzer's archive sits in clang's resource folder; its name carries the architecture.
fuzzer_works() { have clang && ls "$(clang --print-resource-dir)"/lib/linux/libclang_rt.fuzzer-*.a >/dev/null 2>&1; }

# The whole list first: grep -q would close the pipe early, and pipefail would call that a failure.
blas_found() {
    local libraries
    libraries=$(ldconfig -p 2>/dev/null) || true
    grep -qE 'lib(openblas|cblas|mkl_rt)\.so' <<<"$libraries"
}

library() { have pkg-config && pkg-config --exists "$@"; }

# The long tests open `esa report` in a browser. Ubuntu's chromium package only fetches a snap, which test machines
# often cannot run; there the test is skipped unless some Chromium or Chrome is installed.
browser() { have chromium || have google-chrome || have google-chrome-stable || [ -z "$(browser_name)" ]; }
browser_name() { case "$(. /etc/os-release && echo "$ID")" in ubuntu) ;; *) echo chromium ;; esac; }

missing() {
    compiler_works || echo build-essential
    cmake_works || echo cmake
    have pkg-config || echo pkg-config
    library jansson || echo libjansson-dev
    if [ "$job" = video ] || [ "$job" = test ]; then
        have g++ || echo g++
        library libpng || echo libpng-dev
        library sentencepiece || echo libsentencepiece-dev
        library libmicrohttpd || echo libmicrohttpd-dev
        library libavformat libavcodec libavutil libswscale ||
            echo libavformat-dev libavcodec-dev libavutil-dev libswscale-dev
    fi
    if [ "$job" = test ]; then
        library cmocka || echo libcmocka-dev
        have clang++ || echo clang
        fuzzer_works || echo "libclang-rt-$(clang_major)-dev"
        have aarch64-linux-gnu-gcc || echo gcc-aarch64-linux-gnu
        [ -e /usr/aarch64-linux-gnu/lib/libc.so.6 ] || echo libc6-dev-arm64-cross
        have qemu-aarch64 || echo qemu-user
        have strace || echo strace
        [ -e /usr/share/i18n/locales/de_DE ] || echo locales
        have python3 || echo python3
        python3 -c 'import ensurepip, venv' >/dev/null 2>&1 || echo python3-venv
        python3 -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' >/dev/null 2>&1 ||
            echo python3-dev
        have git || echo git
    fi
    if [ "$long" = yes ]; then
        { have slurmctld && have slurmd && have sbatch && have munged; } || echo slurm-wlm munge
        browser || echo "$(browser_name)"
    fi
    return 0
}

# A CBLAS is only measured against: without one everything else works.
wish=""
if { [ "$job" = bench ] || [ "$job" = test ]; } && ! blas_found; then wish=libopenblas0; fi
no_wish() { echo "note: no CBLAS found, sgemm will not be measured (on Debian: sudo apt-get install libopenblas0)"; }

packages=$(missing | tr '\n' ' ')
[ -n "${packages// /}" ] || [ -n "$wish" ] || exit 0

if ! have apt-get; then
    [ -n "${packages// /}" ] || { no_wish; exit 0; }
    echo "setup.sh: missing: $packages(names as on Debian); install them with your package manager and run again" >&2
    exit 1
fi
if [ "$(id -u)" -eq 0 ]; then as=""
elif have sudo && sudo -n true 2>/dev/null; then as="sudo -n"
else
    [ -n "${packages// /}" ] || { no_wish; exit 0; }
    echo "setup.sh: some packages are missing and this user may not install them; please run:" >&2
    echo "sudo apt-get update && sudo apt-get install -y $packages$wish" >&2
    exit 1
fi

echo "setup: installing $packages$wish"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
run() { "$@" >"$log" 2>&1 || { cat "$log" >&2; echo "setup.sh: '$*' failed" >&2; exit 1; }; }
export DEBIAN_FRONTEND=noninteractive
if [ -z "${packages// /}" ]; then
    { $as apt-get update && $as apt-get install -y --no-install-recommends $wish; } >"$log" 2>&1 || no_wish
    exit 0
fi
run $as apt-get update
# Package lists may have been empty before, so the names are asked for again.
packages=$(missing | tr '\n' ' ')
run $as apt-get install -y --no-install-recommends $packages
left=$(missing | tr '\n' ' ')
if [ -n "${left// /}" ]; then
    echo "setup.sh: still missing after installation: $left(cmake must be 3.25 or newer)" >&2
    exit 1
fi
if [ -n "$wish" ]; then $as apt-get install -y --no-install-recommends $wish >"$log" 2>&1 || no_wish; fi
