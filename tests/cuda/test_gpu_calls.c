/* test_gpu_calls.c - the public calls around a GPU: memory, masks, plans, bad input.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Views here lie on the GPU from the start, as a caller with its own device memory has them. */
#define _GNU_SOURCE /* setenv */
#define ESA_EXPERIMENTAL
#include "cuda/gpu_kit.h"

enum { B = 2, H = 4, N = 500, D = 64, SIZE = B * H * N * D };

typedef struct fixture {
    esa_ctx *ctx;
    esa_tensor q, k, v, o; /* bf16 on the GPU */
    uint16_t *host[4];
} fixture;

static fixture fresh(void)
{
    fixture f;
    esa_rng r = { kit_seed("fresh") };
    assert_int_equal(esa_ctx_create(&f.ctx, NULL), ESA_OK);
    esa_tensor *t[] = { &f.q, &f.k, &f.v, &f.o };
    for (int i = 0; i < 4; i++) {
        kit_tensor one = kit_random(&r, ESA_DTYPE_BF16, B, H, N, D, 0, 1.0f);
        f.host[i] = one.data;
        *t[i] = gpu_tensor(f.ctx, one.data, ESA_DTYPE_BF16, B, H, N, D);
    }
    return f;
}

static void finish(fixture *f)
{
    esa_tensor *t[] = { &f->q, &f->k, &f->v, &f->o };
    for (int i = 0; i < 4; i++) {
        esa_device_free(f->ctx, t[i]->data);
        free(f->host[i]);
    }
    esa_ctx_free(f->ctx);
}

/* The output as bytes on the host; the caller frees. */
static uint16_t *output(const fixture *f)
{
    uint16_t *bits = malloc(SIZE * 2);
    assert_non_null(bits);
    must(f->ctx, esa_device_download(f->ctx, bits, f->o.data, SIZE * 2));
    return bits;
}

static esa_select_params params(int32_t selector)
{
    esa_select_params p = esa_select_params_default(selector);
    p.block_q = p.block_k = 64;
    p.budget = 0.4;
    p.layout.grid_q[0] = 5;
    p.layout.grid_q[1] = p.layout.grid_q[2] = 9;
    p.layout.text_back_q = N - 5 * 81;
    p.layout.order = ESA_ORDER_HILBERT;
    return p;
}

static esa_shapes shapes(void)
{
    esa_shapes s = shapes_of(ESA_DTYPE_BF16, B, H, N, D);
    s.device = ESA_DEVICE_CUDA;
    return s;
}

static void device_and_memory(void **state)
{
    (void)state;
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    int32_t count = 0;
    esa_device_info info = { .struct_size = sizeof info };
    must(ctx, esa_device_count(ctx, &count));
    assert_true(count >= 1);
    must(ctx, esa_device_get_info(ctx, &info));
    printf("%d GPU(s), number %d: %s, compute %d.%d, %d multiprocessors, %.1f of %.1f GiB free, "
           "driver %d, runtime %d, kernels %s, plugin %s\n",
           (int)count, (int)info.ordinal, info.name, (int)info.major, (int)info.minor,
           (int)info.multiprocessors, (double)info.free_memory / 0x1p30,
           (double)info.memory / 0x1p30, (int)info.driver, (int)info.runtime, info.kernels,
           info.plugin);
    assert_true(info.memory > 0 && info.free_memory > 0 && info.kernels[0] && info.plugin[0] &&
                info.name[0]);

    unsigned char in[1000], out[1000];
    for (int i = 0; i < 1000; i++) in[i] = (unsigned char)(i * 7);
    void *ptr, *nothing;
    must(ctx, esa_device_alloc(ctx, &ptr, 1000));
    must(ctx, esa_device_alloc(ctx, &nothing, 0));
    must(ctx, esa_device_upload(ctx, ptr, in, 1000));
    must(ctx, esa_device_upload(ctx, nothing, in, 0));
    memset(in, 0, sizeof in); /* the source may change once upload has returned */
    must(ctx, esa_device_download(ctx, out, ptr, 1000));
    must(ctx, esa_device_sync(ctx));
    for (int i = 0; i < 1000; i++) assert_int_equal(out[i], (unsigned char)(i * 7));
    esa_device_free(ctx, ptr);
    esa_device_free(ctx, nothing);

    ptr = &ctx; /* more than any GPU has: a status, and the next call works */
    refused(ctx, esa_device_alloc(ctx, &ptr, INT64_C(1) << 50), ESA_ERR_MEMORY, "GPU");
    assert_null(ptr);
    must(ctx, esa_device_alloc(ctx, &ptr, 16));
    esa_device_free(ctx, ptr);
    esa_ctx_free(ctx);

    esa_ctx_params cp = esa_ctx_params_default();
    cp.cuda_device = count;
    assert_int_equal(esa_ctx_create(&ctx, &cp), ESA_OK);
    refused(ctx, esa_device_alloc(ctx, &ptr, 16), ESA_ERR_DEVICE, "no GPU");
    esa_ctx_free(ctx);
    const char *lowered = getenv("ESA_CUDA");
    char *keep = lowered ? strdup(lowered) : NULL;
    setenv("ESA_CUDA", "nonsense", 1);
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    refused(ctx, esa_device_get_info(ctx, &info), ESA_ERR_UNSUPPORTED, "nonsense");
    if (keep)
        setenv("ESA_CUDA", keep, 1);
    else
        unsetenv("ESA_CUDA");
    must(ctx, esa_device_get_info(ctx, &info)); /* the same ctx, asked again */
    free(keep);
    esa_ctx_free(ctx);
}

