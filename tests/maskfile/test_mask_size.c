/* test_mask_size.c - how large mask files are, and what the 8-bit code costs in masks.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The promise is about L=30, T=50, H=12, nq=128, nk=256. Files here have L=30, T=5, H=2 and the
 * same nq and nk: the shares that are stored (29 of 30 layers, 4 of 5 steps) are the same, so all
 * tensors scale by 60 and the header, which does not, counts sixty times as much as in the full
 * file. */
#define ESA_EXPERIMENTAL
#include "session/mini_model.h"
#include <math.h>
#include "common/one_ctx.h"
#include "select/select.h"
#include "maskfile/mask_file.h"
#include "maskfile/recording.h"

enum { NQ = 128, NK = 256 };

static double normal(esa_rng *r)
{
    const uint64_t u = esa_rng_next(r); /* four uniforms of 16 bits, scaled to variance 1 */
    return ((double)((u & 65535) + (u >> 16 & 65535) + (u >> 32 & 65535) + (u >> 48)) / 65536 - 2) *
           1.7320508;
}

static esa_mask_file_info describe(int32_t layers, int32_t steps, int64_t H)
{
    esa_mask_file_info f;
    memset(&f, 0, sizeof f);
    f.struct_size = sizeof f;
    f.format_version = 1;
    f.selector = ESA_SELECT_ENTROPY;
    f.samples = 4;
    f.block_q = 256;
    f.block_k = 128;
    f.layers = layers;
    f.steps = f.groups = steps;
    f.branches = 1;
    f.prompts = 1;
    f.H = H;
    f.nq = NQ;
    f.nk = NK;
    f.Nq = 128 * 256 - 8; /* 21x30x52 tokens are 32760 */
    f.Nk = f.Nq;
    f.layout = esa_layout_default();
    f.layout.order = ESA_ORDER_RASTER;
    f.layout.protect_first_frame = 0;
    for (int i = 0; i < 3; i++)
        f.layout.grid_q[i] = f.layout.grid_k[i] = (int32_t[]){ 21, 30, 52 }[i];
    return f;
}

/* Rows made from a formula: natural logarithm = along_video * distance in frames + noise. */
enum { SHARP_ALONG_VIDEO, PEAKED_ANYWHERE, DIFFUSE, KINDS };

static void make_row(double *p, int kind, int64_t h, int64_t i, esa_rng *r)
{
    double sum = 0;
    for (int64_t j = 0; j < NK; j++) {
        const double frames = fabs((double)(2 * i - j)) / 12.2; /* 12.2 key blocks a frame */
        const double noise[KINDS] = { 1.5, 2.0 + 0.1 * (double)h, 0.25 };
        const double along_video = kind == SHARP_ALONG_VIDEO ? -0.3 * (1 + 0.3 * (double)h) : 0;
        p[j] = exp(along_video * frames + noise[kind] * normal(r));
        sum += p[j];
    }
    for (int64_t j = 0; j < NK; j++) p[j] /= sum;
}

/* A recording with `prompts` contributions: rows of a kind, or given
 * f32[prompts][cells][H][nq][nk]. exact, if not NULL, receives the mean importance
 * f32[cells][H][nq][nk] as it was before it became integers. */
static void write_recording(const char *path, const esa_mask_file_info *f, int kind,
                            const float *given, int prompts, uint64_t seed, float *exact)
{
    esa_tensors_writer *w;
    ok(ctx, esa_st_writer_open(ctx, &w, path));
    esa_mask_file_info g = *f;
    g.prompts = prompts;
    ok(ctx, esa_run_write(w, &g, "esa.recording"));
    const int64_t none = 0, count[3] = { 1, f->layers, f->steps },
                  cells = (int64_t)f->layers * f->steps, sums[4] = { cells, f->H, NQ, NK };
    ok(ctx, esa_st_writer_declare(w, "dense_layers", ESA_FILE_I32, 1, &none));
    ok(ctx, esa_st_writer_declare(w, "count", ESA_FILE_I32, 3, count));
    ok(ctx, esa_st_writer_declare(w, "sums", ESA_FILE_U32, 4, sums));
    for (int64_t c = 0; c < cells; c++) ok(ctx, esa_st_writer_data(w, &prompts, 4));
    esa_rng r = { seed };
    for (int64_t row = 0; row < cells * f->H * NQ; row++) {
        uint32_t sum[NK] = { 0 };
        double mean[NK] = { 0 }, p[NK];
        for (int k = 0; k < prompts; k++) {
            if (!given)
                make_row(p, kind, row / NQ % f->H, row % NQ, &r);
            else
                for (int64_t j = 0; j < NK; j++)
                    p[j] = (double)given[((int64_t)k * cells * f->H * NQ + row) * NK + j];
            for (int64_t j = 0; j < NK; j++) {
                sum[j] += (uint32_t)(p[j] * 16777216.0 + 0.5);
                mean[j] += p[j] / prompts;
            }
        }
        if (exact)
            for (int64_t j = 0; j < NK; j++) exact[row * NK + j] = (float)mean[j];
        ok(ctx, esa_st_writer_data(w, sum, sizeof sum));
    }
    ok(ctx, esa_st_writer_finish(w));
    esa_st_writer_close(w);
}

