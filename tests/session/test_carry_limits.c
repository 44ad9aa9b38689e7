/* test_carry_limits.c - sessions that carry with masks of a file, with memory that is given back or
 * fails, on a device that is wrong, while probing, and with exact rows that were asked for.
 * SPDX-License-Identifier: Apache-2.0 */
#include "session/mini_model.h"

#include <math.h>
#include "common/on_gpu.h"
#include "common/one_ctx.h"

static void attend(const mini *m, esa_session *s, int32_t layer, int32_t step, int32_t branch)
{
    const mini_views t = mini_view(m);
    ok(ctx, esa_session_step(s, step, branch));
    ok(ctx, esa_session_attention(s, layer, ESA_CALL_SELF, &t.q, &t.k, &t.v, &t.o, NULL));
}

/* Opens a mask file made from one recorded prompt, with masks for each branch or for all. */
static esa_mask_file *masks_of(mini *m, scratch *dir, int32_t per_branch)
{
    esa_mask_file *file;
    esa_session_params r = mini_params(m, ESA_SESSION_RECORD);
    r.record_per_branch = per_branch;
    mini_record(ctx, m, &r, 1, 1, scratch_path(dir, "rec"));
    const char *one[] = { scratch_path(dir, "rec") };
    static const double budgets[] = { 0.4 };
    esa_mask_build b = esa_mask_build_default();
    b.budgets = budgets;
    b.budget_count = 1;
    b.store_dense = 1;
    b.dense_first_layer = 0;
    b.warmup_frac = 0;
    scratch out = *dir;
    ok(ctx, esa_mask_file_build(ctx, scratch_path(&out, "masks"), one, 1, &b));
    ok(ctx, esa_mask_file_open(ctx, &file, scratch_path(&out, "masks")));
    return file;
}

/* Between anchors a session stays with the stored masks of the last anchor. Branches share the
 * difference if the file has one mask for all of them. */
static void test_cached(void **state)
{
    (void)state;
    for (int32_t per_branch = 0; per_branch < 2; per_branch++) {
        scratch dir = scratch_make();
        mini m = mini_make(2, 6, 2, 1);
        const mini_views t = mini_view(&m);
        const size_t bytes = (size_t)mini_size(&m) * 4;
        esa_mask_file *file = masks_of(&m, &dir, per_branch);
        static const int32_t anchors[] = { 0, 3 };
        esa_session_params p = mini_params(&m, ESA_SESSION_CACHED);
        p.masks = file;
        p.dense_first_layer = 0;
        p.warmup_frac = 0;
        p.attention.tail = ESA_TAIL_POOLED;
        p.carry = ESA_CARRY_AUTO;
        p.anchors = anchors;
        p.anchor_count = 2;
        esa_session *s;
        ok(ctx, esa_session_create(ctx, &s, &p));
        ok(ctx, esa_session_begin(s));
        float *o = malloc(bytes);
        const int64_t size = esa_carry_bytes(ESA_CARRY_E4M3, m.B, m.H, m.N, m.D);
        esa_carry d[2][2];
        for (int32_t i = 0; i < 4; i++)
            d[i / 2][i % 2] = esa_carry_view(aligned_alloc(64, (size_t)(size + 63) / 64 * 64),
                                             ESA_CARRY_E4M3, m.B, m.H, m.N, m.D);
        m.prompt = 2;
        for (int32_t step = 0; step < 6; step++)
            for (int32_t branch = 0; branch < 2; branch++)
                for (int32_t l = 0; l < 2; l++) {
                    const int32_t own = per_branch ? branch : 0,
                                  anchor = step % 3 == 0 && branch == own;
                    esa_mask *mask;
                    mini_fill(&m, l, step, branch);
                    attend(&m, s, l, step, branch);
                    memcpy(o, m.o, bytes);
                    ok(ctx, esa_mask_file_get(file, &mask, l, step / 3 * 3, branch, 0.4));
                    if (anchor) ok(ctx, esa_attention(ctx, &t.q, &t.k, &t.v, &t.o, NULL, NULL));
                    ok(ctx,
                       esa_attention_carry(ctx, &t.q, &t.k, &t.v, &t.o, mask, &p.attention,
                                           &d[own][l], anchor ? ESA_CARRY_MAKE : ESA_CARRY_ADD));
                    if (memcmp(o, m.o, bytes))
                        fail_msg("per branch %d, step %d, branch %d, layer %d: other bits",
                                 per_branch, step, branch, l);
                    esa_mask_free(mask);
                }
        const esa_session_stats all = mini_stats(s, -1, -1);
        assert_int_equal(all.anchor_calls, per_branch ? 8 : 4);
        assert_int_equal(all.carried_calls, per_branch ? 16 : 20);
        assert_int_equal(all.masks_loaded, 24);
        for (int32_t i = 0; i < 4; i++) free(d[i / 2][i % 2].value);
        free(o);
        esa_session_free(s);
        esa_mask_file_free(file);
        scratch_remove(&dir);
        mini_free(&m);
    }
}