/* One call, plan tier with the ctx's scratch, plan tier with the caller's: the same bits, each
 * twice. */
static void tiers_agree(void **state)
{
    (void)state;
    fixture f = fresh();
    for (int32_t selector = ESA_SELECT_FULL; selector <= ESA_SELECT_RANDOM; selector++)
        for (int32_t tail = 0; tail < 3; tail++)
            for (int32_t applied = 0; applied < 2; applied++) {
                esa_select_params sp = params(selector);
                sp.layout.order_applied = applied;
                esa_attention_params ap = esa_attention_params_default();
                ap.tail = tail;
                esa_mask *mask, *planned;
                must(f.ctx, esa_select(f.ctx, &mask, &f.q, &f.k, &sp));
                assert_int_equal(kit_info(mask).device, ESA_DEVICE_CUDA);
                must(f.ctx, esa_attention(f.ctx, &f.q, &f.k, &f.v, &f.o, mask, &ap));
                uint16_t *first = output(&f);

                const esa_shapes s = shapes();
                esa_plan *plan;
                int64_t bytes;
                void *ws;
                must(f.ctx, esa_plan_create(f.ctx, &plan, &s, &sp, &ap));
                must(f.ctx, esa_plan_workspace(plan, &bytes));
                must(f.ctx, esa_mask_create(plan, &planned));
                must(f.ctx, esa_device_alloc(f.ctx, &ws, bytes + 256));
                unsigned char guard[256], seen[256];
                memset(guard, 0xa5, sizeof guard);
                must(f.ctx, esa_device_upload(f.ctx, (char *)ws + bytes, guard, 256));
                for (int run = 0; run < 3; run++) {
                    void *scratch = run == 2 ? NULL : ws;
                    must(f.ctx, esa_device_upload(f.ctx, f.o.data, f.host[3], SIZE * 2));
                    must(f.ctx, esa_plan_select(plan, planned, &f.q, &f.k, scratch));
                    must(f.ctx,
                         esa_plan_attention(plan, planned, &f.q, &f.k, &f.v, &f.o, NULL, scratch));
                    uint16_t *again = output(&f);
                    if (memcmp(first, again, SIZE * 2))
                        fail_msg("selector %d tail %d applied %d run %d: other bits than one call",
                                 (int)selector, (int)tail, (int)applied, run);
                    free(again);
                }
                must(f.ctx, esa_device_download(f.ctx, seen, (char *)ws + bytes, 256));
                assert_memory_equal(seen, guard, 256); /* exactly the announced bytes */
                const char *kernel = esa_plan_kernel(plan, planned, &f.q, &f.k, &f.v, &f.o);
                if (tail == 0 && applied == 0)
                    printf("selector %d: kernel %s, workspace %.2f MB\n", (int)selector, kernel,
                           (double)bytes / 1e6);
                assert_true(kernel[0] != 0);
                uint8_t *a = kit_bytes(mask), *b = kit_bytes(planned);
                const esa_mask_info info = kit_info(mask), other = kit_info(planned);
                assert_memory_equal(a, b, (size_t)(info.B * info.H * info.nq * info.nk));
                assert_int_equal(info.kept, other.kept);
                free(a);
                free(b);
                esa_device_free(f.ctx, ws);
                free(first);
                esa_mask_free(mask);
                esa_mask_free(planned);
                esa_plan_free(plan);
            }
    int64_t held, peak;
    esa_device_memory(f.ctx, &held, &peak);
    assert_true(held > 0 && peak >= held);
    esa_ctx_trim(f.ctx);
    esa_device_memory(f.ctx, &held, &peak);
    assert_true(held == 0 && peak > 0);
    finish(&f);
}

