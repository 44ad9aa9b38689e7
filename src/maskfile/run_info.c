/* run_info.c - run info as metadata; see run_info.h.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Numbers are written and read with integer arithmetic only, so the locale of the program
 * does not matter. */
#include "maskfile/run_info.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base/status.h"
#include "mask/mask.h"

#define GIVEN "given" /* the name of no selector: the caller made the masks */
static const char *const mode_names[] = { "fixed", "compat", "compat-round" };
static const char *const order_names[] = { "raster", "tile", "tile3d", "hilbert" };
static const char *const importance_names[] = { "none", "u8", "f16" };
static const char *const tail_names[] = { "none", "pooled", "centroid", "levels" };

void esa_run_bind(esa_select_args *args, const esa_ctx *ctx, int32_t selector,
                  const esa_mask_file_info *info)
{
    args->kern = ctx->kern;
    args->pool = ctx->pool;
    args->params = esa_select_params_default(selector);
    args->params.mode = info->mode;
    args->params.block_q = info->block_q;
    args->params.block_k = info->block_k;
    args->params.layout = info->layout;
    args->params.scale = 1; /* resolved params need a scale; stored scores do not */
    args->dtype = ESA_DTYPE_F32;
    args->B = 1;
    args->Hq = args->Hkv = info->H;
    args->Nq = info->Nq;
    args->Nk = info->Nk;
    args->D = 1; /* q, k and v are not read, but the scratch size depends on it */
    args->nq = info->nq;
    args->nk = info->nk;
}

int32_t esa_warmup_steps(double frac, int32_t steps)
{
    const double n = ceil(frac * steps - 1e-9);
    return !(n > 0) ? 0 : n >= steps ? steps : (int32_t)n;
}

esa_run_text esa_run_describe(int64_t Nq, int64_t Nk, const int32_t grid_q[3], int64_t H,
                              int32_t layers, int32_t steps)
{
    esa_run_text r;
    int n = snprintf(r.text, sizeof r.text, "N=%lld", (long long)Nq);
    if (Nk != Nq) n += snprintf(r.text + n, sizeof r.text - (size_t)n, " x %lld", (long long)Nk);
    if (grid_q[0])
        n += snprintf(r.text + n, sizeof r.text - (size_t)n, " (grid %dx%dx%d)", grid_q[0],
                      grid_q[1], grid_q[2]);
    n += snprintf(r.text + n, sizeof r.text - (size_t)n, ", %lld heads", (long long)H);
    if (layers >= 0) n += snprintf(r.text + n, sizeof r.text - (size_t)n, ", %d layers", layers);
    if (steps >= 0) snprintf(r.text + n, sizeof r.text - (size_t)n, ", %d steps", steps);
    return r;
}

esa_run_text esa_run_describe_layout(const esa_layout *y)
{
    esa_run_text r;
    const size_t room = sizeof r.text;
    int n = y->grid_q[0]
                ? snprintf(r.text, room, "grid %dx%dx%d", y->grid_q[0], y->grid_q[1], y->grid_q[2])
                : snprintf(r.text, room, "no grid");
    n += snprintf(r.text + n, room - (size_t)n, ", order %s",
                  y->order < 0 ? "default" : order_names[y->order]);
    if (y->order == ESA_ORDER_TILE3D)
        n += snprintf(r.text + n, room - (size_t)n, " %dx%dx%d", y->window[0], y->window[1],
                      y->window[2]);
    n += snprintf(r.text + n, room - (size_t)n, ", text %d + %d", y->text_front_q, y->text_back_q);
    if (memcmp(y->grid_q, y->grid_k, sizeof y->grid_q) != 0 || y->text_front_q != y->text_front_k ||
        y->text_back_q != y->text_back_k)
        n += snprintf(r.text + n, room - (size_t)n, " (keys: grid %dx%dx%d, text %d + %d)",
                      y->grid_k[0], y->grid_k[1], y->grid_k[2], y->text_front_k, y->text_back_k);
    snprintf(r.text + n, room - (size_t)n, ", frame 0 %sprotected",
             y->protect_first_frame == 1 ? "" : "not ");
    return r;
}

/* ---------------------------------------------------------------- writing */

static esa_status put_ints(esa_tensors_writer *w, const char *key, const int32_t *value, int n)
{
    char text[64];
    int used = 0;
    for (int i = 0; i < n; i++)
        used += snprintf(text + used, sizeof text - (size_t)used, i ? ",%d" : "%d", value[i]);
    return esa_st_writer_metadata(w, key, text);
}