/* ---------------------------------------------------------------- memory that is given back */

/* A step of all layers and branches; the hash of its outputs. */
static uint64_t run_step(mini *m, esa_session *s, int32_t step)
{
    uint64_t hash = 0;
    for (int32_t branch = 0; branch < m->branches; branch++)
        for (int32_t l = 0; l < m->layers; l++) {
            mini_fill(m, l, step, branch);
            attend(m, s, l, step, branch);
            hash = mini_hash(hash, m->o, mini_size(m) * 4);
        }
    return hash;
}

/* Steps after a trim add nothing; the next anchor makes differences anew, and so does the next
 * video, with the bits of a session that kept its memory. On a GPU also where they are streamed. */
static void test_trim(void **state)
{
    (void)state;
    static const int32_t anchors[] = { 0, 3 };
    mini m = mini_make(5, 6, 2, 1);
    const int64_t bytes = esa_carry_bytes(ESA_CARRY_E4M3, m.B, m.H, m.N, m.D);
    for (int32_t streamed = 0; streamed < (on_gpu() ? 2 : 1); streamed++) {
        uint64_t expected[6];
        esa_session_params p = mini_sparse_params(&m);
        p.share_branches = 1;
        p.carry = ESA_CARRY_AUTO;
        p.anchors = anchors;
        p.anchor_count = 2;
        p.carry_room = streamed ? 4 * bytes : -1;
        esa_session *s;
        ok(ctx, esa_session_create(ctx, &s, &p));
        for (int32_t video = 0; video < 3; video++) {
            ok(ctx, esa_session_begin(s));
            for (int32_t step = 0; step < 6; step++) {
                const int32_t trims = video && (step == 1 || step == 5), bare = video && step == 2;
                const uint64_t hash = run_step(&m, s, step);
                const esa_session_stats now = mini_stats(s, -1, step);
                if (!video) expected[step] = hash;
                assert_int_equal(hash == expected[step], !bare);
                assert_int_equal(now.anchor_calls, step % 3 ? 0 : 5);
                /* one of five layers is not streamed */
                assert_int_equal(now.carried_calls, bare ? 8 * streamed : step % 3 ? 10 : 5);
                if (!trims) continue;
                ok(ctx, esa_session_trim(s));
                assert_int_equal(mini_stats(s, -1, -1).carry_bytes, streamed ? 3 * bytes : 0);
            }
        }
        esa_session_free(s);
    }
    assert_int_equal(esa_session_trim(NULL), ESA_ERR_ARGUMENT);
    mini_free(&m);
}

/* ---------------------------------------------------------------- memory that fails */

/* Refuses the n-th allocation and all later ones; counts bytes that are not given back. */
typedef struct faults {
    int64_t left, held;
} faults;

static void *fault_alloc(void *user, uint64_t bytes)
{
    faults *f = user;
    if (f->left-- <= 0) return NULL;
    f->held += (int64_t)bytes;
    return aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
}

static void fault_free(void *user, void *ptr, uint64_t bytes)
{
    faults *f = user;
    f->held -= (int64_t)bytes;
    free(ptr);
}

/* Wherever memory runs out, the call fails with a message, nothing leaks, and the next video, with
 * memory again, has the bits of an undisturbed one: no half-made difference is added. */
