/* test_no_gpu.c - no plugin, a wrong one, no driver, no GPU: ESA_ERR_DEVICE and a message, and the
 * CPU works on.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* setenv, readlink, dladdr */
#define ESA_EXPERIMENTAL
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/tests.h"
#include "common/naive.h"
#include "esa/esa_session.h"

enum { H = 2, N = 100, D = 16 };
static float q[H * N * D], k[H * N * D], v[H * N * D], o[H * N * D], before[H * N * D];

static esa_tensor view(float *data, int32_t device)
{
    esa_tensor t = esa_tensor_bnsd(data, ESA_DTYPE_F32, 1, H, N, D);
    t.device = device;
    return t;
}

/* A file beside this program, or one folder up. */
static const char *beside(const char *name)
{
    static char path[4096];
    const ssize_t n = readlink("/proc/self/exe", path, sizeof path - 64);
    assert_true(n > 0);
    path[n] = 0;
    strcpy(strrchr(path, '/') + 1, name);
    return path;
}

static void expect(esa_ctx *ctx, esa_status got, const char *word)
{
    if (got != ESA_ERR_DEVICE)
        fail_msg("%s instead of ESA_ERR_DEVICE: %s", esa_status_name(got), esa_ctx_error(ctx));
    if (!strstr(esa_ctx_error(ctx), word))
        fail_msg("\"%s\" does not mention \"%s\"", esa_ctx_error(ctx), word);
}

/* Every call that would need a GPU says why there is none; between them the CPU computes what it
 * always did. */
static void all_calls(const char *word)
{
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    esa_tensor cpu[4] = { view(q, ESA_DEVICE_CPU), view(k, ESA_DEVICE_CPU), view(v, ESA_DEVICE_CPU),
                          view(o, ESA_DEVICE_CPU) };
    esa_tensor gpu[4] = { view(q, ESA_DEVICE_CUDA), view(k, ESA_DEVICE_CUDA),
                          view(v, ESA_DEVICE_CUDA), view(o, ESA_DEVICE_CUDA) };
    tensor_fill(&cpu[0], 1, 1.0);
    tensor_fill(&cpu[1], 2, 1.0);
    tensor_fill(&cpu[2], 3, 1.0);
    assert_int_equal(esa_attention(ctx, &cpu[0], &cpu[1], &cpu[2], &cpu[3], NULL, NULL), ESA_OK);
    memcpy(before, o, sizeof o);

    int32_t count = 77;
    expect(ctx, esa_device_count(ctx, &count), word);
    assert_int_equal(count, 0);
    esa_device_info info = { .struct_size = sizeof info };
    expect(ctx, esa_device_get_info(ctx, &info), word);
    void *ptr = &ctx;
    expect(ctx, esa_device_alloc(ctx, &ptr, 100), word);
    assert_null(ptr);
    expect(ctx, esa_device_upload(ctx, q, k, 4), word);
    expect(ctx, esa_device_download(ctx, q, k, 4), word);
    expect(ctx, esa_device_sync(ctx), word);
    char library[64];
    expect(ctx, esa_device_library(ctx, library, (int32_t)sizeof library), word);
    expect(ctx, esa_attention(ctx, &gpu[0], &gpu[1], &gpu[2], &gpu[3], NULL, NULL), word);
    esa_mask *mask, *copy;
    expect(ctx, esa_select(ctx, &mask, &gpu[0], &gpu[1], NULL), word);
    assert_null(mask);
    esa_shapes s = esa_shapes_default();
    esa_plan *plan;
    s.device = ESA_DEVICE_CUDA;
    s.B = 1;
    s.Hq = s.Hkv = H;
    s.Nq = s.Nk = N;
    s.D = D;
    expect(ctx, esa_plan_create(ctx, &plan, &s, NULL, NULL), word);
    assert_null(plan);
    esa_session_params sp = esa_session_params_default();
    esa_session *session;
    sp.layers = sp.steps = 1;
    sp.mode = ESA_SESSION_DENSE;
    assert_int_equal(esa_session_create(ctx, &session, &sp), ESA_OK);
    assert_int_equal(esa_session_begin(session), ESA_OK);
    assert_int_equal(esa_session_step(session, 0, 0), ESA_OK);
    expect(
        ctx,
        esa_session_attention(session, 0, ESA_CALL_SELF, &gpu[0], &gpu[1], &gpu[2], &gpu[3], NULL),
        word);
    esa_session_free(session);

    assert_int_equal(esa_select(ctx, &mask, &cpu[0], &cpu[1], NULL), ESA_OK);
    expect(ctx, esa_mask_to_device(ctx, &copy, mask, ESA_DEVICE_CUDA), word);
    assert_null(copy);
    assert_int_equal(esa_mask_to_device(ctx, &copy, mask, ESA_DEVICE_CPU), ESA_OK);
    esa_mask_free(copy);
    esa_mask_free(mask);
    int64_t held = -1, peak = -1;
    esa_device_memory(ctx, &held, &peak);
    assert_true(held == 0 && peak == 0);
    esa_device_free(ctx, NULL);

    assert_memory_equal(before, o, sizeof o); /* unchanged */
    assert_int_equal(esa_attention(ctx, &cpu[0], &cpu[1], &cpu[2], &cpu[3], NULL, NULL), ESA_OK);
    assert_memory_equal(before, o, sizeof o);
    assert_string_equal(esa_ctx_error(ctx), "");
    esa_ctx_free(ctx);
}