/* A ctx that changes its stream: the same bits, and the mask made on one is good on the other. */
static void another_stream(void **state)
{
    (void)state;
    fixture f = fresh();
    /* CUDA's names for the legacy and the per-thread default stream */
    void *const streams[] = { (void *)1, (void *)2, NULL };
    const esa_select_params sp = params(ESA_SELECT_RF_V2);
    esa_mask *mask;
    must(f.ctx, esa_select(f.ctx, &mask, &f.q, &f.k, &sp));
    must(f.ctx, esa_attention(f.ctx, &f.q, &f.k, &f.v, &f.o, mask, NULL));
    uint16_t *first = output(&f);
    for (int i = 0; i < 3; i++)
        for (int twice = 0; twice < 2; twice++) {
            must(f.ctx, esa_ctx_set_stream(f.ctx, streams[i]));
            must(f.ctx, esa_device_upload(f.ctx, f.o.data, f.host[3], SIZE * 2));
            must(f.ctx, esa_attention(f.ctx, &f.q, &f.k, &f.v, &f.o, mask, NULL));
            uint16_t *again = output(&f);
            assert_memory_equal(first, again, SIZE * 2);
            free(again);
        }
    free(first);
    esa_mask_free(mask);
    finish(&f);
}

/* Copies of masks carry lists, layout and facts; a CPU mask in one call gives the bits of its copy
 * on the GPU. */
static void masks_travel(void **state)
{
    (void)state;
    fixture f = fresh();
    for (int32_t order = ESA_ORDER_RASTER; order <= ESA_ORDER_HILBERT; order += 3) {
        esa_select_params p = params(ESA_SELECT_ENTROPY);
        p.layout.order = order;
        esa_mask *gpu, *cpu, *back;
        must(f.ctx, esa_select(f.ctx, &gpu, &f.q, &f.k, &p));
        must(f.ctx, esa_mask_to_device(f.ctx, &cpu, gpu, ESA_DEVICE_CPU));
        must(f.ctx, esa_mask_to_device(f.ctx, &back, cpu, ESA_DEVICE_CUDA));
        const esa_mask_info a = kit_info(gpu), b = kit_info(cpu), c = kit_info(back);
        assert_int_equal(a.device, ESA_DEVICE_CUDA);
        assert_int_equal(b.device, ESA_DEVICE_CPU);
        assert_int_equal(c.device, ESA_DEVICE_CUDA);
        assert_int_equal(a.kept, b.kept);
        assert_int_equal(a.kept, c.kept);
        assert_true(a.density == b.density && a.density == c.density &&
                    a.density_asked == c.density_asked);
        assert_memory_equal(&a.layout, &c.layout, sizeof a.layout);
        const size_t cells = (size_t)(a.B * a.H * a.nq * a.nk), width = (size_t)((a.nk + 7) / 8),
                     rows = (size_t)(a.B * a.H * a.nq);
        uint8_t *x = kit_bytes(gpu), *y = kit_bytes(cpu), *z = kit_bytes(back), *bits[2];
        assert_memory_equal(x, y, cells);
        assert_memory_equal(x, z, cells);
        int32_t *count[2], *index[2];
        for (int i = 0; i < 2; i++) {
            const esa_mask *m = i ? gpu : cpu;
            bits[i] = malloc(rows * width);
            count[i] = malloc(rows * 4);
            index[i] = malloc(rows * (size_t)a.nk * 4);
            must(f.ctx, esa_mask_to_bits(m, bits[i]));
            must(f.ctx, esa_mask_to_fa4(m, count[i], index[i]));
        }
        assert_memory_equal(bits[0], bits[1], rows * width);
        assert_memory_equal(count[0], count[1], rows * 4);
        assert_memory_equal(index[0], index[1], rows * (size_t)a.nk * 4);
        const esa_mask *all[] = { gpu, cpu, back };
        uint16_t *first = NULL;
        for (int i = 0; i < 3; i++) {
            must(f.ctx, esa_attention(f.ctx, &f.q, &f.k, &f.v, &f.o, all[i], NULL));
            uint16_t *now = output(&f);
            if (first)
                assert_memory_equal(first, now, SIZE * 2);
            else
                first = now;
            if (first != now) free(now);
        }
        /* A mask on the GPU outlives its ctx and serves another one. */
        esa_ctx *other;
        assert_int_equal(esa_ctx_create(&other, NULL), ESA_OK);
        esa_mask *made;
        must(other, esa_select(other, &made, &f.q, &f.k, &p));
        esa_ctx_free(other);
        must(f.ctx, esa_attention(f.ctx, &f.q, &f.k, &f.v, &f.o, made, NULL));
        uint16_t *now = output(&f);
        assert_memory_equal(first, now, SIZE * 2);
        free(now);
        free(first);
        esa_mask_free(made);
        for (int i = 0; i < 2; i++) {
            free(bits[i]);
            free(count[i]);
            free(index[i]);
        }
        free(x);
        free(y);
        free(z);
        esa_mask_free(gpu);
        esa_mask_free(cpu);
        esa_mask_free(back);
    }
    finish(&f);
}

