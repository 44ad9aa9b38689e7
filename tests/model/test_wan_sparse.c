/* test_wan_sparse.c - sparse attention inside the transformer equals diffusers' transformer with
 * the expanded block mask in SDPA.
 * SPDX-License-Identifier: Apache-2.0
 *
 * For each selector the golden (tools/golden/wan_sparse.py) holds the masks that this program made
 * (ESA_TEST_DUMP=FILE writes them) and the output of diffusers with those masks. The engine runs
 * twice: with the golden's masks from a mask file, which must give the golden's output, and online,
 * whose masks must equal the golden's except for ties that another instruction set may round the
 * other way. */
#include "model/golden.h"
#include "model/dit_cases.h"
#include "session/session.h"

/* As in test_wan_dit.c. */
#define TOLERANCE       2.5e-5
#define MASK_DIFFERENCE 0.01 /* share of the kept blocks */

typedef struct sparse_case {
    const char *name;
    int32_t model; /* index in dit_cases */
    int32_t selector, order, block_q, block_k;
    double budget;
} sparse_case;

static const sparse_case cases[] = {
    { "entropy", 1, ESA_SELECT_ENTROPY, ESA_ORDER_DEFAULT, 0, 0, 0.5 },
    { "entropy-hilbert", 2, ESA_SELECT_ENTROPY, ESA_ORDER_HILBERT, 64, 64, 0.3 },
    { "entropy-tiny", 3, ESA_SELECT_ENTROPY, ESA_ORDER_TILE3D, 64, 64, 0.5 },
    { "rf_v2", 1, ESA_SELECT_RF_V2, ESA_ORDER_DEFAULT, 0, 0, 0.5 },
    { "rf_v2-1650", 2, ESA_SELECT_RF_V2, ESA_ORDER_DEFAULT, 64, 64, 0.3 },
    { "ada_bsa", 2, ESA_SELECT_ADA_BSA, ESA_ORDER_DEFAULT, 0, 0, 0.5 },
    { "random", 1, ESA_SELECT_RANDOM, ESA_ORDER_RASTER, 64, 128, 0.4 },
};

typedef struct layers {
    esa_session *session; /* set before the forward, because the watcher needs it */
    uint8_t *bits[16];    /* [H][nq][ceil(nk/8)] */
    esa_mask_info info;
    int64_t bytes;
} layers;

static layers seen;

/* After block i: the mask of its self-attention is that of the session's last sparse plan. */
static void keep_mask(void *user, int32_t block, const float *hidden, int64_t tokens, int64_t d)
{
    (void)user;
    (void)hidden;
    (void)tokens;
    (void)d;
    if (block < 0) return;
    const esa_session_plan *last = NULL;
    for (int32_t i = 0; i < ESA_SESSION_PLANS; i++) {
        const esa_session_plan *p = &seen.session->plan[i];
        if (p->plan && p->mask && (!last || p->used > last->used)) last = p;
    }
    assert_non_null(last);
    seen.info.struct_size = sizeof seen.info;
    assert_int_equal(esa_mask_get_info(last->mask, &seen.info), ESA_OK);
    seen.bytes = seen.info.H * seen.info.nq * ((seen.info.nk + 7) / 8);
    seen.bits[block] = malloc((size_t)seen.bytes);
    assert_non_null(seen.bits[block]);
    assert_int_equal(esa_mask_to_bits(last->mask, seen.bits[block]), ESA_OK);
}

static void drop_masks(void)
{
    for (int32_t i = 0; i < 16; i++) free(seen.bits[i]);
    memset(&seen, 0, sizeof seen);
}

static esa_session_params params_of(const sparse_case *c)
{
    esa_session_params p = esa_session_params_default();
    p.mode = ESA_SESSION_ONLINE;
    p.select = esa_select_params_default(c->selector);
    p.select.budget = c->budget;
    p.select.block_q = c->block_q;
    p.select.block_k = c->block_k;
    p.select.layout.order = c->order;
    p.dense_first_layer = 0;
    return p;
}