static int64_t build_size(scratch *s, const char *rec, int32_t importance, int32_t budget_count)
{
    static const double budgets[] = { 0.5, 0.3, 0.7 };
    esa_mask_build b = esa_mask_build_default();
    b.importance = importance;
    b.budgets = budgets;
    b.budget_count = budget_count;
    ok(ctx, esa_mask_file_build(ctx, scratch_path(s, "m"), &rec, 1, &b));
    struct stat st;
    assert_int_equal(stat(s->path, &st), 0);
    esa_mask_file *f;
    ok(ctx, esa_mask_file_open(ctx, &f, s->path));
    esa_mask_file_info i = { .struct_size = sizeof i };
    assert_int_equal(esa_mask_file_get_info(f, &i), ESA_OK);
    assert_int_equal(i.file_bytes, st.st_size);
    assert_int_equal(i.stored_layers, 29);
    assert_int_equal(i.stored_groups, 4);
    esa_mask_file_free(f);
    return st.st_size;
}

static void test_size(void **state)
{
    (void)state;
    scratch s = scratch_make();
    char rec[640];
    strcpy(rec, scratch_path(&s, "rec"));
    const esa_mask_file_info f = describe(30, 5, 2);
    print_message("seed 3\n");
    write_recording(rec, &f, 0, NULL, 1, 3, NULL);
    const double half = 30.0 * 5 * 2 * NQ * NK * 2; /* float16 importance of every layer and step */
    const double masks = (double)build_size(&s, rec, ESA_IMPORTANCE_NONE, 1) / half;
    const double coded = (double)build_size(&s, rec, ESA_IMPORTANCE_U8, 1) / half;
    const double three = (double)build_size(&s, rec, ESA_IMPORTANCE_U8, 3) / half;
    print_message(
        "one budget, no importance:   %.4f of float16 importance (1/%.1f; promised 1/18)\n", masks,
        1 / masks);
    print_message("u8 importance, one budget:   %.4f (promised %.4f)\n", coded, 0.53 + 1 / 18.0);
    print_message("u8 importance, 3 budgets:    %.4f (promised %.4f)\n", three, 0.53 + 3 / 18.0);
    assert_true(masks <= 1 / 18.0);
    assert_true(coded <= 0.53 + 1 / 18.0);
    assert_true(three <= 0.53 + 3 / 18.0);
    /* The full shape by arithmetic: tensors alone, in bytes. */
    const double cells = 29.0 * 40, full_half = 30.0 * 50 * 12 * NQ * NK * 2;
    const double full_masks = cells * 12 * (NQ * NK / 8 + 4 + 4),
                 full_codes = cells * 12 * NQ * (NK + NK / 4 + 4);
    print_message(
        "full shape: float16 %.0f MB, one budget %.1f MB (1/%.1f), u8 importance %.0f MB (%.4f)\n",
        full_half / 1e6, full_masks / 1e6, full_half / full_masks, full_codes / 1e6,
        full_codes / full_half);
    assert_true(full_masks * 18 <= full_half && full_codes <= 0.53 * full_half);
    /* The small file is no smaller than its share of the full one. */
    assert_true(masks >= full_masks / full_half && coded >= (full_masks + full_codes) / full_half);
    scratch_remove(&s);
}

/* Kept blocks of masks from exact f32 importance that masks from the file keep too; coarse: from u8
 * without its two fine bits. */