/* Views on the wrong device, misaligned, or overlapping. */
static void bad_views(void **state)
{
    (void)state;
    fixture f = fresh();
    esa_mask *mask;
    esa_tensor bad = f.k;
    bad.device = ESA_DEVICE_CPU;
    bad.data = f.host[1];
    refused(f.ctx, esa_attention(f.ctx, &f.q, &bad, &f.v, &f.o, NULL, NULL), ESA_ERR_DEVICE,
            "different devices");
    refused(f.ctx, esa_select(f.ctx, &mask, &f.q, &bad, NULL), ESA_ERR_DEVICE, "different devices");
    bad = f.q;
    bad.device_index = 3;
    refused(f.ctx, esa_attention(f.ctx, &bad, &f.k, &f.v, &f.o, NULL, NULL), ESA_ERR_DEVICE,
            "GPU 3");
    bad = f.v;
    /* half an element: a GPU that tried would be lost for the whole process */
    bad.data = (char *)bad.data + 1;
    refused(f.ctx, esa_attention(f.ctx, &f.q, &f.k, &bad, &f.o, NULL, NULL), ESA_ERR_UNSUPPORTED,
            "not a multiple of its element size (2 bytes)");
    refused(f.ctx, esa_select(f.ctx, &mask, &bad, &f.k, NULL), ESA_ERR_UNSUPPORTED,
            "not a multiple of its element size (2 bytes)");
    esa_select_params rounding = params(ESA_SELECT_ENTROPY);
    rounding.mode = ESA_MODE_COMPAT_ROUND;
    refused(f.ctx, esa_select(f.ctx, &mask, &f.q, &f.k, &rounding), ESA_ERR_UNSUPPORTED,
            "compat-round");
    float lse_host[4];
    esa_tensor lse = esa_tensor_bnsd(lse_host, ESA_DTYPE_F32, B, H, N, 1);
    esa_attention_params ap = esa_attention_params_default();
    ap.lse = &lse;
    refused(f.ctx, esa_attention(f.ctx, &f.q, &f.k, &f.v, &f.o, NULL, &ap), ESA_ERR_DEVICE, "lse");
    refused(f.ctx, esa_attention(f.ctx, &f.q, &f.k, &f.v, &f.q, NULL, NULL), ESA_ERR_ARGUMENT,
            "overlaps");
    finish(&f);
}