static esa_status put_int64(esa_tensors_writer *w, const char *key, int64_t value)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    return esa_st_writer_metadata(w, key, text);
}

/* 0 .. 1 with 15 decimals, so that every usual fraction reads back as the same double. */
static esa_status put_fraction(esa_tensors_writer *w, const char *key, double value)
{
    const int64_t units = (int64_t)floor(value * 1e15 + 0.5);
    char text[40];
    int n = snprintf(text, sizeof text, "%lld.%015lld",
                     (long long)(units / INT64_C(1000000000000000)),
                     (long long)(units % INT64_C(1000000000000000)));
    while (n > 3 && text[n - 1] == '0' && text[n - 2] != '.') text[--n] = 0;
    return esa_st_writer_metadata(w, key, text);
}

/* "0", or the 16 hex digits of an IEEE 754 double: exact and independent of the locale. */
static esa_status put_double(esa_tensors_writer *w, const char *key, double value)
{
    uint64_t bits;
    char text[20];
    memcpy(&bits, &value, 8);
    if (value == 0)
        strcpy(text, "0");
    else
        snprintf(text, sizeof text, "%016llx", (unsigned long long)bits);
    return esa_st_writer_metadata(w, key, text);
}

esa_status esa_run_write(esa_tensors_writer *w, const esa_mask_file_info *f, const char *format)
{
    const esa_layout *y = &f->layout;
    const struct {
        const char *key;
        int64_t value;
    } ints[] = { { "format_version", esa_run_version(f) },
                 { "layers", f->layers },
                 { "steps", f->steps },
                 { "groups", f->groups },
                 { "branches", f->branches },
                 { "prompts", f->prompts },
                 { "heads", f->H },
                 { "tokens_q", f->Nq },
                 { "tokens_k", f->Nk },
                 { "samples", f->samples },
                 { "causal", f->causal },
                 { "protect_first_frame", y->protect_first_frame },
                 { "dense_first_layer", f->dense_first_layer } };
    const int32_t block[2] = { f->block_q, f->block_k },
                  text_q[2] = { y->text_front_q, y->text_back_q },
                  text_k[2] = { y->text_front_k, y->text_back_k };
    const struct {
        const char *key;
        const int32_t *value;
        int n;
    } lists[] = { { "block", block, 2 },   { "grid_q", y->grid_q, 3 }, { "grid_k", y->grid_k, 3 },
                  { "text_q", text_q, 2 }, { "text_k", text_k, 2 },    { "window", y->window, 3 } };
    const struct {
        const char *key;
        const char *value;
    } words[] = { { "format", format },
                  { "model", f->model },
                  { "config_hash", f->config_hash },
                  { "selector", f->selector < 0 ? GIVEN : esa_selector_of(f->selector)->name },
                  { "mode", mode_names[f->mode] },
                  { "order", order_names[y->order] },
                  { "importance", importance_names[f->importance] } };
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        ESA_TRY(esa_st_writer_metadata(w, words[i].key, words[i].value));
    for (size_t i = 0; i < sizeof ints / sizeof ints[0]; i++)
        ESA_TRY(put_int64(w, ints[i].key, ints[i].value));
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++)
        ESA_TRY(put_ints(w, lists[i].key, lists[i].value, lists[i].n));
    ESA_TRY(put_fraction(w, "warmup_frac", f->warmup_frac));
    ESA_TRY(put_double(w, "scale", f->scale));
    if (esa_run_version(f) < ESA_MASK_FORMAT_LEVELS) return ESA_OK;
    const int32_t group[2] = { f->group_q, f->group_k };
    ESA_TRY(esa_st_writer_metadata(w, "tail", tail_names[f->tail]));
    ESA_TRY(put_int64(w, "fine", f->fine));
    ESA_TRY(put_int64(w, "exact_rows", f->exact_rows));
    return put_ints(w, "group", group, 2);
}

/* ---------------------------------------------------------------- reading */

typedef struct reader {
    esa_ctx *ctx;
    const esa_tensors *file;
    esa_status status; /* the first failure; later calls do nothing */
} reader;

static const char *get_text(reader *r, const char *key)
{
    if (r->status) return NULL;
    const char *text = esa_st_metadata(r->file, key);
    if (!text)
        r->status = esa_fail(r->ctx, ESA_ERR_FORMAT, "%s: metadata '%s' is missing", r->file->label,
                             key);
    return text;
}