static double agreement(esa_mask_file *f, const esa_mask_file_info *info, const float *exact,
                        double budget, int32_t coarse, double *lost)
{
    esa_cell cell, other;
    ok(ctx, esa_cell_create(ctx, &cell, info));
    ok(ctx, esa_cell_create(ctx, &other, info));
    uint8_t *middle = malloc((size_t)(info->H * NQ * NK / 4)),
            *bits = malloc((size_t)(info->H * NQ * NK / 8));
    float heads[16];
    memset(middle, 0xaa, (size_t)(info->H * NQ * NK / 4));
    const int64_t rows = info->H * NQ, blocks = rows * NK;
    int64_t kept = 0, both = 0;
    double mass_exact = 0, mass_code = 0;
    for (int32_t c = 0; c < info->layers * info->steps; c++) {
        const float *p = exact + c * blocks;
        cell.args.params.budget = budget;
        esa_select_from_importance(&cell.args, cell.mask, p, cell.ws);
        esa_mask *owned, *coded;
        ok(ctx, esa_mask_file_get(f, &owned, c / info->steps, c % info->steps, 0, budget));
        coded = owned;
        if (coarse) {
            esa_cell_load_u8(&other, f->importance + c * blocks, middle);
            esa_cell_mask(&other, (int32_t)(1000 * budget + 0.5), bits, heads);
            coded = other.mask;
        }
        for (int64_t r = 0; r < rows; r++) {
            uint8_t in[NK] = { 0 };
            for (int32_t k = 0; k < coded->count[r]; k++) {
                in[coded->index[r * NK + k]] = 1;
                mass_code += (double)p[r * NK + coded->index[r * NK + k]];
            }
            for (int32_t k = 0; k < cell.mask->count[r]; k++) {
                both += in[cell.mask->index[r * NK + k]];
                mass_exact += (double)p[r * NK + cell.mask->index[r * NK + k]];
            }
            kept += cell.mask->count[r];
        }
        esa_mask_free(owned);
    }
    esa_cell_free(&cell);
    esa_cell_free(&other);
    free(middle);
    free(bits);
    *lost = (mass_exact - mass_code) / mass_exact;
    return (double)both / (double)kept;
}

/* q and k of heads as video transformers have them: a constant vector turned by a rotary embedding
 * over t, h, w (which makes attention local along an axis by its strength there), drifting content,
 * noise. gain multiplies the logits. */
static void video_head(float *q, float *k, const int32_t g[3], int D, const double strength[4],
                       double gain, esa_rng *r)
{
    const int P = D / 2, each = P / 3, share[3] = { P - 2 * each, each, each };
    const double root = sqrt((double)D);
    static double turn[32][64][2]; /* cos and sin of pair f at a place of its axis */
    double wave[32][4], base[32], content[32];
    int axis_of[32];
    for (int axis = 0, f = 0; axis < 3; axis++)
        for (int i = 0; i < share[axis]; i++, f++) {
            const double speed = pow(10000.0, -(double)i / share[axis]);
            axis_of[f] = axis;
            base[f] = speed >= 0.15 ? sqrt(strength[axis] * root / 3) : 0;
            content[f] = speed < 0.02 ? sqrt(strength[3] * root / 4) : 0;
            for (int place = 0; place < g[axis]; place++) {
                turn[f][place][0] = cos(speed * place);
                turn[f][place][1] = sin(speed * place);
            }
            for (int k4 = 0; k4 < 4; k4++)
                wave[f][k4] = (double)esa_rng_unit(r) * (k4 < 3 ? 0.6 : 6.28);
        }
    int64_t n = 0;
    for (int t = 0; t < g[0]; t++)
        for (int y = 0; y < g[1]; y++)
            for (int x = 0; x < g[2]; x++, n++)
                for (int f = 0; f < P; f++) {
                    const int place = axis_of[f] == 0 ? t : axis_of[f] == 1 ? y : x;
                    const double c = turn[f][place][0], s = turn[f][place][1];
                    double re = base[f];
                    if (content[f] > 0)
                        re += content[f] *
                              cos(wave[f][0] * t + wave[f][1] * y + wave[f][2] * x + wave[f][3]);
                    q[n * D + 2 * f] = (float)(gain * (c * re + 0.3 * normal(r)));
                    q[n * D + 2 * f + 1] = (float)(gain * (s * re + 0.3 * normal(r)));
                    k[n * D + 2 * f] = (float)(c * re + 0.3 * normal(r));
                    k[n * D + 2 * f + 1] = (float)(s * re + 0.3 * normal(r));
                }
}

/* Importance of four such heads, measured by the selector: local, temporal, mostly content,
 * diffuse. */
