/* session.c - makes and frees a session, and sets its step and branch.
 * SPDX-License-Identifier: Apache-2.0 */
#include "session/session.h"

#include <math.h>
#include <stddef.h>
#include <string.h>
#include "io/json.h"
#include "rules/schedule.h"
#include "workplan/work_plan.h"

/* Bindings rely on these offsets; changing them changes the ABI. */
_Static_assert(offsetof(esa_session_params, warmup_frac) == 32 &&
                   offsetof(esa_session_params, min_tokens) == 40 &&
                   offsetof(esa_session_params, dense_layers) == 48 &&
                   offsetof(esa_session_params, model) == 64 &&
                   offsetof(esa_session_params, select) == 96,
               "esa_session_params offsets");

esa_session_params esa_session_params_default(void)
{
    esa_session_params p;
    memset(&p, 0, sizeof p);
    p.struct_size = (uint32_t)sizeof p;
    p.mode = ESA_SESSION_ONLINE;
    p.branches = 1;
    p.strict = 1;
    p.dense_first_layer = 1;
    p.refresh_every = p.order_every = 1;
    p.warmup_frac = 0.2;
    p.select = esa_select_params_default(ESA_SELECT_ENTROPY);
    p.attention = esa_attention_params_default();
    p.carry_room = -1;
    return p;
}

/* 1 if text is NULL, or UTF-8 of at most room - 1 bytes, which is what a file can hold. Checked
 * now, not after hours of recording. */
static int fits_file(const char *text, size_t room)
{
    if (!text) return 1;
    const char *const end = text + strlen(text);
    if ((size_t)(end - text) >= room) return 0;
    for (int n; text < end; text += n)
        if (!(n = esa_utf8_length(text, end))) return 0;
    return 1;
}

/* Numbers within their ranges. */
static esa_status check_ranges(esa_ctx *ctx, const esa_session_params *p)
{
    const struct {
        const char *name;
        int32_t value, low, high;
    } range[] = { { "layers", p->layers, 1, ESA_MAX_CELL_AXIS },
                  { "steps", p->steps, 1, ESA_MAX_CELL_AXIS },
                  { "branches", p->branches, 1, 256 },
                  { "strict", p->strict, 0, 1 },
                  { "dense_first_layer", p->dense_first_layer, 0, 1 },
                  { "share_branches", p->share_branches, 0, 1 },
                  { "step_branches", p->step_branches, 0, p->branches },
                  { "step_map", p->step_map, ESA_STEP_MAP_EXACT, ESA_STEP_MAP_NEAREST },
                  { "dense_layer_count", p->dense_layer_count, 0, ESA_MAX_CELL_AXIS },
                  { "record_groups", p->record_groups, 0, p->steps },
                  { "record_per_branch", p->record_per_branch, 0, 1 },
                  { "steps16_first", p->steps16_first, 0, p->steps },
                  { "steps16_last", p->steps16_last, 0, p->steps },
                  { "layers16_count", p->layers16_count, 0, ESA_MAX_CELL_AXIS },
                  { "exact_rows", p->attention.exact_rows, -1, ESA_MAX_EXACT_ROWS } };
    for (size_t i = 0; i < sizeof range / sizeof range[0]; i++)
        if (range[i].value < range[i].low || range[i].value > range[i].high)
            return esa_fail(ctx, ESA_ERR_ARGUMENT, "%s is %d, expected %d to %d", range[i].name,
                            range[i].value, range[i].low, range[i].high);
    if (!esa_schedule_valid(p->refresh_every) || !esa_schedule_valid(p->order_every))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "refresh_every is %d and order_every is %d, expected 0 or more, or "
                        "ESA_REFRESH_EARLY (%d)",
                        p->refresh_every, p->order_every, ESA_REFRESH_EARLY);
    if (!(p->warmup_frac >= 0 && p->warmup_frac <= 1))
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "warmup_frac is %g, expected 0 to 1",
                        p->warmup_frac);
    const int32_t bits = p->attention.precision;
    if (bits != 0 && bits != 8 && bits != 16)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "precision is %d, expected 8 or 16 bits, or 0 for the default", bits);
    if (p->min_tokens < 0)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "min_tokens is %lld, expected 0 or more",
                        (long long)p->min_tokens);
    if (!(p->select.budget >= 0 && p->select.budget <= 1))
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "budget is %g, expected 0 to 1", p->select.budget);
    if (!(p->work >= 0 && p->work <= 1))
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "work is %g, expected 0 to 1 (0: not given)",
                        p->work);
    for (int64_t i = 0; p->density && i < (int64_t)p->layers * p->steps; i++)
        if (!(p->density[i] >= 0 && p->density[i] <= 1))
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "density of layer %d, step %d is %g, expected 0 to 1",
                            (int)(i / p->steps), (int)(i % p->steps), p->density[i]);
    return ESA_OK;
}