static void bad_value(reader *r, const char *key, const char *text, const char *expected)
{
    if (!r->status)
        r->status = esa_fail(r->ctx, ESA_ERR_FORMAT, "%s: metadata '%s' is '%s', expected %s",
                             r->file->label, key, esa_quote(text).text, expected);
}

/* Reads n integers separated by commas, each within low .. high, in canonical decimal. */
static void get_ints(reader *r, const char *key, int64_t *value, int n, int64_t low, int64_t high)
{
    const char *text = get_text(r, key), *at = text;
    for (int i = 0; i < n; i++) value[i] = low;
    if (!text) return;
    char expected[80];
    snprintf(expected, sizeof expected, "%d whole number%s within %lld .. %lld", n,
             n > 1 ? "s with commas" : "", (long long)low, (long long)high);
    for (int i = 0; i < n; i++) {
        const int negative = *at == '-';
        at += negative;
        if (*at < '0' || *at > '9' || (*at == '0' && at[1] >= '0' && at[1] <= '9')) {
            bad_value(r, key, text, expected);
            return;
        }
        int64_t v = 0;
        for (; *at >= '0' && *at <= '9'; at++) {
            if (v > (INT64_MAX - 9) / 10) {
                bad_value(r, key, text, expected);
                return;
            }
            v = v * 10 + (*at - '0');
        }
        if (negative) v = -v;
        if (v < low || v > high || *at != (i + 1 < n ? ',' : 0)) {
            bad_value(r, key, text, expected);
            return;
        }
        at++;
        value[i] = v;
    }
}

static int64_t get_int(reader *r, const char *key, int64_t low, int64_t high)
{
    int64_t v;
    get_ints(r, key, &v, 1, low, high);
    return v;
}

static int32_t get_word(reader *r, const char *key, const char *const *names, int32_t count)
{
    const char *text = get_text(r, key);
    for (int32_t i = 0; text && i < count; i++)
        if (strcmp(text, names[i]) == 0) return i;
    if (text) bad_value(r, key, text, "a known word");
    return 0;
}

static int32_t get_selector(reader *r, int32_t levels)
{
    const char *text = get_text(r, "selector");
    if (text && strcmp(text, GIVEN) == 0) return -1;
    for (int32_t i = 0; text && i < ESA_SELECTOR_COUNT; i++)
        if (strcmp(text, esa_selector_of(i)->name) == 0 &&
            (levels || esa_selector_of(i)->records != ESA_RECORDS_ERRORS))
            return i;
    if (text) bad_value(r, "selector", text, "a known word");
    return 0;
}

static double get_fraction(reader *r, const char *key)
{
    const char *text = get_text(r, key);
    if (!text) return 0;
    const char *at = text + 2;
    int64_t units = 0, scale = 1;
    int good = (text[0] == '0' || text[0] == '1') && text[1] == '.';
    for (; good && *at >= '0' && *at <= '9' && scale < INT64_C(1000000000000000000); at++) {
        units = units * 10 + (*at - '0');
        scale *= 10;
    }
    if (!good || *at || scale == 1 || (text[0] == '1' && units)) {
        bad_value(r, key, text, "a fraction such as 0.2");
        return 0;
    }
    return (double)(text[0] == '1' ? scale : units) / (double)scale;
}

static double get_double(reader *r, const char *key)
{
    const char *text = get_text(r, key);
    if (!text || strcmp(text, "0") == 0) return 0;
    uint64_t bits = 0;
    double value;
    int n = 0;
    for (; n < 17 && ((text[n] >= '0' && text[n] <= '9') || (text[n] >= 'a' && text[n] <= 'f'));
         n++)
        bits = bits << 4 | (uint64_t)(text[n] <= '9' ? text[n] - '0' : text[n] - 'a' + 10);
    memcpy(&value, &bits, 8);
    if (n == 16 && !text[n] && isfinite(value)) return value;
    bad_value(r, key, text, "0 or the 16 hex digits of a finite double");
    return 0;
}

static void get_string(reader *r, const char *key, char *out, size_t room)
{
    const char *text = get_text(r, key);
    out[0] = 0;
    if (!text) return;
    const size_t n = strlen(text);
    if (n >= room)
        bad_value(r, key, text, "a shorter text");
    else
        memcpy(out, text, n + 1);
}