static void missing_plugin(void **state)
{
    (void)state;
    setenv("ESA_CUDA_LIB", "/no/such/folder/libesa_cuda.so", 1);
    all_calls("/no/such/folder/libesa_cuda.so");
    unsetenv("ESA_CUDA_LIB");
    all_calls("libesa_cuda.so"); /* none lies beside the test programs */
}

static void wrong_plugins(void **state)
{
    (void)state;
    setenv("ESA_CUDA_LIB", "/proc/self/status", 1); /* a file, but no library */
    all_calls("/proc/self/status");
    setenv("ESA_CUDA_LIB", "libm.so.6",
           1); /* a bare name is a file of this folder: no search path is asked */
    all_calls("libm.so.6");
    Dl_info c_library;
    assert_true(dladdr(dlsym(RTLD_DEFAULT, "printf"), &c_library) && c_library.dli_fname);
    setenv("ESA_CUDA_LIB", c_library.dli_fname, 1); /* a library, but no plugin */
    all_calls("esa_cuda_entry");
    unsetenv("ESA_CUDA_LIB");
}

static void other_interface(void **state)
{
    (void)state;
    if (access(beside("libesa_other_abi.so"), R_OK)) skip(); /* not built for another processor */
    setenv("ESA_CUDA_LIB", beside("libesa_other_abi.so"), 1);
    all_calls("interface");
    unsetenv("ESA_CUDA_LIB");
}

/* The real plugin, where it was built, on a machine whose GPUs (if any) are hidden. In a child:
 * drivers read the variable once. */
static void no_device(void **state)
{
    (void)state;
    if (access(beside("../libesa_cuda.so"), R_OK)) skip(); /* built only if nvcc is found */
    setenv("ESA_CUDA_LIB", beside("../libesa_cuda.so"), 1);
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        esa_ctx *ctx;
        int32_t count = 5;
        setenv("CUDA_VISIBLE_DEVICES", "", 1);
        if (esa_ctx_create(&ctx, NULL)) _exit(2);
        const esa_status status = esa_device_count(ctx, &count);
        fprintf(stderr, "%s: %s\n", esa_status_name(status), esa_ctx_error(ctx));
        _exit(status == ESA_ERR_DEVICE && count == 0 && strlen(esa_ctx_error(ctx)) > 20 ? 0 : 3);
    }
    int how = 0;
    assert_true(waitpid(child, &how, 0) == child);
    assert_true(WIFEXITED(how));
    assert_int_equal(WEXITSTATUS(how), 0);
    unsetenv("ESA_CUDA_LIB");
}

/* What this program does when it is called as "ask": 0 if it finds a GPU. */
static int ask(void)
{
    esa_ctx *ctx;
    int32_t count = 0;
    if (esa_ctx_create(&ctx, NULL)) return 2;
    const int lost = esa_device_count(ctx, &count) != ESA_OK || count != 1;
    esa_ctx_free(ctx);
    return lost;
}

/* Runs `program` as a shell runs what it found through $PATH: by a bare name, from some other
 * folder. Its exit status. */