static void measure(float *out, double gain, uint64_t seed)
{
    static const double kinds[4][4] = {
        { 3, 4, 4, 1 }, { 0.4, 5.5, 5.5, 1.2 }, { 0.5, 1.5, 1.5, 6 }, { 0.4, 0.8, 0.8, 2 }
    };
    const int32_t grid[3] = { 21, 30, 52 };
    const int64_t N = 21 * 30 * 52, D = 64;
    float *q = malloc((size_t)(4 * N * D) * 4), *k = malloc((size_t)(4 * N * D) * 4);
    assert_true(q && k);
    esa_rng r = { seed };
    for (int h = 0; h < 4; h++)
        video_head(q + h * N * D, k + h * N * D, grid, (int)D, kinds[h], gain, &r);
    const esa_tensor tq = esa_tensor_bnsd(q, ESA_DTYPE_F32, 1, 4, N, D),
                     tk = esa_tensor_bnsd(k, ESA_DTYPE_F32, 1, 4, N, D);
    esa_select_params p = esa_select_params_default(ESA_SELECT_ENTROPY);
    for (int i = 0; i < 3; i++) p.layout.grid_q[i] = grid[i];
    double e[4];
    ok(ctx, esa_importance(ctx, out, e, &tq, &tk, &p));
    print_message("video-like heads, logits x %.1f, seed %llu: entropies %.2f %.2f %.2f %.2f\n",
                  gain, (unsigned long long)seed, e[0], e[1], e[2], e[3]);
    free(q);
    free(k);
}

static esa_mask_file *open_built(scratch *s, const char *rec, int32_t importance)
{
    esa_mask_build b = esa_mask_build_default();
    b.importance = importance;
    b.store_dense = 1;
    ok(ctx, esa_mask_file_build(ctx, scratch_path(s, "m"), &rec, 1, &b));
    esa_mask_file *f;
    ok(ctx, esa_mask_file_open(ctx, &f, s->path));
    return f;
}

/* Prints the agreement at four budgets; returns the mean of the first three. */
static double report(const char *name, const char *rec, scratch *s, const esa_mask_file_info *info,
                     const float *exact)
{
    static const double budgets[] = { 0.7, 0.5, 0.3, 0.1 };
    esa_mask_file *coded = open_built(s, rec, ESA_IMPORTANCE_U8),
                  *half = open_built(s, rec, ESA_IMPORTANCE_F16);
    double sum = 0;
    print_message("%-28s", name);
    for (int b = 0; b < 4; b++) {
        double lost, ignored;
        const double a = agreement(coded, info, exact, budgets[b], 0, &lost);
        const double h = agreement(half, info, exact, budgets[b], 0, &ignored),
                     c = agreement(coded, info, exact, budgets[b], 1, &ignored);
        print_message("  %.1f: %.2f%% (8 bits alone %.2f%%, f16 %.2f%%; mass lost %.0e)",
                      budgets[b], 100 * a, 100 * c, 100 * h, lost);
        assert_true(lost < 1e-3);
        if (b < 3) sum += a / 3;
    }
    print_message("\n");
    esa_mask_file_free(coded);
    esa_mask_file_free(half);
    return sum;
}

static void test_agreement(void **state)
{
    (void)state;
    static const char *const names[] = { "formula: sharp, 4 prompts", "formula: peaked, 4 prompts",
                                         "formula: diffuse, 4 prompts" };
    scratch s = scratch_make();
    char rec[640];
    strcpy(rec, scratch_path(&s, "rec"));
    esa_mask_file_info info = describe(1, 1, 4);
    const int64_t blocks = 4 * NQ * NK;
    float *exact = malloc((size_t)(3 * blocks) * sizeof *exact),
          *given = malloc((size_t)(2 * blocks) * sizeof *given);
    double video = 0;
    for (int i = 0; i < 3; i++) {
        /* 1, 2, 4: as trained, sharp, sharper than the integers can follow */
        const double gain = 0.5 * pow(2, i + 1);
        for (int k = 0; k < 2; k++) measure(given + k * blocks, gain, (uint64_t)(100 + k));
        write_recording(rec, &info, 0, given, 2, 0, exact);
        char name[64];
        snprintf(name, sizeof name, "video-like x %.0f, 2 prompts", gain);
        const double a = report(name, rec, &s, &info, exact);
        if (i < 2) video += a / 2;
    }
    for (int kind = 0; kind < KINDS; kind++) {
        write_recording(rec, &info, kind, NULL, 4, (uint64_t)(11 + kind), exact);
        report(names[kind], rec, &s, &info, exact);
    }
    print_message("video-like heads, budgets 0.7, 0.5, 0.3: %.3f%% of kept blocks agree with f32 "
                  "importance (promised 99.5%%)\n",
                  100 * video);
    assert_true(video >= 0.995);
    free(exact);
    free(given);
    scratch_remove(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_size),
                                        cmocka_unit_test(test_agreement) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