static void test_out_of_memory(void **state)
{
    (void)state;
    mini m = mini_make(2, 6, 2, 1); /* the fewest steps that carry by themselves */
    uint64_t expected = 0, hash;
    faults f = { 0 };
    esa_ctx *const mine = ctx;
    int32_t failures = 0;
    for (int64_t n = -1;; n++) { /* -1: nothing fails */
        esa_session *s;
        esa_ctx_params own = esa_ctx_params_default();
        own.threads = 1;
        own.alloc = fault_alloc;
        own.dealloc = fault_free;
        own.alloc_user = &f;
        f.left = INT64_MAX;
        assert_int_equal(esa_ctx_create(&ctx, &own), ESA_OK);
        const esa_session_params plain = mini_sparse_params(&m);
        esa_session_params p = esa_session_params_recommended(ESA_SESSION_ONLINE, ESA_SELECT_ERROR,
                                                              0);
        p.layers = m.layers;
        p.steps = m.steps;
        p.branches = m.branches;
        memcpy(p.select.layout.grid_q, plain.select.layout.grid_q, sizeof p.select.layout.grid_q);
        p.select.block_q = p.select.block_k = 16;
        ok(ctx, esa_session_create(ctx, &s, &p));
        f.left = n < 0 ? INT64_MAX : n;
        const esa_status status = mini_run(&m, s, &hash);
        if (status) {
            assert_int_equal(status, ESA_ERR_MEMORY);
            assert_true(esa_ctx_error(ctx)[0] != 0);
            failures++;
            f.left = INT64_MAX;
            ok(ctx, mini_run(&m, s, &hash));
        }
        if (n < 0) expected = hash;
        assert_true(hash == expected);
        esa_session_free(s);
        esa_ctx_free(ctx);
        assert_int_equal(f.held, 0);
        if (!status && n >= 0) break;
    }
    ctx = mine;
    /* plans, masks, orders, differences of two layers, figures; on a GPU most lie on the device */
    assert_true(failures > (on_gpu() ? 2 : 10));
    mini_free(&m);
}

/* A device whose kernels add something else is found out at the first anchor. Outputs that are
 * infinite say nothing about it. */
static void test_wrong_device(void **state)
{
    (void)state;
    mini m = mini_make(2, 4, 1, 1);
    const mini_views t = mini_view(&m);
    for (int32_t i = 0; i < 3; i++) {
        const int32_t wrong = i == 1;
        esa_session *s;
        esa_session_params p = mini_sparse_params(&m);
        p.carry = 2;
        ok(ctx, esa_session_create(ctx, &s, &p));
        ok(ctx, esa_session_begin(s));
        ok(ctx, esa_session_step(s, 0, 0));
        mini_fill(&m, 0, 0, 0);
        if (i == 2) m.v[0] = INFINITY; /* a column of a head, in the dense and in the sparse call */
        if (wrong) setenv("ESA_STAND_IN_CARRY", "1", 1);
        const esa_status status = esa_session_attention(s, 0, ESA_CALL_SELF, &t.q, &t.k, &t.v, &t.o,
                                                        NULL);
        unsetenv("ESA_STAND_IN_CARRY");
        if (wrong)
            assert_refused(ctx, status, ESA_ERR_INTERNAL, "carry gives wrong results on this GPU",
                           "turn carry off", NULL);
        else
            ok(ctx, status);
        esa_session_free(s);
    }
    mini_free(&m);
}

/* Views of device memory, which the tests' wrapper of calls leaves alone. */
static mini_views on_device(const mini *m)
{
    mini_views t = mini_view(m);
    esa_tensor *const view[] = { &t.q, &t.k, &t.v, &t.o };
    for (int32_t i = 0; i < 4; i++) {
        ok(ctx, esa_device_alloc(ctx, &view[i]->data, mini_size(m) * 4));
        view[i]->device = ESA_DEVICE_CUDA;
    }
    return t;
}

/* The calls of one video, one of which fails at its n-th operation of the device (-1: none) and is
 * made a second time. hash[step * layers + layer] of the outputs; 0 where an anchor was repeated,
 * because its difference may have been there already. *failures counts the calls that failed. 0:
 * there are not that many operations. */
static int32_t run_stubborn(const mini *m, const mini_views *t, esa_session *s, uint64_t *hash,
                            int32_t n, int32_t *failures)
{
    char left[16] = "";
    if (n >= 0) snprintf(left, sizeof left, "%d", n);
    ok(ctx, esa_session_begin(s));
    for (int32_t i = 0; i < m->steps * m->layers; i++) {
        const int32_t step = i / m->layers, layer = i % m->layers;
        int32_t again = -1;
        esa_status status;
        mini_fill(m, layer, step, 0);
        ok(ctx, esa_session_step(s, step, 0));
        ok(ctx, esa_device_upload(ctx, t->q.data, m->q, mini_size(m) * 4));
        ok(ctx, esa_device_upload(ctx, t->k.data, m->k, mini_size(m) * 4));
        ok(ctx, esa_device_upload(ctx, t->v.data, m->v, mini_size(m) * 4));
        do {
            if (left[0]) setenv("ESA_STAND_IN_FAIL", left, 1);
            status = esa_session_attention(s, layer, ESA_CALL_SELF, &t->q, &t->k, &t->v, &t->o,
                                           NULL);
            const char *now = getenv("ESA_STAND_IN_FAIL");
            snprintf(left, sizeof left, "%s", now ? now : "");
            unsetenv("ESA_STAND_IN_FAIL");
        } while (++again == 0 && status);
        *failures += again;
        ok(ctx, status);
        ok(ctx, esa_device_download(ctx, m->o, t->o.data, mini_size(m) * 4));
        hash[i] = again && step == 0 ? 0 : mini_hash(1, m->o, mini_size(m) * 4);
    }
    return !left[0];
}