/* Plans without a selector: shapes they refuse, and masks that do not fit. */
static void bad_plans(void **state)
{
    (void)state;
    fixture f = fresh();
    esa_mask *mask, *hilbert, *cpu;
    esa_shapes s = shapes();
    esa_plan *bare, *plan;
    s.D = 300;
    refused(f.ctx, esa_plan_create(f.ctx, &plan, &s, NULL, NULL), ESA_ERR_UNSUPPORTED, "300");
    s = shapes();
    s.device_index = 5;
    refused(f.ctx, esa_plan_create(f.ctx, &plan, &s, NULL, NULL), ESA_ERR_DEVICE, "5");
    s = shapes();
    must(f.ctx, esa_plan_create(f.ctx, &bare, &s, NULL, NULL));
    esa_select_params p = params(ESA_SELECT_RANDOM);
    must(f.ctx, esa_select(f.ctx, &hilbert, &f.q, &f.k, &p));
    refused(f.ctx, esa_plan_attention(bare, hilbert, &f.q, &f.k, &f.v, &f.o, NULL, NULL),
            ESA_ERR_UNSUPPORTED, "gather");
    p.layout.order = ESA_ORDER_RASTER;
    must(f.ctx, esa_select(f.ctx, &mask, &f.q, &f.k, &p));
    must(f.ctx, esa_plan_attention(bare, mask, &f.q, &f.k, &f.v, &f.o, NULL, NULL));
    must(f.ctx, esa_mask_to_device(f.ctx, &cpu, mask, ESA_DEVICE_CPU));
    assert_string_equal(esa_plan_kernel(bare, cpu, &f.q, &f.k, &f.v, &f.o), "");
    refused(f.ctx, esa_plan_attention(bare, cpu, &f.q, &f.k, &f.v, &f.o, NULL, NULL),
            ESA_ERR_DEVICE, "esa_mask_to_device");
    esa_tensor host = esa_tensor_bnsd(f.host[0], ESA_DTYPE_BF16, B, H, N, D);
    on_gpu_set(0); /* CPU views into a GPU plan, and a GPU mask into a CPU call */
    refused(f.ctx, esa_plan_attention(bare, mask, &host, &host, &host, &host, NULL, NULL),
            ESA_ERR_DEVICE, "");
    esa_tensor hk = host, hv = host, ho = host;
    hk.data = f.host[1];
    hv.data = f.host[2];
    ho.data = f.host[3];
    refused(f.ctx, esa_attention(f.ctx, &host, &hk, &hv, &ho, mask, NULL), ESA_ERR_DEVICE, "");
    on_gpu_set(-1);
    esa_mask_free(cpu);
    esa_mask_free(mask);
    esa_mask_free(hilbert);
    esa_plan_free(bare);
    finish(&f);
}

/* Empty masks, masks of another plan, and workspaces that do not fit. */
static void bad_masks(void **state)
{
    (void)state;
    fixture f = fresh();
    esa_mask *empty, *mask, *hilbert, *cpu;
    esa_plan *plan;
    const esa_shapes s = shapes();
    esa_select_params p = params(ESA_SELECT_RANDOM);
    must(f.ctx, esa_select(f.ctx, &hilbert, &f.q, &f.k, &p));
    p.layout.order = ESA_ORDER_RASTER;
    must(f.ctx, esa_select(f.ctx, &mask, &f.q, &f.k, &p));
    must(f.ctx, esa_mask_to_device(f.ctx, &cpu, mask, ESA_DEVICE_CPU));
    must(f.ctx, esa_plan_create(f.ctx, &plan, &s, &p, NULL));
    must(f.ctx, esa_mask_create(plan, &empty));
    refused(f.ctx, esa_plan_attention(plan, empty, &f.q, &f.k, &f.v, &f.o, NULL, NULL),
            ESA_ERR_STATE, "empty");
    assert_string_equal(esa_plan_kernel(plan, empty, &f.q, &f.k, &f.v, &f.o), "");
    assert_non_null(strstr(esa_ctx_error(f.ctx), "empty"));
    assert_string_equal(esa_plan_kernel(plan, NULL, &f.q, &f.k, &f.v, NULL), "");
    /* an empty mask describes itself as it does on the CPU */
    const esa_mask_info nothing = kit_info(empty);
    assert_true(isnan(nothing.density_asked) && nothing.density == 0 && nothing.kept == 0 &&
                nothing.selector == -1);
    refused(f.ctx, esa_mask_create(plan, NULL), ESA_ERR_ARGUMENT, "mask is NULL");
    refused(f.ctx, esa_plan_workspace(plan, NULL), ESA_ERR_ARGUMENT, "bytes is NULL");
    void *ws;
    int64_t bytes;
    must(f.ctx, esa_plan_workspace(plan, &bytes));
    must(f.ctx, esa_device_alloc(f.ctx, &ws, bytes + 64));
    refused(f.ctx, esa_plan_select(plan, empty, &f.q, &f.k, (char *)ws + 8), ESA_ERR_ARGUMENT,
            "multiple of 64");
    refused(f.ctx, esa_plan_select(plan, cpu, &f.q, &f.k, ws), ESA_ERR_MISMATCH, "esa_mask_create");
    refused(f.ctx, esa_plan_attention(plan, hilbert, &f.q, &f.k, &f.v, &f.o, NULL, ws),
            ESA_ERR_MISMATCH, "order");
    /* a selection would change the order of the mask, but not its permutations */
    refused(f.ctx, esa_plan_select(plan, hilbert, &f.q, &f.k, ws), ESA_ERR_MISMATCH,
            "the mask was made for order 3, but the plan selects in order 0");
    must(f.ctx, esa_attention(f.ctx, &f.q, &f.k, &f.v, &f.o, hilbert, NULL));
    must(f.ctx, esa_plan_select(plan, empty, &f.q, &f.k, ws));
    must(f.ctx, esa_plan_attention(plan, empty, &f.q, &f.k, &f.v, &f.o, NULL, ws));
    must(f.ctx, esa_device_sync(f.ctx));
    esa_device_free(f.ctx, ws);
    esa_mask_free(empty);
    esa_mask_free(cpu);
    esa_mask_free(mask);
    esa_mask_free(hilbert);
    esa_plan_free(plan);
    finish(&f);
}

