/* test_amx_process.c - attention in bf16 on the best kernel set in the life of a process: AMX is
 * refused, signals arrive on another stack, the process forks.
 * SPDX-License-Identifier: Apache-2.0
 *
 * All of it runs on every machine. What AMX adds is checked where the processor has it. */
#define _GNU_SOURCE /* setenv, sigaltstack */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#if defined(__x86_64__)
#include <linux/filter.h>
#include <linux/seccomp.h>
#endif

#include "common/child.h"
#include "cpu/amx.h"
#include "cpu/cpu.h"
#include "ctx/ctx.h"
#include "esa/esa.h"

enum { H = 2, N = 300, D = 64, SIZE = H * N * D };

static uint16_t q[SIZE], k[SIZE], v[SIZE], o[SIZE], want[SIZE];

static esa_status attend(esa_ctx *ctx)
{
    memset(o, 0xff, sizeof o);
    return esa_attention(ctx, &tq, &tk, &tv, &to, NULL, NULL);
}

static esa_ctx *make(int32_t level)
{
    esa_ctx *ctx = NULL;
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = CHILD_THREADS;
    p.cpu_level = level;
    return esa_ctx_create(&ctx, &p) ? NULL : ctx;
}

static int fill(void **state)
{
    (void)state;
    return fill_call(ESA_DTYPE_BF16, H, N, D, q, k, v, o);
}

/* ---------------------------------------------------------------- refused */

/* From here on the system refuses arch_prctl(0x1023), by which a process asks for a feature. */
static int refuse(void)
{
#if defined(__x86_64__)
    struct sock_filter rule[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_arch_prctl, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0x1023, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = { sizeof rule / sizeof rule[0], rule };
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return -1;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
#else
    return 0;
#endif
}

static int works_without(void *none)
{
    (void)none;
    if (refuse()) return 1;
#if defined(__x86_64__)
    if (syscall(SYS_arch_prctl, 0x1023, 18) != -1 || errno != EPERM) return 2;
#endif
    if (esa_cpu_amx()) return 3;
    esa_ctx *ctx = make(ESA_CPU_BEST);
    if (!ctx) return 4;
    if (!strcmp(esa_ctx_cpu(ctx), "amx")) return 5;
    if (attend(ctx)) return 6;
    for (int i = 0; i < SIZE; i++)
        if (o[i] == 0xffff) return 7; /* a NaN that no kernel makes: not written */
    esa_ctx_free(ctx);
    if (make(ESA_CPU_AMX)) return 8;
    setenv("ESA_CPU", "amx", 1);
    if (make(ESA_CPU_BEST)) return 9;
    return 0;
}

static void permission_is_refused(void **state)
{
    (void)state;
    in_child(works_without, NULL); /* first of all tests: the permission outlives a fork */
}

/* ---------------------------------------------------------------- granted */

static volatile sig_atomic_t signals, elsewhere;
static char *stack_base;
static size_t stack_bytes;

static void on_signal(int number)
{
    char here;
    (void)number;
    signals++;
    elsewhere += &here < stack_base || &here >= stack_base + stack_bytes;
}

/* The frame of a signal holds the tiles (8 KB) once they are in use, so a stack for signals must be
 * as large as the system says, and room for the handler. */
static void signals_on_another_stack(void **state)
{
    (void)state;
    stack_bytes = (size_t)getauxval(AT_MINSIGSTKSZ) + 65536;
    stack_base = malloc(stack_bytes);
    stack_t stack = { .ss_sp = stack_base, .ss_size = stack_bytes };
    struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_ONSTACK | SA_RESTART };
    struct itimerval often = { { 0, 500 }, { 0, 500 } }, never = { { 0, 0 }, { 0, 0 } };
    esa_ctx *ctx = NULL;
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = 1; /* the signals interrupt the thread that computes */
    assert_int_equal(sigaltstack(&stack, NULL), 0);
    assert_int_equal(esa_ctx_create(&ctx, &p), ESA_OK);
    assert_int_equal(attend(ctx), ESA_OK);
    memcpy(want, o, sizeof want);
    assert_int_equal(sigaction(SIGPROF, &action, NULL), 0);
    assert_int_equal(setitimer(ITIMER_PROF, &often, NULL), 0);
    for (int i = 0; i < 100000 && signals < 10; i++) {
        assert_int_equal(attend(ctx), ESA_OK);
        assert_memory_equal(o, want, sizeof want);
    }
    assert_int_equal(setitimer(ITIMER_PROF, &never, NULL), 0);
    signal(SIGPROF, SIG_IGN);
    printf("%s: %d signals\n", esa_ctx_cpu(ctx), (int)signals);
    assert_true(signals >= 10 && (LATE_SIGNALS || elsewhere == 0));
    esa_ctx_free(ctx);
    stack.ss_flags = SS_DISABLE;
    assert_int_equal(sigaltstack(&stack, NULL), 0);
    free(stack_base);
}

static int same_in_child(void *parents)
{
    (void)parents;
    esa_ctx *ctx = make(ESA_CPU_BEST);
    if (!ctx) return 1;
    if (attend(ctx)) return 2;
    if (memcmp(o, want, sizeof want)) return 3;
    esa_ctx_free(ctx);
    return 0;
}

/* A child computes the same while the parent has threads and has used the tiles. */
static void fork_after_use(void **state)
{
    (void)state;
    esa_ctx *ctx = make(ESA_CPU_BEST);
    assert_non_null(ctx);
    assert_int_equal(attend(ctx), ESA_OK);
    memcpy(want, o, sizeof want);
    for (int i = 0; i < 3; i++) in_child(same_in_child, ctx);
    assert_int_equal(attend(ctx), ESA_OK);
    assert_memory_equal(o, want, sizeof want);
    esa_ctx_free(ctx);
}

/* The best set is amx exactly where the process may use it, unless $ESA_CPU says otherwise. */
static void best_where_permitted(void **state)
{
    (void)state;
    unsetenv("ESA_CPU");
    esa_ctx *ctx = make(ESA_CPU_BEST), *amx = make(ESA_CPU_AMX);
    assert_non_null(ctx);
    assert_int_equal(!strcmp(esa_ctx_cpu(ctx), "amx"), esa_cpu_amx());
    assert_int_equal(amx != NULL, esa_cpu_amx());
    esa_ctx_free(ctx);
    esa_ctx_free(amx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(permission_is_refused),
        cmocka_unit_test(signals_on_another_stack),
        cmocka_unit_test(fork_after_use),
        cmocka_unit_test(best_where_permitted),
    };
    return cmocka_run_group_tests(tests, fill, NULL);
}
