/* test_process.c - fork(): a ctx of the parent refuses calls in the child and never hangs there;
 * threads that the system refuses; environment variables of a program with raised rights.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* setgroups, secure_getenv */
#include <grp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "common/tests.h"
#include "base/pool.h"
#include "common/child.h"
#include "ctx/ctx.h"
#include "esa/esa.h"
#include "esa/esa_session.h"

enum { H = 2, N = 256, D = 32, SIZE = H * N * D };

static float q[SIZE], k[SIZE], v[SIZE], o[SIZE], again[SIZE];

static int fill(void **state)
{
    (void)state;
    return fill_call(ESA_DTYPE_F32, H, N, D, q, k, v, o);
}

static esa_ctx *make(int32_t threads)
{
    esa_ctx *ctx;
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = threads;
    assert_int_equal(esa_ctx_create(&ctx, &p), ESA_OK);
    return ctx;
}

/* ---------------------------------------------------------------- a ctx of the parent */

typedef struct parents {
    esa_ctx *ctx;
    esa_plan *plan;
    esa_session *session;
    esa_mask *mask;
} parents;

static int refused(const esa_ctx *ctx, esa_status status)
{
    return status == ESA_ERR_STATE && strstr(esa_ctx_error(ctx), "before fork()") != NULL;
}

static int calls_are_refused(void *arg)
{
    const parents *p = arg;
    esa_mask *mask = NULL;
    esa_plan *plan = NULL;
    int64_t bytes;
    const esa_shapes shapes = esa_shapes_default();
    if (!refused(p->ctx, esa_attention(p->ctx, &tq, &tk, &tv, &to, NULL, NULL))) return 1;
    if (!refused(p->ctx, esa_select(p->ctx, &mask, &tq, &tk, NULL)) || mask) return 2;
    if (!refused(p->ctx, esa_plan_create(p->ctx, &plan, &shapes, NULL, NULL)) || plan) return 3;
    if (!refused(p->ctx, esa_plan_attention(p->plan, NULL, &tq, &tk, &tv, &to, NULL, NULL)))
        return 4;
    if (!refused(p->ctx, esa_session_begin(p->session))) return 5;
    if (esa_plan_kernel(p->plan, NULL, &tq, &tk, &tv, &to)[0]) return 6;
    esa_ctx_trim(p->ctx);
    if (esa_plan_workspace(p->plan, &bytes) || esa_ctx_threads(p->ctx) != 2) return 7;
    return 0;
}

static int all_is_freed(void *arg)
{
    const parents *p = arg;
    esa_mask_free(p->mask);
    esa_session_free(p->session);
    esa_plan_free(p->plan);
    esa_ctx_free(p->ctx);
    return 0;
}

/* A ctx of the child works as anywhere, with a mask of the parent too. */
static int own_ctx_works(void *arg)
{
    const parents *p = arg;
    esa_ctx *ctx;
    esa_ctx_params params = esa_ctx_params_default();
    esa_tensor ta = esa_tensor_bnsd(again, ESA_DTYPE_F32, 1, H, N, D);
    params.threads = CHILD_THREADS;
    if (esa_ctx_create(&ctx, &params)) return 1;
    if (esa_attention(ctx, &tq, &tk, &tv, &ta, p->mask, NULL)) return 2;
    if (memcmp(again, o, sizeof o) != 0) return 3;
    esa_ctx_free(ctx);
    esa_ctx_free(p->ctx);
    return 0;
}

static void after_fork(void **state)
{
    (void)state;
    parents p = { .ctx = make(2) };
    esa_shapes shapes = shapes_of(ESA_DTYPE_F32, 1, H, N, D);
    esa_session_params session = esa_session_params_default();
    session.layers = session.steps = session.branches = 1;
    esa_select_params select = esa_select_params_default(ESA_SELECT_ENTROPY);
    select.block_q = select.block_k = 32;
    assert_int_equal(esa_select(p.ctx, &p.mask, &tq, &tk, &select), ESA_OK);
    assert_int_equal(esa_plan_create(p.ctx, &p.plan, &shapes, NULL, NULL), ESA_OK);
    if (esa_session_create(p.ctx, &p.session, &session)) fail_msg("%s", esa_ctx_error(p.ctx));
    assert_int_equal(esa_attention(p.ctx, &tq, &tk, &tv, &to, p.mask, NULL), ESA_OK);
    in_child(calls_are_refused, &p);
    in_child(all_is_freed, &p);
    in_child(own_ctx_works, &p);
    /* the parent goes on */
    assert_int_equal(esa_attention(p.ctx, &tq, &tk, &tv, &to, p.mask, NULL), ESA_OK);
    all_is_freed(&p);
}

/* ---------------------------------------------------------------- fork inside a call */

typedef struct inner {
    esa_ctx *ctx;
    atomic_int inside, leave;
    int32_t seen[8];
} inner;

/* A second call on a ctx that the first one has lent. */
static void *hold(void *arg)
{
    inner *x = arg;
    if (esa_ctx_enter(x->ctx)) abort();
    atomic_store(&x->inside, 1);
    while (!atomic_load(&x->leave)) usleep(100);
    esa_ctx_leave(x->ctx);
    return NULL;
}

static void count(void *arg, int64_t item, int32_t worker)
{
    inner *x = arg;
    x->seen[item] += worker == 0;
}