static void get_layout(reader *r, esa_layout *y)
{
    *y = esa_layout_default();
    y->order = get_word(r, "order", order_names, 4);
    y->protect_first_frame = (int32_t)get_int(r, "protect_first_frame", 0, 1);
    int64_t v[3];
    get_ints(r, "window", v, 3, 0, INT32_MAX);
    for (int i = 0; i < 3; i++) y->window[i] = (int32_t)v[i];
    get_ints(r, "grid_q", v, 3, 0, INT32_MAX);
    for (int i = 0; i < 3; i++) y->grid_q[i] = (int32_t)v[i];
    get_ints(r, "grid_k", v, 3, 0, INT32_MAX);
    for (int i = 0; i < 3; i++) y->grid_k[i] = (int32_t)v[i];
    get_ints(r, "text_q", v, 2, 0, INT32_MAX);
    y->text_front_q = (int32_t)v[0];
    y->text_back_q = (int32_t)v[1];
    get_ints(r, "text_k", v, 2, 0, INT32_MAX);
    y->text_front_k = (int32_t)v[0];
    y->text_back_k = (int32_t)v[1];
}

/* What only version 2 has; the blocks are read. */
static void get_levels(reader *r, esa_mask_file_info *f)
{
    int64_t group[2];
    f->tail = get_word(r, "tail", tail_names, 4);
    f->fine = (int32_t)get_int(r, "fine", 0, ESA_MAX_FINE);
    f->exact_rows = (int32_t)get_int(r, "exact_rows", 0, ESA_MAX_EXACT_ROWS);
    get_ints(r, "group", group, 2, 0, 256);
    f->group_q = (int32_t)group[0];
    f->group_k = (int32_t)group[1];
    const int32_t fine = f->fine;
    const int32_t power = fine == 0 || fine == 2 || fine == 4 || fine == 8 || fine == 16;
    if (!r->status &&
        (!power || (fine && f->block_k % fine) || !fine != (f->tail != ESA_TAIL_LEVELS)))
        r->status = esa_fail(
            r->ctx, ESA_ERR_FORMAT,
            "%s has tail %s and %d fine means in blocks of %d keys, expected 2, 4, 8 or "
            "16 with tail levels that divide the block, and 0 with other tails",
            r->file->label, tail_names[f->tail], fine, f->block_k);
    if (!r->status && f->tail == ESA_TAIL_CENTROID)
        r->status = esa_fail(r->ctx, ESA_ERR_FORMAT,
                             "%s has tail centroid, expected none, pooled or levels",
                             r->file->label);
    if (!r->status && f->causal && f->exact_rows)
        r->status = esa_fail(r->ctx, ESA_ERR_FORMAT,
                             "%s has causal masks and %d exact rows, expected 0: causal attention "
                             "has none",
                             r->file->label, f->exact_rows);
}

/* Fails with a message that says what the file is. */
static esa_status wrong_kind(esa_ctx *ctx, const esa_tensors *file, const char *format)
{
    const char *found = esa_st_metadata(file, "format");
    const char *wanted = strcmp(format, "esa.masks") == 0 ? "a mask file" : "a recording";
    if (found && strcmp(found, "esa.masks") == 0)
        return esa_fail(ctx, ESA_ERR_FORMAT, "%s is a mask file, expected %s", file->label, wanted);
    if (found && strcmp(found, "esa.recording") == 0)
        return esa_fail(ctx, ESA_ERR_FORMAT,
                        "%s is a recording, expected %s (build one with: esa masks merge)",
                        file->label, wanted);
    if ((found && strcmp(found, "esa.fa4") == 0) || esa_st_find(file, "full_block_cnt"))
        return esa_fail(ctx, ESA_ERR_FORMAT,
                        "%s holds full_block_cnt and full_block_idx, expected %s (esa masks "
                        "convert reads it)",
                        file->label, wanted);
    return esa_fail(ctx, ESA_ERR_FORMAT, "%s is a safetensors file of %lld tensors, but not %s",
                    file->label, (long long)file->count, wanted);
}