static int run_from(const char *folder, const char *program, const char *plugin,
                    const char *library_path)
{
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        if (plugin)
            setenv("ESA_CUDA_LIB", plugin, 1);
        else
            unsetenv("ESA_CUDA_LIB");
        /* In a bundle the libraries of the tests lie in ../lib of the program, where a link to it
         * elsewhere does not find them. */
        char libraries[8400];
        snprintf(libraries, sizeof libraries, "%s%s%s", library_path ? library_path : "",
                 library_path ? ":" : "", beside("../lib"));
        setenv("LD_LIBRARY_PATH", libraries, 1);
        if (chdir(folder)) _exit(8);
        execl(program, "ask", (char *)NULL);
        _exit(9);
    }
    int how = 0;
    assert_true(waitpid(child, &how, 0) == child);
    assert_true(WIFEXITED(how));
    return WEXITSTATUS(how);
}

/* libesa is linked into this program: its plugin lies beside the program, wherever the program was
 * called from and by whatever name. */
static void beside_the_program(void **state)
{
    (void)state;
    char self[4096], stand_in[4096], with[4200], without[4200], program[2][4300], plugin[4300];
    strcpy(stand_in, beside("libesa_stand_in.so"));
    strcpy(self, beside(""));
    if (access(stand_in, R_OK)) skip(); /* not built for another processor */
    snprintf(with, sizeof with, "%swith-XXXXXX", self);
    snprintf(without, sizeof without, "%swithout-XXXXXX", self);
    assert_non_null(mkdtemp(with));
    assert_non_null(mkdtemp(without));
    const ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(n > 0);
    self[n] = 0;
    for (int i = 0; i < 2; i++) {
        snprintf(program[i], sizeof program[i], "%s/program", i ? with : without);
        assert_int_equal(link(self, program[i]), 0);
    }
    snprintf(plugin, sizeof plugin, "%s/libesa_cuda.so", with);
    assert_int_equal(symlink(stand_in, plugin), 0);

    const int found = run_from("/", program[1], NULL, NULL);
    /* a plugin in the current folder is none of ours */
    const int strayed = run_from(with, program[0], NULL, NULL);
    /* nor is it if $ESA_CUDA_LIB names it by a relative path */
    const int named = run_from(with, program[0], "libesa_cuda.so", NULL);
    const int relative = run_from(with, program[0], "../libesa_stand_in.so", NULL);
    const int absolute = run_from("/", program[0], plugin, NULL);
    const int searched = run_from("/", program[0], "libesa_cuda.so", with);
    unlink(plugin);
    for (int i = 0; i < 2; i++) unlink(program[i]);
    rmdir(with);
    rmdir(without);
    assert_int_equal(found, 0);
    assert_int_equal(strayed, 1);
    assert_int_equal(named, 1);
    assert_int_equal(relative, 1);
    assert_int_equal(absolute, 0);
    assert_int_equal(searched, 1);
}

/* Arguments of the device calls themselves. */
static void arguments(void **state)
{
    (void)state;
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    void *ptr;
    esa_device_info info = { .struct_size = 3 };
    assert_int_equal(esa_device_count(ctx, NULL), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_device_count(NULL, NULL), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_device_get_info(ctx, NULL), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_device_get_info(ctx, &info), ESA_ERR_VERSION);
    assert_non_null(strstr(esa_ctx_error(ctx), "struct_size 3"));
    assert_int_equal(esa_device_alloc(ctx, NULL, 4), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_device_alloc(ctx, &ptr, -1), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_device_upload(ctx, NULL, q, 4), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_device_download(ctx, q, NULL, 4), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_device_upload(ctx, q, k, -4), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_device_library(ctx, NULL, 4), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_device_library(NULL, NULL, 0), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_ctx_set_stream(NULL, NULL), ESA_ERR_ARGUMENT);
    /* no GPU in use: remembered, not looked at */
    assert_int_equal(esa_ctx_set_stream(ctx, &ctx), ESA_OK);
    assert_int_equal(esa_ctx_set_stream(ctx, NULL), ESA_OK);
    esa_mask *copy = (esa_mask *)&ctx;
    assert_int_equal(esa_mask_to_device(ctx, &copy, NULL, ESA_DEVICE_CUDA), ESA_ERR_ARGUMENT);
    assert_null(copy);
    esa_device_memory(NULL, NULL, NULL);
    esa_device_free(NULL, NULL);
    esa_ctx_free(ctx);
}

int main(int argc, char **argv)
{
    if (argc == 1 && !strcmp(argv[0], "ask")) return ask();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_device),          cmocka_unit_test(missing_plugin),
        cmocka_unit_test(wrong_plugins),      cmocka_unit_test(other_interface),
        cmocka_unit_test(beside_the_program), cmocka_unit_test(arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