static esa_status check_layers(esa_ctx *ctx, const char *name, const char *count_name,
                               const int32_t *list, int32_t count, int32_t layers)
{
    if (count && !list)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "%s is %d, but %s is NULL", count_name, count, name);
    for (int32_t i = 0; i < count; i++)
        if (list[i] < 0 || list[i] >= layers)
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "%s names layer %d, but the model has layers 0 to %d", name, list[i],
                            layers - 1);
    return ESA_OK;
}

static esa_status check_layers_and_names(esa_ctx *ctx, const esa_session_params *p)
{
    ESA_TRY(check_layers(ctx, "dense_layers", "dense_layer_count", p->dense_layers,
                         p->dense_layer_count, p->layers));
    ESA_TRY(
        check_layers(ctx, "layers16", "layers16_count", p->layers16, p->layers16_count, p->layers));
    if (!fits_file(p->model, sizeof((esa_session *)0)->model) ||
        !fits_file(p->config_hash, sizeof((esa_session *)0)->config_hash))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "model or config_hash is not UTF-8, or longer than %d or %d bytes", 127,
                        79);
    return ESA_OK;
}

static esa_status check_carry(esa_ctx *ctx, const esa_session_params *p)
{
    ESA_TRY(esa_anchors_check(ctx, p->carry, p->anchors, p->anchor_count, p->steps));
    if (p->carry_format != ESA_CARRY_E4M3 && p->carry_format != ESA_CARRY_BF16)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "carry_format is %d, expected ESA_CARRY_E4M3 (%d) or ESA_CARRY_BF16 (%d)",
                        p->carry_format, ESA_CARRY_E4M3, ESA_CARRY_BF16);
    if (p->carry_room < -1)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "carry_room is %lld, expected a number of bytes, or -1 for no limit",
                        (long long)p->carry_room);
    if (!p->carry_alloc != !p->carry_free)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "%s is NULL: set both carry_alloc and carry_free, or neither",
                        p->carry_alloc ? "carry_free" : "carry_alloc");
    if (p->carry != ESA_CARRY_OFF && p->attention.causal)
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "carry is %d and causal is 1, but causal attention does not carry: set "
                        "carry to ESA_CARRY_OFF (0)",
                        p->carry);
    return ESA_OK;
}