/* Lengths on the GPU are read at every call; outside 0 .. Nk they count as the nearer end. */
static void lengths_on_the_gpu(void **state)
{
    (void)state;
    fixture f = fresh();
    static const int32_t given[][B] = { { N + 9, -4 }, { N, 0 }, { 77, 400 } };
    int32_t *len;
    must(f.ctx, esa_device_alloc(f.ctx, (void **)&len, B * 4));
    esa_select_params p = params(ESA_SELECT_ENTROPY);
    p.layout = esa_layout_default();
    esa_attention_params ap = esa_attention_params_default();
    p.kv_len = ap.kv_len = len;
    const esa_shapes s = shapes();
    esa_plan *plan;
    esa_mask *mask;
    must(f.ctx, esa_device_upload(f.ctx, len, given[0], B * 4));
    must(f.ctx, esa_plan_create(f.ctx, &plan, &s, &p, &ap));
    must(f.ctx, esa_mask_create(plan, &mask));
    uint16_t *out[3];
    uint8_t *keep[3];
    for (int i = 0; i < 3; i++) {
        must(f.ctx, esa_device_upload(f.ctx, len, given[i], B * 4));
        must(f.ctx, esa_plan_select(plan, mask, &f.q, &f.k, NULL));
        must(f.ctx, esa_plan_attention(plan, mask, &f.q, &f.k, &f.v, &f.o, NULL, NULL));
        out[i] = output(&f);
        keep[i] = kit_bytes(mask);
    }
    const esa_mask_info info = kit_info(mask);
    const size_t cells = (size_t)(info.B * info.H * info.nq * info.nk);
    assert_memory_equal(out[0], out[1], SIZE * 2);
    assert_memory_equal(keep[0], keep[1], cells);
    assert_memory_not_equal(out[1], out[2], SIZE * 2);
    /* batch entry 1 sees no key */
    for (size_t i = SIZE / 2; i < SIZE; i++) assert_int_equal(out[1][i] & 0x7fff, 0);
    for (int i = 0; i < 3; i++) {
        free(out[i]);
        free(keep[i]);
    }
    esa_mask_free(mask);
    esa_plan_free(plan);
    esa_device_free(f.ctx, len);
    finish(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(device_and_memory), cmocka_unit_test(tiers_agree),
        cmocka_unit_test(another_stream),    cmocka_unit_test(masks_travel),
        cmocka_unit_test(bad_views),         cmocka_unit_test(bad_plans),
        cmocka_unit_test(bad_masks),         cmocka_unit_test(lengths_on_the_gpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