/* As dit_forward, with the session known to the watcher. */
static void run_online(dit_bench *b, const sparse_case *c)
{
    const dit_case *m = &dit_cases[c->model];
    esa_session_params p = params_of(c);
    dit_ok(b,
           esa_dit_begin(b->dit, m->latent, &p.select.layout, p.select.selector, p.select.mode, 1));
    dit_ok(b, set_text(b->dit, 0, b->text, m->text_rows));
    p.layers = m->config.layers;
    p.steps = 1;
    p.warmup_frac = 0;
    dit_ok(b, esa_session_create(b->ctx, &seen.session, &p));
    dit_ok(b, esa_session_begin(seen.session));
    dit_ok(b, esa_session_step(seen.session, 0, 0));
    esa_dit_set_watch(b->dit, keep_mask, NULL);
    dit_ok(b, forward(b->dit, seen.session, 0, b->v, b->x, m->t));
    esa_dit_set_watch(b->dit, NULL, NULL);
    esa_session_stats stats = { .struct_size = sizeof stats };
    dit_ok(b, esa_session_get_stats(seen.session, &stats, -1, -1));
    assert_int_equal(stats.sparse_calls, m->config.layers);
    assert_true(stats.density < 0.95);
    print_message("%s: density %.3f", c->name, stats.density);
    esa_session_free(seen.session);
    seen.session = NULL;
}

/* The golden's masks through FA4's exchange into a mask file, and a cached session over it. */
static void run_cached(dit_bench *b, const sparse_case *c, const uint8_t *const *bits, scratch *dir)
{
    const dit_case *m = &dit_cases[c->model];
    const int64_t L = m->config.layers, H = seen.info.H, nq = seen.info.nq, nk = seen.info.nk,
                  row = (nk + 7) / 8;
    int32_t *count = calloc((size_t)(L * H * nq), 4), *index = calloc((size_t)(L * H * nq * nk), 4);
    assert_true(count && index);
    for (int64_t r = 0; r < L * H * nq; r++)
        for (int64_t j = 0; j < nk; j++)
            if (bits[r / (H * nq)][r % (H * nq) * row + j / 8] >> (j % 8) & 1)
                index[r * nk + count[r]++] = (int32_t)j;
    char fa4[640], file[640];
    snprintf(fa4, sizeof fa4, "%s", scratch_path(dir, "fa4.safetensors"));
    snprintf(file, sizeof file, "%s", scratch_path(dir, "masks.safetensors"));
    esa_tensors_writer *w = NULL;
    dit_ok(b, esa_tensors_writer_create(b->ctx, &w, fa4));
    dit_ok(b, esa_tensors_writer_declare(w, "full_block_cnt", ESA_FILE_I32, 4,
                                         (int64_t[]){ L, 1, H, nq }));
    dit_ok(b, esa_tensors_writer_declare(w, "full_block_idx", ESA_FILE_I32, 5,
                                         (int64_t[]){ L, 1, H, nq, nk }));
    dit_ok(b, esa_tensors_writer_data(w, count, 4 * L * H * nq));
    dit_ok(b, esa_tensors_writer_data(w, index, 4 * L * H * nq * nk));
    dit_ok(b, esa_tensors_writer_finish(w));
    esa_tensors_writer_free(w);
    dit_ok(b, esa_mask_file_import_fa4(b->ctx, file, fa4, &seen.info, NULL));
    esa_mask_file *masks = NULL;
    esa_mask_file_info info = { .struct_size = sizeof info };
    dit_ok(b, esa_mask_file_open(b->ctx, &masks, file));
    dit_ok(b, esa_mask_file_get_info(masks, &info));
    esa_session_params p = params_of(c);
    p.mode = ESA_SESSION_CACHED;
    p.masks = masks;
    p.select.budget = info.budget_permille[0] / 1000.0;
    esa_session *s = dit_run(b, &p);
    esa_session_stats stats = { .struct_size = sizeof stats };
    dit_ok(b, esa_session_get_stats(s, &stats, -1, -1));
    assert_int_equal(stats.masks_loaded, L);
    esa_session_free(s);
    esa_mask_file_free(masks);
    free(count);
    free(index);
}

static double output_error(const esa_tensors *golden, const sparse_case *c, const dit_bench *b)
{
    char name[64];
    int64_t n, one;
    const int64_t every = atoll(esa_tensors_metadata(golden, "every"));
    snprintf(name, sizeof name, "%s.output.scale", c->name);
    const float scale = golden_find(golden, name, &one)[0];
    snprintf(name, sizeof name, "%s.output", c->name);
    const float *want = golden_find(golden, name, &n);
    assert_int_equal(n, (b->out_count + every - 1) / every);
    return golden_error(b->v, every, want, n, scale);
}