/* What the mode needs, and what it cannot do. */
static esa_status check_mode(esa_ctx *ctx, const esa_session_params *p)
{
    const int selects = p->mode == ESA_SESSION_ONLINE || p->mode == ESA_SESSION_RECORD ||
                        p->mode == ESA_SESSION_PROBE;
    if (selects && p->select.causal != p->attention.causal)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "causal is %d in select and %d in attention, expected the same",
                        p->select.causal, p->attention.causal);
    const int32_t recorded = esa_selector_of(p->select.selector)->records != ESA_RECORDS_NOTHING;
    if (p->mode == ESA_SESSION_RECORD && (!recorded || p->select.causal))
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "mode RECORD needs selector ENTROPY or ERROR and causal 0, got selector %d "
                        "and causal %d",
                        p->select.selector, p->select.causal);
    if (p->mode == ESA_SESSION_RECORD && p->select.layout.order == ESA_ORDER_ADAPTIVE)
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "mode RECORD needs one order for all prompts: an adaptive order differs "
                        "from prompt to prompt");
    if ((p->mode == ESA_SESSION_RECORD || p->mode == ESA_SESSION_CACHED) &&
        p->select.layout.span_count)
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "the layout has %d clips, but recordings and mask files know one video",
                        p->select.layout.span_count);
    if (p->mode == ESA_SESSION_ONLINE && esa_selector_has(p->select.selector, ESA_ROW_KEEPS_ALL))
        return esa_fail(ctx, p->strict ? ESA_ERR_POLICY : ESA_ERR_ARGUMENT,
                        "selector FULL keeps every block: use mode DENSE instead");
    const int32_t spends = p->mode == ESA_SESSION_ONLINE || p->mode == ESA_SESSION_DENSE;
    if (!spends && (p->density || (p->work > 0 && p->mode != ESA_SESSION_CACHED)))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "density belongs to mode ONLINE, and work to ONLINE and CACHED: mode is %d",
                        p->mode);
    if (p->mode == ESA_SESSION_PROBE &&
        (!p->probe || p->probe_count < 1 || p->probe_count > ESA_WORK_MAX_POINTS))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "probe is NULL, or probe_count is %d: mode PROBE needs 1 to %d densities",
                        p->probe_count, ESA_WORK_MAX_POINTS);
    for (int32_t i = 0; p->mode == ESA_SESSION_PROBE && i < p->probe_count; i++)
        if (!(p->probe[i] >= 0 && p->probe[i] <= 1))
            return esa_fail(ctx, ESA_ERR_ARGUMENT, "probe %d is %g, expected 0 to 1", i,
                            p->probe[i]);
    if (p->mode == ESA_SESSION_CACHED && !p->masks)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "mode CACHED needs a mask file, but masks is NULL");
    if (p->first_head < 0 || p->total_heads < 0 ||
        (p->first_head && p->first_head >= p->total_heads))
        return esa_fail(
            ctx, ESA_ERR_ARGUMENT,
            "first_head is %d and total_heads is %d, expected first_head in 0 .. total_heads - 1, "
            "or both 0",
            p->first_head, p->total_heads);
    if (p->total_heads && p->mode == ESA_SESSION_RECORD)
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "mode RECORD needs calls with all heads of the model: total_heads is %d, "
                        "expected 0",
                        p->total_heads);
    return ESA_OK;
}

static esa_status check_params(esa_ctx *ctx, const esa_session_params *p)
{
    if (p->struct_size != sizeof *p)
        return esa_fail(ctx, ESA_ERR_VERSION,
                        "esa_session_params has struct_size %u, this library expects %u",
                        (unsigned)p->struct_size, (unsigned)sizeof *p);
    if (p->select.struct_size != sizeof p->select ||
        p->attention.struct_size != sizeof p->attention)
        return esa_fail(ctx, ESA_ERR_VERSION,
                        "select and attention of esa_session_params have struct_size %u and %u, "
                        "this library expects %u and %u: fill them with their default functions",
                        (unsigned)p->select.struct_size, (unsigned)p->attention.struct_size,
                        (unsigned)sizeof p->select, (unsigned)sizeof p->attention);
    if (p->mode < ESA_SESSION_DENSE || p->mode > ESA_SESSION_PROBE)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "mode is %d, expected ESA_SESSION_DENSE, ONLINE, CACHED, RECORD or PROBE",
                        p->mode);
    ESA_TRY(check_ranges(ctx, p));
    ESA_TRY(check_carry(ctx, p));
    ESA_TRY(check_layers_and_names(ctx, p));
    return check_mode(ctx, p);
}