esa_status esa_run_read(esa_ctx *ctx, esa_mask_file_info *f, const esa_tensors *file,
                        const char *format)
{
    memset(f, 0, sizeof *f);
    f->struct_size = (uint32_t)sizeof *f;
    f->file_bytes = file->size;
    const char *found = esa_st_metadata(file, "format");
    if (!found || strcmp(found, format) != 0) return wrong_kind(ctx, file, format);
    reader r = { ctx, file, ESA_OK };
    f->format_version = (int32_t)get_int(&r, "format_version", 1, INT32_MAX);
    if (!r.status && f->format_version > ESA_MASK_FORMAT_LEVELS)
        return esa_fail(ctx, ESA_ERR_VERSION,
                        "%s has format version %d, this library expects %d or %d", file->label,
                        f->format_version, ESA_MASK_FORMAT_VERSION, ESA_MASK_FORMAT_LEVELS);
    const int32_t levels = f->format_version == ESA_MASK_FORMAT_LEVELS;
    f->selector = get_selector(&r, levels);
    f->mode = get_word(&r, "mode", mode_names, 3);
    f->importance = get_word(&r, "importance", importance_names, 3);
    f->layers = (int32_t)get_int(&r, "layers", 1, ESA_MAX_CELL_AXIS);
    f->steps = (int32_t)get_int(&r, "steps", 1, ESA_MAX_CELL_AXIS);
    f->groups = (int32_t)get_int(&r, "groups", 1, f->steps);
    f->branches = (int32_t)get_int(&r, "branches", 1, ESA_MAX_CELL_AXIS);
    f->prompts = (int32_t)get_int(&r, "prompts", 0, INT32_MAX);
    f->samples = (int32_t)get_int(&r, "samples", 0, 256);
    f->causal = esa_st_metadata(file, "causal") ? (int32_t)get_int(&r, "causal", 0, 1)
                                                : 0; /* older files lack it */
    f->dense_first_layer = (int32_t)get_int(&r, "dense_first_layer", 0, 1);
    f->H = get_int(&r, "heads", 1, INT32_MAX);
    f->Nq = get_int(&r, "tokens_q", 1, INT32_MAX);
    f->Nk = get_int(&r, "tokens_k", 1, INT32_MAX);
    int64_t block[2];
    get_ints(&r, "block", block, 2, 1, 1 << 20);
    f->block_q = (int32_t)block[0];
    f->block_k = (int32_t)block[1];
    f->warmup_frac = get_fraction(&r, "warmup_frac");
    f->scale = esa_st_metadata(file, "scale") ? get_double(&r, "scale") : 0;
    if (levels) get_levels(&r, f);
    get_string(&r, "model", f->model, sizeof f->model);
    get_string(&r, "config_hash", f->config_hash, sizeof f->config_hash);
    esa_layout layout;
    get_layout(&r, &layout);
    if (r.status) return r.status;
    f->nq = esa_ceil_div(f->Nq, f->block_q);
    f->nk = esa_ceil_div(f->Nk, f->block_k);
    if (f->nq > ESA_MAX_BLOCKS || f->nk > ESA_MAX_BLOCKS)
        return esa_fail(ctx, ESA_ERR_FORMAT,
                        "%s has %lld x %lld blocks, expected at most %d per side", file->label,
                        (long long)f->nq, (long long)f->nk, ESA_MAX_BLOCKS);
    if (esa_layout_resolve(ctx, &f->layout, &layout, f->Nq, f->Nk, f->selector, f->mode, 0)) {
        char inner[256];
        snprintf(inner, sizeof inner, "%.250s", ctx->error);
        return esa_fail(ctx, ESA_ERR_FORMAT, "%s contradicts itself: %s", file->label, inner);
    }
    return ESA_OK;
}

int32_t esa_run_layout_same(const esa_layout *a, const esa_layout *b)
{
    return esa_layout_same(a, b) && a->protect_first_frame == b->protect_first_frame;
}

esa_status esa_run_check_layout(esa_ctx *ctx, const esa_mask_file_info *f, const char *name,
                                const esa_layout *given, const char *who)
{
    const esa_layout *z = &f->layout, plain = esa_layout_default();
    esa_layout y = *given;
    const int32_t grid = y.grid_q[0] || y.grid_q[1] || y.grid_q[2],
                  text = y.text_front_q || y.text_back_q;
    const int32_t keys = y.grid_k[0] || y.grid_k[1] || y.grid_k[2] || y.text_front_k ||
                         y.text_back_k;
    if (!grid) memcpy(y.grid_q, z->grid_q, sizeof y.grid_q);
    if (!grid && !text) {
        y.text_front_q = z->text_front_q;
        y.text_back_q = z->text_back_q;
    }
    if (!keys && (f->Nq != f->Nk || (!grid && !text))) {
        memcpy(y.grid_k, z->grid_k, sizeof y.grid_k);
        y.text_front_k = z->text_front_k;
        y.text_back_k = z->text_back_k;
    }
    /* With order DEFAULT, the default window means the window of the file. */
    if (y.order == ESA_ORDER_DEFAULT && memcmp(y.window, plain.window, sizeof y.window) == 0)
        memcpy(y.window, z->window, sizeof y.window);
    if (y.order == ESA_ORDER_DEFAULT) y.order = z->order;
    if (y.protect_first_frame < 0) y.protect_first_frame = z->protect_first_frame;
    esa_layout full;
    const esa_status status = esa_layout_resolve(ctx, &full, &y, f->Nq, f->Nk, f->selector, f->mode,
                                                 0);
    if (!status && esa_run_layout_same(&full, z)) return ESA_OK;
    if (status == ESA_ERR_VERSION) return status;
    return esa_fail(ctx, ESA_ERR_MISMATCH, "%.160s was made for %s, but %s has %s", name,
                    esa_run_describe_layout(z).text, who,
                    esa_run_describe_layout(status ? &y : &full).text);
}

