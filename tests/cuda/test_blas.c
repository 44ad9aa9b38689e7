/* test_blas.c - finding cuBLASLt (cuda/runtime/blas.h), with made-up libraries in made-up places.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* setenv, mkdtemp, readlink, secure_getenv */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda/runtime/blas.h"

_Static_assert(sizeof(lt_algo) == 64 && sizeof(lt_result) == 96 &&
                   offsetof(lt_result, workspace) == 64 && offsetof(lt_result, state) == 72,
               "the structs of the library");

static int raised; /* 1: as in a setuid program */

/* In place of the C library's. */
char *secure_getenv(const char *name) { return raised ? NULL : getenv(name); }

static char top[64]; /* a folder of this test */
static char error[512];
static blas_library lib;

/* The library beside this program: fake_blas_NAME.so. */
static void fake_path(char path[4096], const char *name)
{
    const ssize_t n = readlink("/proc/self/exe", path, 4000);
    assert_true(n > 0);
    path[n] = 0;
    snprintf(strrchr(path, '/') + 1, 90, "fake_blas_%s.so", name);
}

/* Puts a made-up library at top/folder/file and makes the folders on the way. */
static void place(const char *name, const char *folder, const char *file)
{
    char path[512], to[1024], from[4096];
    snprintf(path, sizeof path, "%s/%s/", top, folder);
    for (char *p = path + strlen(top) + 1; *p; p++)
        if (*p == '/') {
            *p = 0;
            mkdir(path, 0700);
            *p = '/';
        }
    fake_path(from, name);
    snprintf(to, sizeof to, "%s%s", path, file);
    unlink(to);
    assert_int_equal(symlink(from, to), 0);
}

static void set(const char *name, const char *folder)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", top, folder);
    setenv(name, path, 1);
}

static int begin(void **state)
{
    (void)state;
    strcpy(top, "/tmp/test_blas_XXXXXX");
    return mkdtemp(top) ? 0 : -1;
}

/* Only this test's own folder is removed, file by file. */
static int end(void **state)
{
    char command[128];
    (void)state;
    snprintf(command, sizeof command, "rm -r %s", top);
    return system(command) ? -1 : 0;
}

/* A fresh environment. The toolkit and the packages of this machine must not be found, so the cases
 * that search use a version that no real library has. */
static int clear(void **state)
{
    static const char *const name[] = { "ESA_CUBLAS_LIB", "CUDA_HOME",    "CUDA_PATH",
                                        "VIRTUAL_ENV",    "CONDA_PREFIX", "LD_LIBRARY_PATH" };
    (void)state;
    for (int i = 0; i < 6; i++) unsetenv(name[i]);
    error[0] = 0;
    memset(&lib, 1, sizeof lib);
    return 0;
}

static int shut(void **state)
{
    (void)state;
    blas_close(&lib);
    assert_null(lib.handle);
    blas_close(&lib); /* twice does no harm */
    return 0;
}

static void opens(int32_t newest, int64_t version, const char *path)
{
    if (blas_open(&lib, newest, error, sizeof error)) fail_msg("%s", error);
    assert_int_equal(lib.version, version);
    if (!strstr(lib.path, path)) fail_msg("\"%s\" does not mention \"%s\"", lib.path, path);
    assert_string_equal(lib.call.GetStatusString(1), "wrong");
    assert_int_equal(lib.call.Matmul != NULL, 1);
}

static void fails(int32_t newest, const char *words)
{
    assert_int_equal(blas_open(&lib, newest, error, sizeof error), ESA_ERR_DEVICE);
    assert_null(lib.handle);
    if (!strstr(error, words)) fail_msg("\"%s\" does not mention \"%s\"", error, words);
}

/* ---------------------------------------------------------------- ESA_CUBLAS_LIB */

static void given_file(void **state)
{
    char path[4096];
    (void)state;
    fake_path(path, "13");
    setenv("ESA_CUBLAS_LIB", path, 1);
    opens(13, 130102, "fake_blas_13");
}

static void given_folder(void **state)
{
    (void)state;
    place("12", "given", "libcublasLt.so.12");
    set("ESA_CUBLAS_LIB", "given");
    opens(13, 120902, "");
    blas_close(&lib);
    place("13", "given", "libcublasLt.so.13");
    opens(13, 130102, ""); /* the newer one first */
    blas_close(&lib);
    opens(12, 120902, ""); /* the driver serves version 12 only */
}