/* The first call goes on in the child: nobody holds the guard there, and it works alone. */
static int the_call_goes_on(void *arg)
{
    inner *x = arg;
    esa_ctx_take_back(x->ctx);
    esa_pool_run(x->ctx->pool, count, x, 8);
    for (int i = 0; i < 8; i++)
        if (x->seen[i] != 1) return 1 + i;
    esa_ctx_leave(x->ctx);
    esa_ctx_free(x->ctx);
    return 0;
}

static void inside_a_callback(void **state)
{
    (void)state;
    inner x = { .ctx = make(3) };
    pthread_t thread;
    assert_int_equal(esa_ctx_enter(x.ctx), ESA_OK);
    esa_ctx_lend(x.ctx);
    assert_int_equal(pthread_create(&thread, NULL, hold, &x), 0);
    while (!atomic_load(&x.inside)) usleep(100);
    in_child(the_call_goes_on, &x);
    atomic_store(&x.leave, 1);
    esa_ctx_take_back(x.ctx);
    pthread_join(thread, NULL);
    esa_ctx_leave(x.ctx);
    esa_ctx_free(x.ctx);
}

/* ---------------------------------------------------------------- threads */

static void keep_warning(void *user, int32_t level, const char *text)
{
    if (level == ESA_LOG_WARNING) snprintf(user, 200, "%s", text);
}

/* `more` threads beside this one are allowed. For root there is no limit, so a user without any
 * other process takes its place. Returns 1 if that is not possible. */
static int allow_threads(int more)
{
    const uid_t user = 100000 + (uid_t)getpid() % 100000;
    if (geteuid() == 0 && (setgroups(0, NULL) || setresgid(user, user, user))) return 1;
    const struct rlimit limit = { (rlim_t)more + 1, (rlim_t)more + 1 };
    if (setrlimit(RLIMIT_NPROC, &limit)) return 1;
    return geteuid() == 0 && setresuid(user, user, user);
}

static int fewer_threads(void *arg)
{
    const int more = *(int *)arg, others = geteuid() != 0; /* whose processes count too */
    const int expected = more > OWN_THREADS ? more + 1 - OWN_THREADS : 1;
    char warning[200] = "";
    esa_ctx *ctx;
    esa_ctx_params params = esa_ctx_params_default();
    esa_tensor ta = esa_tensor_bnsd(again, ESA_DTYPE_F32, 1, H, N, D);
    params.threads = 5;
    params.log = keep_warning;
    params.log_user = warning;
    if (allow_threads(others ? 0 : more)) return 1;
    if (esa_ctx_create(&ctx, &params)) return 2;
    const int threads = esa_ctx_threads(ctx);
    if (threads < 1 || threads > 4 || (!others && threads != expected)) return 3;
    if (!strstr(warning, "the system started only") || !strstr(warning, "of 5 threads: ")) return 4;
    if (strcmp(esa_ctx_limit(ctx), warning) != 0) return 5;
    if (esa_attention(ctx, &tq, &tk, &tv, &ta, NULL, NULL)) return 6;
    if (memcmp(again, o, sizeof o) != 0) return 7;
    esa_ctx_free(ctx);
    return 0;
}

static void threads_that_cannot_be_started(void **state)
{
    (void)state;
    esa_ctx *ctx = make(3);
    assert_string_equal(esa_ctx_limit(ctx), "");
    assert_string_equal(esa_ctx_limit(NULL), "");
    assert_int_equal(esa_attention(ctx, &tq, &tk, &tv, &to, NULL, NULL), ESA_OK);
    esa_ctx_free(ctx);
    for (int more = 0; more < 3; more += 2) in_child(fewer_threads, &more);
}

/* ---------------------------------------------------------------- the environment */

static int raised; /* 1: as in a setuid program */

/* In place of the C library's. */
char *secure_getenv(const char *name) { return raised ? NULL : getenv(name); }

/* The message of the first GPU call. */
static const char *no_gpu(const char *plugin)
{
    static char text[512];
    int32_t n;
    setenv("ESA_CUDA_LIB", plugin, 1);
    esa_ctx *ctx = make(1);
    assert_int_equal(esa_device_count(ctx, &n), ESA_ERR_DEVICE);
    snprintf(text, sizeof text, "%s", esa_ctx_error(ctx));
    esa_ctx_free(ctx);
    return text;
}

static void plugin_variable(void **state)
{
    (void)state;
    const char *given = getenv("ESA_CUDA_LIB");
    char *before = given ? strdup(given) : NULL;
    assert_non_null(strstr(no_gpu("/no/such/plugin.so"), "/no/such/plugin.so"));
    static const char *const relative[] = { "plugin.so", "./plugin.so", "a/plugin.so" };
    for (int i = 0; i < 3; i++) {
        const char *text = no_gpu(relative[i]);
        assert_non_null(strstr(text, relative[i]));
        assert_non_null(strstr(text, "expected an absolute path"));
    }
    raised = 1;
    esa_ctx *ctx = make(1);
    int32_t n;
    setenv("ESA_CUDA_LIB", "/no/such/plugin.so", 1);
    esa_device_count(ctx, &n); /* finds the plugin beside this program, or none */
    assert_null(strstr(esa_ctx_error(ctx), "/no/such"));
    esa_ctx_free(ctx);
    raised = 0;
    if (before)
        setenv("ESA_CUDA_LIB", before, 1);
    else
        unsetenv("ESA_CUDA_LIB");
    free(before);
}

int main(void)
{
    /* The child of the test of threads must have been made before this process had any. */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_that_cannot_be_started),
        cmocka_unit_test(after_fork),
        cmocka_unit_test(inside_a_callback),
        cmocka_unit_test(plugin_variable),
    };
    return cmocka_run_group_tests(tests, fill, NULL);
}