esa_status esa_run_same(esa_ctx *ctx, const esa_mask_file_info *a, const char *name_a,
                        const esa_mask_file_info *b, const char *name_b)
{
    if (strcmp(a->model, b->model) != 0)
        return esa_fail(ctx, ESA_ERR_MISMATCH, "%.120s was made for model '%s', %.120s for '%s'",
                        name_a, esa_quote(a->model).text, name_b, esa_quote(b->model).text);
    if (strcmp(a->config_hash, b->config_hash) != 0)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "%.120s was made for model configuration '%s', %.120s for '%s'", name_a,
                        esa_quote(a->config_hash).text, name_b, esa_quote(b->config_hash).text);
    if (a->H != b->H || a->Nq != b->Nq || a->Nk != b->Nk || a->layers != b->layers ||
        a->steps != b->steps ||
        memcmp(a->layout.grid_q, b->layout.grid_q, sizeof a->layout.grid_q) != 0)
        return esa_fail(
            ctx, ESA_ERR_MISMATCH, "%.100s was made for %s, %.100s for %s", name_a,
            esa_run_describe(a->Nq, a->Nk, a->layout.grid_q, a->H, a->layers, a->steps).text,
            name_b,
            esa_run_describe(b->Nq, b->Nk, b->layout.grid_q, b->H, b->layers, b->steps).text);
    const int32_t error_a = esa_run_errors(a), error_b = esa_run_errors(b);
    if (error_a != error_b)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "%.120s holds %s, %.120s holds %s: the two kinds do not go together",
                        name_a, error_a ? "error scores" : "importance", name_b,
                        error_b ? "error scores" : "importance");
    if (a->tail != b->tail || a->fine != b->fine || a->group_q != b->group_q ||
        a->group_k != b->group_k)
        return esa_fail(
            ctx, ESA_ERR_MISMATCH,
            "%.100s has tail %s, %d fine means and scores of %dx%d tokens, %.100s has %s, "
            "%d and %dx%d",
            name_a, tail_names[a->tail], a->fine, a->group_q, a->group_k, name_b,
            tail_names[b->tail], b->fine, b->group_q, b->group_k);
    if (a->groups != b->groups || a->branches != b->branches || a->block_q != b->block_q ||
        a->block_k != b->block_k || a->samples != b->samples)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "%.100s has %d step groups, %d branches, blocks of %dx%d and %d samples, "
                        "%.100s has %d, %d, %dx%d and %d",
                        name_a, a->groups, a->branches, a->block_q, a->block_k, a->samples, name_b,
                        b->groups, b->branches, b->block_q, b->block_k, b->samples);
    if (a->selector != b->selector || a->mode != b->mode)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "%.100s and %.100s differ in selector (%d, %d) or mode (%s, %s)", name_a,
                        name_b, a->selector, b->selector, mode_names[a->mode], mode_names[b->mode]);
    if (a->scale != b->scale)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "%.100s was made with scale %g, %.100s with %g (0: D^-0.5)", name_a,
                        a->scale, name_b, b->scale);
    if (a->causal != b->causal)
        return esa_fail(ctx, ESA_ERR_MISMATCH, "%.100s is %scausal, %.100s is %scausal", name_a,
                        a->causal ? "" : "not ", name_b, b->causal ? "" : "not ");
    if (!esa_run_layout_same(&a->layout, &b->layout))
        return esa_fail(ctx, ESA_ERR_MISMATCH, "%.100s was made for %s, %.100s for %s", name_a,
                        esa_run_describe_layout(&a->layout).text, name_b,
                        esa_run_describe_layout(&b->layout).text);
    return ESA_OK;
}