static void given_wrong(void **state)
{
    char path[4096];
    (void)state;
    set("ESA_CUBLAS_LIB", "nothing");
    fails(13, "there is no such file or folder");
    place("13", "empty", "other.so");
    set("ESA_CUBLAS_LIB", "empty");
    fails(13, "the folder holds no such file");
    fake_path(path, "old");
    setenv("ESA_CUBLAS_LIB", path, 1);
    fails(13, "is version 11.8, expected 12.0 to 13.x");
    fake_path(path, "13");
    setenv("ESA_CUBLAS_LIB", path, 1);
    fails(12, "is version 13.1, expected 12.0 to 12.x");
    fake_path(path, "short");
    setenv("ESA_CUBLAS_LIB", path, 1);
    fails(13, "has no cublasLtMatmul");
    setenv("ESA_CUBLAS_LIB", "/proc/self/status", 1); /* a file, but no library */
    fails(13, "ESA_CUBLAS_LIB is /proc/self/status, expected libcublasLt.so.13");
}

/* Version 98 is not found; this machine may have a real one. */
static void finds_no_98(void)
{
    if (!blas_open(&lib, 98, error, sizeof error)) {
        assert_true(lib.version < 980000);
        blas_close(&lib);
    }
}

/* Nothing comes from the current folder, whatever the variables say. */
static void relative(void **state)
{
    (void)state;
    char before[4096];
    assert_non_null(getcwd(before, sizeof before));
    place("98", "here/lib64", "libcublasLt.so.98");
    assert_int_equal(chdir(top), 0);
    setenv("ESA_CUBLAS_LIB", "here/lib64", 1);
    fails(98, "ESA_CUBLAS_LIB is here/lib64, expected an absolute path");
    setenv("ESA_CUBLAS_LIB", "libcublasLt.so.98", 1);
    fails(98, "expected an absolute path");
    unsetenv("ESA_CUBLAS_LIB");
    setenv("CUDA_HOME", "here", 1);
    finds_no_98();
    set("CUDA_HOME", "here");
    opens(98, 980000, "here/lib64/libcublasLt.so.98");
    assert_int_equal(chdir(before), 0);
}

static void raised_rights(void **state)
{
    (void)state;
    char path[4096];
    fake_path(path, "13");
    place("98", "ours/lib64", "libcublasLt.so.98");
    setenv("ESA_CUBLAS_LIB", path, 1);
    set("CUDA_HOME", "ours");
    raised = 1;
    finds_no_98();
    raised = 0;
    opens(13, 130102, "fake_blas_13");
}

/* ---------------------------------------------------------------- the search */

static void toolkit(void **state)
{
    (void)state;
    place("99", "kit/lib64", "libcublasLt.so.99");
    set("CUDA_HOME", "kit");
    opens(99, 990000, "/kit/lib64/libcublasLt.so.99");
}

static void python(void **state)
{
    (void)state;
    place("99", "venv/lib/python3.12/site-packages/nvidia/cu13/lib", "libcublasLt.so.99");
    set("VIRTUAL_ENV", "venv");
    opens(99, 990000, "/nvidia/cu13/lib/");
}

/* The toolkit comes before the Python environment. */
static void order(void **state)
{
    (void)state;
    place("98", "first/lib64", "libcublasLt.so.99");
    place("99", "second/lib/python3.12/site-packages/nvidia/cublas/lib", "libcublasLt.so.99");
    set("CUDA_PATH", "first");
    set("VIRTUAL_ENV", "second");
    opens(99, 980000, "/first/lib64/");
}

/* A library that cannot be used is passed over, and the search goes on. */
static void passed_over(void **state)
{
    (void)state;
    place("short", "bad/lib64", "libcublasLt.so.99");
    place("99", "good/lib64", "libcublasLt.so.99");
    set("CUDA_HOME", "bad");
    set("CUDA_PATH", "good");
    opens(99, 990000, "/good/lib64/");
}

/* Without any library. A machine that has a real one of version 12 or newer would find it, so the
 * message is tested where none can be: no driver serves only version 11. */
static void nowhere(void **state)
{
    (void)state;
    fails(11, "libcublasLt.so.11 was not found: install the CUDA toolkit, or run `pip install "
              "nvidia-cublas-cu12`, or set ESA_CUBLAS_LIB to the file");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(given_file, clear, shut),
        cmocka_unit_test_setup_teardown(given_folder, clear, shut),
        cmocka_unit_test_setup_teardown(given_wrong, clear, shut),
        cmocka_unit_test_setup_teardown(relative, clear, shut),
        cmocka_unit_test_setup_teardown(raised_rights, clear, shut),
        cmocka_unit_test_setup_teardown(toolkit, clear, shut),
        cmocka_unit_test_setup_teardown(python, clear, shut),
        cmocka_unit_test_setup_teardown(order, clear, shut),
        cmocka_unit_test_setup_teardown(passed_over, clear, shut),
        cmocka_unit_test_setup_teardown(nowhere, clear, shut),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