static void compare_case(const sparse_case *c)
{
    dit_bench b;
    dit_open(&b, &dit_cases[c->model], ESA_HOLD_F32, 2);
    esa_tensors *golden = golden_open(b.ctx, "wan_sparse.safetensors");
    run_online(&b, c);
    const uint8_t *want[16];
    int64_t kept = 0, other = 0;
    for (int32_t i = 0; i < dit_cases[c->model].config.layers; i++) {
        char name[64];
        esa_tensor_info info = { .struct_size = sizeof info };
        snprintf(name, sizeof name, "%s.mask.%d", c->name, i);
        assert_int_equal(esa_tensors_find(golden, name, &info), ESA_OK);
        assert_int_equal(info.bytes, seen.bytes);
        want[i] = info.data;
        for (int64_t n = 0; n < seen.bytes; n++) {
            kept += __builtin_popcount(want[i][n]);
            other += __builtin_popcount((unsigned)(want[i][n] ^ seen.bits[i][n]));
        }
    }
    const double online = output_error(golden, c, &b);
    assert_true((double)other <= MASK_DIFFERENCE * (double)kept);
    scratch dir = scratch_make();
    run_cached(&b, c, want, &dir);
    const double cached = output_error(golden, c, &b);
    print_message(", %lld blocks differ, output online %.2e, cached %.2e\n", (long long)other,
                  online, cached);
    assert_true(cached < TOLERANCE);
    if (other == 0) assert_true(online < TOLERANCE);
    scratch_remove(&dir);
    esa_tensors_free(golden);
    drop_masks();
    dit_close(&b);
}

static void equals_diffusers(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) compare_case(&cases[i]);
}

/* Writes masks and orders for the script that makes the golden. */
static int dump(const char *path)
{
    esa_ctx *ctx = NULL;
    esa_tensors_writer *w = NULL;
    if (esa_ctx_create(&ctx, NULL) != ESA_OK || esa_tensors_writer_create(ctx, &w, path) != ESA_OK)
        return 1;
    enum { COUNT = sizeof cases / sizeof *cases };
    static layers kept[COUNT];
    for (int32_t pass = 0; pass < 2; pass++)
        for (int32_t i = 0; i < COUNT; i++) {
            const sparse_case *c = &cases[i];
            char name[64];
            if (pass == 0) {
                dit_bench b;
                dit_open(&b, &dit_cases[c->model], ESA_HOLD_F32, 2);
                run_online(&b, c);
                print_message("\n");
                kept[i] = seen;
                memset(&seen, 0, sizeof seen);
                dit_close(&b);
            }
            const esa_mask_info *info = &kept[i].info;
            const int64_t facts[4] = { c->model, info->block_q, info->block_k, info->Nq };
            int32_t *perm = malloc((size_t)info->Nq * 4);
            esa_layout layout = info->layout;
            layout.order_applied = 0;
            if (!perm || esa_order(ctx, perm, info->Nq, &layout, 0, ESA_MODE_FIXED) != ESA_OK)
                return 1;
            for (int32_t k = 0; k < dit_cases[c->model].config.layers; k++) {
                snprintf(name, sizeof name, "%s.mask.%d", c->name, k);
                if (pass == 0)
                    esa_tensors_writer_declare(
                        w, name, ESA_FILE_U8, 3,
                        (int64_t[]){ info->H, info->nq, (info->nk + 7) / 8 });
                else
                    esa_tensors_writer_data(w, kept[i].bits[k], kept[i].bytes);
            }
            snprintf(name, sizeof name, "%s.perm", c->name);
            if (pass == 0)
                esa_tensors_writer_declare(w, name, ESA_FILE_I32, 1, &info->Nq);
            else
                esa_tensors_writer_data(w, perm, 4 * info->Nq);
            snprintf(name, sizeof name, "%s.facts", c->name);
            if (pass == 0)
                esa_tensors_writer_declare(w, name, ESA_FILE_I64, 1, (int64_t[]){ 4 });
            else
                esa_tensors_writer_data(w, facts, sizeof facts);
            free(perm);
            for (int32_t k = 0; pass == 1 && k < 16; k++) free(kept[i].bits[k]);
        }
    const esa_status status = esa_tensors_writer_finish(w);
    esa_tensors_writer_free(w);
    esa_ctx_free(ctx);
    return status != ESA_OK;
}

int main(void)
{
    const char *path = getenv("ESA_TEST_DUMP");
    if (path && *path) return dump(path);
    const struct CMUnitTest tests[] = { cmocka_unit_test(equals_diffusers) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