/* Wherever a copy or another operation of the device fails, a repeated call and all that follow
 * have the bits of an undisturbed run: no call finds another difference where its own should be. */
static void test_failing_copies(void **state)
{
    (void)state;
    enum { LAYERS = 5, STEPS = 3, CALLS = LAYERS * STEPS }; /* more layers than lanes */
    mini m = mini_make(LAYERS, STEPS, 1, 1);
    const mini_views t = on_device(&m);
    uint64_t expected[CALLS], hash[CALLS];
    int32_t failures = 0, there = 1;
    for (int32_t n = -1; there; n++) {
        esa_session *s;
        esa_session_params p = mini_sparse_params(&m);
        p.carry = 1;
        p.carry_room = 0;
        ok(ctx, esa_session_create(ctx, &s, &p));
        there = run_stubborn(&m, &t, s, n < 0 ? expected : hash, n, &failures);
        for (int32_t i = 0; n >= 0 && i < CALLS; i++)
            if (hash[i] && hash[i] != expected[i])
                fail_msg("operation %d failed: step %d, layer %d has other bits", n, i / LAYERS,
                         i % LAYERS);
        esa_session_free(s);
    }
    assert_true(failures > 5 * CALLS); /* a call has ten operations or more */
    esa_device_free(ctx, t.q.data);
    esa_device_free(ctx, t.k.data);
    esa_device_free(ctx, t.v.data);
    esa_device_free(ctx, t.o.data);
    mini_free(&m);
}

/* Device memory of which there is so much. */
static int64_t left_over;

static void *take(void *user, int64_t bytes)
{
    void *ptr;
    if (bytes > left_over || esa_device_alloc(user, &ptr, bytes)) return NULL;
    left_over -= bytes;
    return ptr;
}

static void give(void *user, void *ptr, int64_t bytes)
{
    left_over += bytes;
    esa_device_free(user, ptr);
}

/* A larger video in a session finds as much memory as in a session of its own: the differences of
 * the last video, which are too small, do not stand in the way. */
static void test_larger_video(void **state)
{
    (void)state;
    mini m = mini_make(6, 2, 1, 1);
    const int64_t N = m.N, bytes = esa_carry_bytes(ESA_CARRY_E4M3, m.B, m.H, m.N, m.D);
    uint64_t hash[3];
    esa_ctx *other;
    assert_int_equal(esa_ctx_create(&other, NULL), ESA_OK);
    left_over = 5 * bytes; /* six small differences; two large ones, and lanes for the others */
    static const int32_t shorter[] = { 0, 48, 16 }; /* 16: it has lanes, too */
    for (int32_t i = 0; i < 3; i++) {
        esa_session *s;
        esa_session_params p = mini_sparse_params(&m);
        p.select.layout = esa_layout_default(); /* no grid, so any number of tokens */
        p.carry = 1;
        p.carry_alloc = take;
        p.carry_free = give;
        p.carry_user = other;
        ok(ctx, esa_session_create(ctx, &s, &p));
        m.N = N - shorter[i];
        if (i) ok(ctx, mini_run(&m, s, NULL));
        m.N = N;
        ok(ctx, mini_run(&m, s, &hash[i]));
        assert_int_equal(mini_stats(s, -1, -1).carry_bytes, 5 * bytes);
        assert_int_equal(mini_stats(s, -1, -1).carry_host_bytes, 4 * bytes);
        esa_session_free(s);
        assert_int_equal(left_over, 5 * bytes);
    }
    assert_true(hash[0] == hash[1] && hash[0] == hash[2]);
    esa_ctx_free(other);
    mini_free(&m);
}

/* PROBE with carry measures what a run with carry would leave: nothing at anchors, and between them
 * the error of sparse output and difference of the anchor. It still returns the dense output. */