/* Checks that the mask file was made for this model, shape and step count. */
static esa_status check_masks(esa_ctx *ctx, const esa_session_params *p)
{
    const esa_mask_file *file = p->masks;
    if (file->ctx != ctx)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "the mask file was opened with another ctx");
    const esa_mask_file_info *f = &file->info;
    const char *name = file->tensors->label;
    if (p->model && f->model[0] && strcmp(p->model, f->model) != 0)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "%s was made for model '%s', but the session runs '%s'", name,
                        esa_quote(f->model).text, esa_quote(p->model).text);
    if (p->config_hash && f->config_hash[0] && strcmp(p->config_hash, f->config_hash) != 0)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "%s was made for model configuration '%s', but the session has '%s'", name,
                        esa_quote(f->config_hash).text, esa_quote(p->config_hash).text);
    if (f->layers != p->layers)
        return esa_fail(
            ctx, ESA_ERR_MISMATCH, "%s was made for %s, but the session has %d layers", name,
            esa_run_describe(f->Nq, f->Nk, f->layout.grid_q, f->H, f->layers, -1).text, p->layers);
    if (f->steps != p->steps && p->step_map == ESA_STEP_MAP_EXACT)
        return esa_fail(
            ctx, ESA_ERR_MISMATCH,
            "%s was made for %d steps, but the session has %d (step_map NEAREST maps them)", name,
            f->steps, p->steps);
    if (f->branches > 1 && f->branches != p->branches)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "%s holds separate masks for %d branches, but the session has %d", name,
                        f->branches, p->branches);
    if (f->causal != p->attention.causal)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "%s holds %s masks, but the session's attention is %scausal", name,
                        f->causal ? "causal" : "bidirectional", p->attention.causal ? "" : "not ");
    if (p->total_heads && p->total_heads != f->H)
        return esa_fail(ctx, ESA_ERR_MISMATCH, "%s was made for %lld heads, but the session has %d",
                        name, (long long)f->H, p->total_heads);
    if (p->work > 0 && !esa_mask_file_has_works(file))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "work is %g, but %s was built for budgets, not for total works: give a "
                        "budget, or masks from a recording of errors",
                        p->work, name);
    const int32_t rows = p->attention.exact_rows;
    if (esa_mask_file_has_works(file) && rows > 0 && rows != f->exact_rows)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "exact_rows is %d, but the works of %s include %d exact rows per query "
                        "block: leave exact_rows out, or build the masks with exact_rows %d",
                        rows, name, f->exact_rows, rows);
    const esa_layout *y = &p->select.layout, *z = &f->layout;
    if (f->causal && z->order != ESA_ORDER_RASTER && !y->order_applied)
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "%s holds causal masks in another order than raster: they need tensors "
                        "that are already in that order (order_applied)",
                        name);
    if ((y->grid_q[0] || y->grid_q[1] || y->grid_q[2]) &&
        memcmp(y->grid_q, z->grid_q, sizeof y->grid_q) != 0)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "%s was made for N=%lld (grid %dx%dx%d) and %d layers, but the session has "
                        "grid %dx%dx%d and %d layers",
                        name, (long long)f->Nq, z->grid_q[0], z->grid_q[1], z->grid_q[2], f->layers,
                        y->grid_q[0], y->grid_q[1], y->grid_q[2], p->layers);
    return esa_run_check_layout(ctx, f, name, y, "the session");
}

/* Checks that the work plan was made for this model. */
static esa_status check_plan(esa_ctx *ctx, const esa_session_params *p)
{
    esa_work_plan_info f = { .struct_size = sizeof f };
    if (!p->plan || !(p->work > 0)) return ESA_OK;
    ESA_TRY(esa_work_plan_get_info(p->plan, &f));
    if (p->model && f.model[0] && strcmp(p->model, f.model) != 0)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "the work plan was made for model '%s', but the session runs '%s'",
                        esa_quote(f.model).text, esa_quote(p->model).text);
    if (p->config_hash && f.config_hash[0] && strcmp(p->config_hash, f.config_hash) != 0)
        return esa_fail(
            ctx, ESA_ERR_MISMATCH,
            "the work plan was made for model configuration '%s', but the session has '%s'",
            esa_quote(f.config_hash).text, esa_quote(p->config_hash).text);
    if (f.layers != p->layers)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "the work plan was made for %d layers, but the session has %d", f.layers,
                        p->layers);
    return ESA_OK;
}

/* Copies density and sigma, and reserves room for densities that are still to be solved. */
static esa_status copy_spending(esa_session *s, const esa_session_params *p)
{
    const int64_t cells = (int64_t)p->layers * p->steps;
    const int32_t spends = p->density || (p->work > 0 && p->mode != ESA_SESSION_CACHED);
    if (spends) s->density = esa_mem_zalloc(&s->ctx->mem, 8 * cells);
    if (p->sigma) s->sigma = esa_mem_alloc(&s->ctx->mem, 8 * (int64_t)p->steps);
    if ((spends && !s->density) || (p->sigma && !s->sigma))
        return esa_fail(s->ctx, ESA_ERR_MEMORY, "out of memory for the densities of %lld cells",
                        (long long)cells);
    if (p->density) memcpy(s->density, p->density, 8 * (size_t)cells);
    if (p->sigma) memcpy(s->sigma, p->sigma, 8 * (size_t)p->steps);
    s->given = p->density != NULL;
    s->params.density = s->params.sigma = NULL;
    return ESA_OK;
}

/* Makes the recorder with the settings of this session. The first call adds the geometry. */
static esa_status make_recorder(esa_session *s)
{
    const esa_session_params *p = &s->params;
    esa_mask_file_info f;
    memset(&f, 0, sizeof f);
    f.struct_size = (uint32_t)sizeof f;
    f.selector = p->select.selector;
    const int32_t errors = esa_run_errors(&f);
    f.mode = p->select.mode;
    f.samples = errors ? 0 : p->select.samples;
    f.scale = p->select.scale;
    f.block_q = p->select.block_q;
    f.block_k = p->select.block_k;
    if (errors) {
        f.tail = p->select.tail;
        f.fine = p->select.fine;
        f.group_q = p->select.group_q;
        f.group_k = p->select.group_k;
    }
    f.format_version = esa_run_version(&f);
    f.layers = p->layers;
    f.steps = p->steps;
    f.groups = p->record_groups ? p->record_groups : p->steps;
    f.branches = p->record_per_branch ? p->branches : 1;
    memcpy(f.model, s->model, sizeof f.model);
    memcpy(f.config_hash, s->config_hash, sizeof f.config_hash);
    /* Each layer once and ascending, so that sessions with the same layers write the same bytes. */
    int32_t n = 0, *layer = esa_mem_alloc(&s->ctx->mem, 4 * (int64_t)p->layers);
    if (!layer)
        return esa_fail(s->ctx, ESA_ERR_MEMORY, "out of memory for a session of %d layers",
                        p->layers);
    for (int32_t l = 0; l < p->layers; l++)
        for (int32_t i = 0; i < p->dense_layer_count; i++)
            if (p->dense_layers[i] == l) {
                layer[n++] = l;
                break;
            }
    const esa_status status = esa_recorder_create(s->ctx, &s->recorder, &f, layer, n);
    esa_mem_free(&s->ctx->mem, layer, 4 * (int64_t)p->layers);
    return status;
}

/* CACHED: what a run with carry costs more than the works of its file say: anchors, and no exact
 * rows, unless they were asked for. */
static double carry_work(const esa_session *s)
{
    const esa_session_params *p = &s->params;
    const esa_mask_file_info *f = &p->masks->info;
    if (!s->carry.anchor_count) return 0;
    const int32_t sharing = f->branches == 1 && p->branches > 1 ? 2 : 1; /* guidance has two */
    const double rows = p->attention.exact_rows > 0 ? 0 : (double)f->exact_rows / f->block_q;
    return (double)s->carry.anchor_count / ((double)p->steps * sharing) - rows;
}

/* CACHED: finds the masks of the budget or of the work. */
static esa_status find_masks(esa_session *s)
{
    const esa_session_params *p = &s->params;
    if (p->work > 0)
        ESA_TRY(esa_mask_file_pick(p->masks, &s->permille, p->work - carry_work(s)));
    else
        s->permille = esa_budget_permille(s->ctx, p->select.budget);
    if (s->permille < 0) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_mask_file_budget(p->masks, &s->masks, s->permille));
    if (s->masks->density && !(p->work > 0)) s->params.work = s->permille / 1000.0;
    return ESA_OK;
}