static void test_probe(void **state)
{
    (void)state;
    mini m = mini_make(2, 4, 2, 1);
    const double probe[] = { 0.2, 0.5 };
    const size_t n = (size_t)mini_size(&m);
    float *dense = malloc(n * 4);
    uint64_t hash[2];
    esa_session *s[2], *d;
    esa_session_params p = mini_params(&m, ESA_SESSION_DENSE);
    ok(ctx, esa_session_create(ctx, &d, &p));
    ok(ctx, mini_run(&m, d, &hash[0]));
    p = mini_sparse_params(&m);
    p.share_branches = 1;
    p.carry = 2; /* steps 0 and 1 */
    p.select.budget = probe[1];
    ok(ctx, esa_session_create(ctx, &s[0], &p));
    p.mode = ESA_SESSION_PROBE;
    p.probe = probe;
    p.probe_count = 2;
    ok(ctx, esa_session_create(ctx, &s[1], &p));
    for (int32_t video = 0; video < 2; video++) ok(ctx, mini_run(&m, s[1], &hash[1]));
    assert_true(hash[0] == hash[1]);
    ok(ctx, esa_session_begin(s[0]));
    for (int32_t step = 0; step < 4; step++)
        for (int32_t l = 0; l < 2; l++) {
            double error = 0, e[2];
            for (int32_t branch = 0; branch < 2; branch++) {
                double sum = 0;
                mini_fill(&m, l, step, branch);
                const mini_views t = mini_view(&m);
                ok(ctx, esa_attention(ctx, &t.q, &t.k, &t.v, &t.o, NULL, NULL));
                memcpy(dense, m.o, n * 4);
                attend(&m, s[0], l, step, branch);
                for (size_t i = 0; i < n; i++)
                    sum += ((double)m.o[i] - dense[i]) * ((double)m.o[i] - dense[i]);
                error += sum / (double)n / 2;
            }
            ok(ctx, esa_session_get_probe(s[1], e, 2, l, step));
            /* the same sums in another order */
            if (!(e[1] - error < 1e-9 * (1 + error) && error - e[1] < 1e-9 * (1 + error)))
                fail_msg("layer %d, step %d: %g, expected %g", l, step, e[1], error);
            assert_true(e[0] > e[1] && e[1] > 0);
        }
    for (int32_t i = 0; i < 2; i++) esa_session_free(s[i]);
    esa_session_free(d);
    free(dense);
    mini_free(&m);
}

/* With exact rows that were asked for, a carried call corrects what the difference leaves. */
static void test_exact_rows(void **state)
{
    (void)state;
    mini m = mini_make(1, 3, 1, 1);
    const mini_views t = mini_view(&m);
    const size_t bytes = (size_t)mini_size(&m) * 4;
    float *dense = malloc(bytes);
    esa_session_params p = mini_sparse_params(&m);
    p.select.block_q = 32;
    p.carry = 1;
    p.attention.tail = ESA_TAIL_POOLED;
    p.attention.exact_rows = 2;
    esa_session *s;
    ok(ctx, esa_session_create(ctx, &s, &p));
    ok(ctx, esa_session_begin(s));
    for (int32_t step = 0; step < 3; step++) {
        mini_fill(&m, 0, step, 0);
        ok(ctx, esa_attention(ctx, &t.q, &t.k, &t.v, &t.o, NULL, NULL));
        memcpy(dense, m.o, bytes);
        attend(&m, s, 0, step, 0);
        int64_t exact = 0, rows = m.B * m.H * m.N;
        for (int64_t r = 0; r < rows; r++) {
            int same = 1;
            /* rows computed by another kernel call: sums of 240 products in another order */
            for (int64_t i = r * m.D; i < (r + 1) * m.D; i++)
                same &= m.o[i] - dense[i] < 2e-6f && dense[i] - m.o[i] < 2e-6f;
            exact += same;
        }
        if (step == 0)
            assert_int_equal(exact, rows);
        else /* two of 32 rows, and of the 16 rows of the last block */
            assert_true(exact >= m.H * 2 * 8 && exact < rows / 2);
    }
    esa_session_free(s);
    free(dense);
    mini_free(&m);
}

int main(void)
{
    const struct CMUnitTest both[] = { cmocka_unit_test(test_out_of_memory),
                                       cmocka_unit_test(test_exact_rows),
                                       cmocka_unit_test(test_trim), cmocka_unit_test(test_probe) };
    /* masks of a file are on the CPU when a test takes them by hand */
    const struct CMUnitTest on_cpu[] = { cmocka_unit_test(test_cached) };
    /* the stand-in can be told to be wrong, and to fail */
    const struct CMUnitTest on_it[] = { cmocka_unit_test(test_wrong_device),
                                        cmocka_unit_test(test_failing_copies),
                                        cmocka_unit_test(test_larger_video) };
    const int failed = cmocka_run_group_tests(both, setup, teardown);
    if (!on_gpu()) return failed + cmocka_run_group_tests(on_cpu, setup, teardown);
    return failed + (on_stand_in() ? cmocka_run_group_tests(on_it, setup, teardown) : 0);
}