static esa_status create(esa_ctx *ctx, esa_session *s, const esa_session_params *p)
{
    s->ctx = s->figures.ctx = s->chunks.ctx = ctx;
    s->params = *p;
    s->step = s->branch = -1;
    if (p->model) strcpy(s->model, p->model);
    if (p->config_hash) strcpy(s->config_hash, p->config_hash);
    s->params.model = s->params.config_hash = NULL;
    s->params.select.kv_len = s->params.attention.kv_len = NULL;
    s->params.attention.lse = NULL;
    s->warmup = esa_warmup_steps(p->warmup_frac, p->steps);
    s->params.attention.exact_rows = esa_session_exact_rows(p);
    const int64_t cells = (int64_t)p->layers * p->steps,
                  kept_count = (int64_t)p->layers * p->branches;
    s->dense_layer = esa_mem_zalloc(&ctx->mem, p->layers);
    s->layer16 = esa_mem_zalloc(&ctx->mem, p->layers);
    s->cell = esa_mem_zalloc(&ctx->mem, (int64_t)sizeof *s->cell * cells);
    s->kept = esa_mem_zalloc(&ctx->mem, (int64_t)sizeof *s->kept * kept_count);
    if (!s->dense_layer || !s->layer16 || !s->cell || !s->kept)
        return esa_fail(ctx, ESA_ERR_MEMORY,
                        "out of memory for a session of %d layers and %d steps", p->layers,
                        p->steps);
    ESA_TRY(copy_spending(s, p));
    ESA_TRY(esa_session_carry_make(s, p));
    for (int32_t i = 0; i < p->dense_layer_count; i++) s->dense_layer[p->dense_layers[i]] = 1;
    for (int32_t i = 0; i < p->layers16_count; i++) s->layer16[p->layers16[i]] = 1;
    s->params.layers16 = NULL;
    if (p->mode == ESA_SESSION_RECORD) ESA_TRY(make_recorder(s));
    if (p->mode == ESA_SESSION_PROBE) ESA_TRY(esa_session_probe_make(s, p));
    s->params.dense_layers = NULL;
    s->params.dense_layer_count = 0;
    int32_t first = p->dense_first_layer && p->mode != ESA_SESSION_RECORD;
    if (p->mode == ESA_SESSION_CACHED) {
        ESA_TRY(find_masks(s));
        if (s->masks->density) {
            first = p->masks->info.dense_first_layer;
            if (!s->carry.anchor_count || p->attention.exact_rows > 0)
                s->params.attention.exact_rows = p->masks->info.exact_rows;
            s->warmup = esa_warmup_steps(p->masks->info.warmup_frac, p->steps);
        }
    }
    if (first) s->dense_layer[0] = 1;
    return ESA_OK;
}

void esa_session_free(esa_session *s)
{
    if (!s) return;
    const esa_allocator *mem = &s->ctx->mem;
    const int64_t cells = (int64_t)s->params.layers * s->params.steps,
                  kept_count = (int64_t)s->params.layers * s->params.branches;
    esa_session_drop_plans(s);
    esa_session_carry_free(s);
    for (int64_t i = 0; s->kept && i < kept_count; i++)
        esa_session_kept_free(&s->chunks, &s->kept[i]);
    esa_session_chunks_free(&s->chunks);
    esa_session_figures_free(&s->figures);
    esa_mem_free(mem, s->kept, (int64_t)sizeof *s->kept * kept_count);
    esa_mem_free(mem, s->cell, (int64_t)sizeof *s->cell * cells);
    esa_mem_free(mem, s->head, (int64_t)sizeof *s->head * cells * s->heads);
    esa_mem_free(mem, s->density, 8 * cells);
    esa_mem_free(mem, s->sigma, 8 * (int64_t)s->params.steps);
    esa_mem_free(mem, s->carry.anchors, 4 * (int64_t)s->params.steps);
    esa_mem_free(mem, s->dense_layer, s->params.layers);
    esa_mem_free(mem, s->layer16, s->params.layers);
    esa_recorder_free(&s->recorder);
    esa_session_probe_free(s);
    esa_mem_free(mem, s, (int64_t)sizeof *s);
}

/* ---------------------------------------------------------------- rooms */

esa_status esa_session_make(esa_ctx *ctx, esa_session **session, const esa_session_params *params)
{
    *session = NULL;
    ESA_TRY(check_params(ctx, params));
    if (params->mode == ESA_SESSION_CACHED) ESA_TRY(check_masks(ctx, params));
    ESA_TRY(check_plan(ctx, params));
    esa_session *s = esa_mem_zalloc(&ctx->mem, (int64_t)sizeof *s);
    if (!s) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for a session");
    const esa_status status = create(ctx, s, params);
    if (status)
        esa_session_free(s);
    else
        *session = s;
    return status;
}

esa_status esa_session_start(esa_session *s)
{
    const size_t cells = (size_t)s->params.layers * (size_t)s->params.steps;
    const int32_t records = s->params.mode == ESA_SESSION_RECORD;
    if (records && s->recorder.info.prompts == INT32_MAX)
        return esa_fail(s->ctx, ESA_ERR_STATE,
                        "the recording already holds %d prompts, which is the most it can count",
                        INT32_MAX);
    esa_session_figures_forget(&s->figures);
    memset(s->cell, 0, sizeof *s->cell * cells);
    if (s->head) memset(s->head, 0, sizeof *s->head * cells * (size_t)s->heads);
    for (int64_t i = 0; i < (int64_t)s->params.layers * s->params.branches; i++)
        esa_session_kept_forget(&s->kept[i]);
    esa_session_probe_forget(s);
    s->step = s->branch = -1;
    s->kv_len = NULL;
    s->cache = (esa_step_cache){ 0 };
    s->begun = 1;
    if (records) s->recorder.info.prompts++;
    return ESA_OK;
}

esa_status esa_session_place(esa_session *s, int32_t step, int32_t branch)
{
    if (!s->begun)
        return esa_fail(s->ctx, ESA_ERR_STATE,
                        "esa_session_step was called before esa_session_begin");
    if (step < 0 || step >= s->params.steps || branch < 0 || branch >= s->params.branches)
        return esa_fail(s->ctx, ESA_ERR_ARGUMENT,
                        "step is %d and branch is %d, but the session has %d steps and %d branches",
                        step, branch, s->params.steps, s->params.branches);
    s->step = step;
    s->branch = branch;
    return ESA_OK;
}

/* ---------------------------------------------------------------- doors */

esa_status esa_session_create(esa_ctx *ctx, esa_session **session, const esa_session_params *params)
{
    if (session) *session = NULL;
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = session && params ? esa_session_make(ctx, session, params)
                                                : esa_fail(ctx, ESA_ERR_ARGUMENT, "%s is NULL",
                                                           session ? "params" : "session");
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_session_begin(esa_session *s)
{
    if (!s) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(s->ctx));
    const esa_status status = esa_session_start(s);
    esa_ctx_leave(s->ctx);
    return status;
}

esa_status esa_session_step(esa_session *s, int32_t step, int32_t branch)
{
    if (!s) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(s->ctx));
    const esa_status status = esa_session_place(s, step, branch);
    esa_ctx_leave(s->ctx);
    return status;
}

esa_status esa_session_set_kv_len(esa_session *s, const int32_t *kv_len)
{
    if (!s) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(s->ctx));
    s->kv_len = kv_len;
    esa_ctx_leave(s->ctx);
    return ESA_OK;
}

esa_status esa_session_trim(esa_session *s)
{
    if (!s) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(s->ctx));
    esa_session_carry_trim(s);
    esa_ctx_leave(s->ctx);
    return ESA_OK;
}
