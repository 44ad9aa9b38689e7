/* model.c - opens, checks and describes a model folder.
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctx/engine_door.h"
#include "model/model.h"

#include "model/json_file.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Models whose shape we know, with their names and the defaults of diffusers. */
typedef struct known {
    const char *name;
    int32_t layers, heads, head_dim, text_dim;
    int32_t frames, height, width, steps;
    double guidance;
} known;

static const known models[] = {
    { "wan-tiny", 8, 4, 64, 192, 33, 128, 128, 8, 2.5 },
    { "wan-t2v-1.3b", 30, 12, 128, 4096, 81, 480, 832, 50, 5.0 },
    { "wan-t2v-14b", 40, 40, 128, 4096, 81, 480, 832, 50, 5.0 },
};
#define FPS 16.0 /* for every Wan */

esa_model_params esa_model_params_default(void)
{
    return (esa_model_params){ .struct_size = sizeof(esa_model_params),
                               .hold = ESA_HOLD_AUTO,
                               .parts = ESA_PART_ALL };
}

const char *esa_video_build_id(void) { return ESA_BUILD_ID; }

const uint32_t *esa_video_abi(void)
{
    static const uint32_t sizes[ESA_VIDEO_ABI_COUNT] = {
        sizeof(esa_model_params),    sizeof(esa_model_info),     sizeof(esa_progress),
        sizeof(esa_generate_params), sizeof(esa_generate_stats), sizeof(esa_frames_info),
        sizeof(esa_save_params),     sizeof(esa_metrics),        sizeof(esa_load_params),
        sizeof(esa_decode_params),
    };
    return sizes;
}

static int32_t tick(void *user, int64_t done, int64_t total)
{
    esa_model *m = user;
    if (m->stage == ESA_STAGE_DECODE)
        return esa_model_progress(m, m->stage, (int32_t)done, (int32_t)total) != 0;
    if (m->stage == ESA_STAGE_LOAD)
        return esa_model_progress(m, m->stage, (int32_t)(done / 1000000),
                                  (int32_t)(total / 1000000)) != 0;
    /* between the layers of a step the count does not change; the caller may still cancel */
    return esa_model_progress(m, m->stage, m->done, m->total) != 0;
}

/* ---------------------------------------------------------------- device memory */

/* The text encoder lacks device memory: blocks of the transformer leave. */
static esa_status ask_transformer(void *user, int64_t bytes)
{
    esa_model *m = user;
    return m->dit ? esa_store_give(esa_wan_dit_store(m->dit), bytes) : ESA_OK;
}

/* The transformer lacks device memory: the text encoder, which is done, leaves as a whole. */
static esa_status ask_text(void *user, int64_t bytes)
{
    (void)bytes;
    esa_model_drop_text(user);
    return ESA_OK;
}

/* ---------------------------------------------------------------- configurations */

static esa_status part_path(esa_model *m, char **path, int64_t *bytes, const char *name)
{
    return esa_path_join(m->ctx, path, bytes, m->folder, name);
}

static int file_exists(esa_model *m, const char *name)
{
    char *path;
    int64_t bytes;
    if (part_path(m, &path, &bytes, name)) return 0;
    const int there = access(path, R_OK) == 0;
    esa_mem_free(&m->ctx->mem, path, bytes);
    return there;
}

enum { INDEX, TRANSFORMER, VAE, TEXT_ENCODER, SCHEDULER };

static esa_status read_one(esa_model *m, int which)
{
    static const char *const names[] = { [INDEX] = "model_index.json",
                                         [TRANSFORMER] = "transformer/config.json",
                                         [VAE] = "vae/config.json",
                                         [TEXT_ENCODER] = "text_encoder/config.json",
                                         [SCHEDULER] = "scheduler/scheduler_config.json" };
    char *path;
    int64_t bytes;
    esa_status status;
    ESA_TRY(part_path(m, &path, &bytes, names[which]));
    switch (which) {
    case INDEX: status = esa_config_index(m->ctx, &m->index, path); break;
    case TRANSFORMER: status = esa_config_wan(m->ctx, &m->wan, path); break;
    case VAE: status = esa_config_wan_vae(m->ctx, &m->vae_config, path); break;
    case TEXT_ENCODER: status = esa_config_umt5(m->ctx, &m->text_config, path); break;
    default: status = esa_config_sched(m->ctx, &m->sched, path); break;
    }
    esa_mem_free(&m->ctx->mem, path, bytes);
    return status;
}

static esa_status read_configs(esa_model *m)
{
    ESA_TRY(read_one(m, INDEX));
    ESA_TRY(read_one(m, TRANSFORMER));
    ESA_TRY(read_one(m, SCHEDULER));
    /* The sizes of a video come from the VAE's config, even if the VAE itself is not used. Without
     * that file they are Wan's. */
    if ((m->parts & ESA_PART_VAE) || file_exists(m, "vae/config.json"))
        ESA_TRY(read_one(m, VAE));
    else
        m->vae_config = (esa_wan_vae_config){
            .z_dim = m->wan.in_channels, .out_channels = 3, .factor_t = 4, .factor_s = 8
        };
    if (m->parts & ESA_PART_TEXT) ESA_TRY(read_one(m, TEXT_ENCODER));
    if (m->wan.in_channels != m->vae_config.z_dim || m->wan.out_channels != m->vae_config.z_dim)
        return esa_fail(m->ctx, ESA_ERR_MISMATCH,
                        "the transformer takes %d and gives %d latent channels, but the VAE has %d",
                        m->wan.in_channels, m->wan.out_channels, m->vae_config.z_dim);
    if (m->vae_config.out_channels != 3)
        return esa_fail(m->ctx, ESA_ERR_UNSUPPORTED, "the VAE gives %d channels, expected 3 (RGB)",
                        m->vae_config.out_channels);
    if ((m->parts & ESA_PART_TEXT) && m->text_config.d_model != m->wan.text_dim)
        return esa_fail(m->ctx, ESA_ERR_MISMATCH,
                        "the text encoder gives %d features, but the transformer takes %d",
                        m->text_config.d_model, m->wan.text_dim);
    return ESA_OK;
}

/* ---------------------------------------------------------------- description */

static void last_name(char *out, size_t size, const char *folder)
{
    size_t n = strlen(folder);
    while (n > 1 && folder[n - 1] == '/') n--;
    size_t from = n;
    while (from > 0 && folder[from - 1] != '/') from--;
    snprintf(out, size, "%.*s", (int)esa_min64((int64_t)(n - from), (int64_t)size - 1),
             folder + from);
}

/* The largest multiple of unit up to size, at least one unit. */
static int32_t down_to(int64_t size, int64_t unit)
{
    return (int32_t)(size < unit ? unit : size / unit * unit);
}

static void describe(esa_model *m)
{
    const esa_wan_config *c = &m->wan;
    const esa_wan_vae_config *v = &m->vae_config;
    esa_model_info *i = &m->info;
    *i = (esa_model_info){ .struct_size = sizeof *i,
                           .layers = c->layers,
                           .heads = c->heads,
                           .head_dim = c->head_dim,
                           .ffn = c->ffn,
                           .latent_channels = c->in_channels,
                           .patch = { c->patch[0], c->patch[1], c->patch[2] },
                           .factor = { v->factor_t, v->factor_s, v->factor_s },
                           .text_dim = c->text_dim,
                           .text_tokens = 512,
                           .fps = FPS };
    snprintf(i->config_hash, sizeof i->config_hash, "%s", c->hash);
    last_name(i->name, sizeof i->name, m->folder);
    known like = models[1];
    for (size_t k = 0; k < sizeof models / sizeof models[0]; k++) {
        const known *n = &models[k];
        if (n->layers != c->layers || n->heads != c->heads || n->head_dim != c->head_dim ||
            n->text_dim != c->text_dim)
            continue;
        like = *n;
        snprintf(i->name, sizeof i->name, "%s", n->name);
    }
    i->frames = (like.frames - 1) / i->factor[0] * i->factor[0] + 1;
    i->height = down_to(like.height, (int64_t)i->factor[1] * i->patch[1]);
    i->width = down_to(like.width, (int64_t)i->factor[2] * i->patch[2]);
    i->steps = like.steps;
    i->guidance = like.guidance;
}

esa_status esa_model_get_info(const esa_model *model, esa_model_info *info)
{
    if (!model || !info) return ESA_ERR_ARGUMENT;
    if (info->struct_size != sizeof *info) return ESA_ERR_VERSION;
    *info = model->info;
    int64_t held[3] = { 0, 0, 0 }, mapped[3] = { 0, 0, 0 };
    if (model->dit) esa_wan_dit_memory(model->dit, &info->parameters[0], &held[0], &mapped[0]);
    if (model->dit) esa_wan_dit_plan(model->dit, info);
    if (model->vae) esa_wan_vae_memory(model->vae, &info->parameters[1], &held[1], &mapped[1]);
    if (model->text) esa_text_part_memory(model->text, &info->parameters[2], &held[2], &mapped[2]);
    for (int i = 0; i < 3; i++) {
        info->held_bytes += held[i];
        info->mapped_bytes += mapped[i];
    }
    return ESA_OK;
}

/* ---------------------------------------------------------------- opening */

void esa_model_free(esa_model *model)
{
    if (!model) return;
    const esa_allocator mem = model->ctx->mem;
    esa_text_part_free(model->text);
    esa_embeds_forget(model);
    esa_wan_vae_free(model->vae);
    esa_wan_dit_free(model->dit);
    esa_nn_close(&model->nn);
    esa_mem_free(&mem, model->folder, model->folder_bytes);
    esa_mem_free(&mem, model, sizeof *model);
}

/* Does everything but the weights. On failure *model is NULL. */
static esa_status begin(esa_ctx *ctx, esa_model **model, const char *folder,
                        const esa_model_params *params)
{
    const esa_model_params p = params ? *params : esa_model_params_default();
    *model = NULL;
    if (!folder || !*folder) return esa_fail(ctx, ESA_ERR_ARGUMENT, "no model folder was given");
    if (p.struct_size != sizeof p)
        return esa_fail(ctx, ESA_ERR_VERSION,
                        "esa_model_params has struct_size %u, this library expects %u",
                        p.struct_size, (unsigned)sizeof p);
    if (p.hold < ESA_HOLD_AUTO || p.hold > ESA_HOLD_BF16)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "hold is %d, expected 0 .. %d", p.hold,
                        ESA_HOLD_BF16);
    if (p.linear < ESA_LINEAR_BF16 || p.linear > ESA_LINEAR_F8)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "linear is %d, expected ESA_LINEAR_BF16 or F8",
                        p.linear);
    if (p.transformer && p.random)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "random weights were asked for, and weights from a file; give one");
    if (p.max_memory < 0)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "max_memory is %lld, expected 0 or more",
                        (long long)p.max_memory);
    if (p.parts < 1 || p.parts > ESA_PART_ALL)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "parts is %d, expected 1 .. %d", p.parts,
                        ESA_PART_ALL);
    esa_model *m = esa_mem_zalloc(&ctx->mem, sizeof *m);
    if (!m) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for a model");
    m->ctx = ctx;
    m->parts = p.random ? p.parts & ~ESA_PART_TEXT : p.parts;
    m->random = p.random;
    esa_nn_init(&m->nn, ctx);
    esa_status status = esa_nn_use(&m->nn, p.device);
    m->folder_bytes = (int64_t)strlen(folder) + 1;
    m->folder = esa_mem_alloc(&m->ctx->mem, m->folder_bytes);
    m->env = (esa_part_env){ .nn = &m->nn,
                             .transformer = p.transformer,
                             .hold = p.hold,
                             .linear = p.linear == ESA_LINEAR_F8 ? ESA_DTYPE_F8 : ESA_DTYPE_BF16,
                             .keep = p.keep,
                             .limit = p.max_memory,
                             .ask = ask_text,
                             .ask_user = m,
                             .random = p.random,
                             .report = p.report,
                             .report_user = p.report_user,
                             .tick = tick,
                             .tick_user = m };
    if (m->folder) {
        memcpy(m->folder, folder, (size_t)m->folder_bytes);
        m->env.folder = m->folder;
    } else if (!status)
        status = esa_fail(m->ctx, ESA_ERR_MEMORY, "out of memory for a model");
    if (!status) status = p.random ? esa_model_shape(m) : read_configs(m);
    if (!status) describe(m);
    if (!status && p.random) esa_model_shape_describe(m);
    if (status)
        esa_model_free(m);
    else
        *model = m;
    return status;
}

/* With a report all parts are checked, so that it is complete; the message is that of the first
 * part that failed. */
static esa_status check(esa_model *m)
{
    esa_status status = ESA_OK;
    char first[sizeof m->ctx->error] = "";
    for (int part = ESA_PART_TRANSFORMER; part <= ESA_PART_TEXT; part *= 2) {
        if (!(m->parts & part)) continue;
        const esa_status each = part == ESA_PART_TRANSFORMER ? esa_wan_dit_check(&m->env, &m->wan)
                                : part == ESA_PART_VAE
                                    ? esa_wan_vae_check(&m->env, &m->vae_config)
                                    : esa_text_part_check(&m->env, &m->text_config);
        if (!each || status) continue;
        status = each;
        snprintf(first, sizeof first, "%s", m->ctx->error);
        if (!m->env.report) break;
    }
    if (status) snprintf(m->ctx->error, sizeof m->ctx->error, "%s", first);
    return status;
}

static esa_status config_hash(esa_ctx *ctx, char *hash, const char *folder)
{
    char path[4400];
    esa_json_file file;
    if (!hash || !folder) return esa_fail(ctx, ESA_ERR_ARGUMENT, "hash or folder is NULL");
    const int length = snprintf(path, sizeof path, "%s/transformer/config.json", folder);
    if (length >= (int)sizeof path)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "the name of the model's folder is too long");
    const esa_status status = esa_json_file_open(ctx, &file, path);
    if (!status) esa_json_hash(&file, hash);
    esa_json_file_close(&file);
    return status;
}

esa_status esa_model_config_hash(esa_ctx *ctx, char *hash, const char *folder)
{
    ESA_TRY(esa_engine_enter(ctx));
    const esa_status status = config_hash(ctx, hash, folder);
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_model_check(esa_ctx *ctx, const char *folder, const esa_model_params *params)
{
    esa_model *m;
    ESA_TRY(esa_engine_enter(ctx));
    esa_status status = begin(ctx, &m, folder, params);
    if (!status) status = check(m);
    esa_model_free(m);
    esa_ctx_leave(ctx);
    return status;
}

static esa_status load_parts(esa_model *m)
{
    ESA_TRY(check(m));
    m->env.report = NULL; /* opening a part checks it again; the report is complete already */
    /* The transformer takes the device memory that is left. */
    if (m->parts & ESA_PART_VAE) ESA_TRY(esa_wan_vae_open(&m->env, &m->vae, &m->vae_config));
    if (m->parts & ESA_PART_TRANSFORMER) ESA_TRY(esa_wan_dit_open(&m->env, &m->dit, &m->wan));
    return ESA_OK;
}

static esa_status load(esa_model *m, const esa_model_params *params)
{
    esa_generate_params call = esa_generate_params_default(); /* holds the progress function */
    if (params) {
        call.progress = params->progress;
        call.progress_user = params->progress_user;
    }
    m->call = &call;
    m->stage = ESA_STAGE_LOAD;
    m->density = NAN;
    m->began = m->stage_began = esa_nn_now();
    const esa_status status = load_parts(m);
    m->call = NULL;
    return status;
}

esa_status esa_model_open(esa_ctx *ctx, esa_model **model, const char *folder,
                          const esa_model_params *params)
{
    if (model) *model = NULL;
    ESA_TRY(esa_engine_enter(ctx));
    esa_model *m = NULL;
    esa_status status = model ? begin(ctx, &m, folder, params)
                              : esa_fail(ctx, ESA_ERR_ARGUMENT, "model is NULL");
    if (!status) {
        esa_nn_enter(&m->nn);
        status = load(m, params);
        esa_nn_leave(&m->nn);
    }
    if (!status)
        *model = m;
    else
        esa_model_free(m);
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_model_check_idle(const esa_model *model)
{
    if (!model->call) return ESA_OK;
    return esa_fail(model->ctx, ESA_ERR_STATE,
                    "this model is busy: its callback must not start another call of it");
}

esa_status esa_model_need_text(esa_model *model)
{
    if (model->text) return ESA_OK;
    if (!(model->parts & ESA_PART_TEXT))
        return esa_fail(
            model->ctx, ESA_ERR_STATE,
            "this model was opened without its text encoder; give embeddings instead of a prompt");
    esa_part_env env = model->env;
    env.ask = ask_transformer;
    return esa_text_part_open(&env, &model->text, &model->text_config);
}

void esa_model_drop_text(esa_model *model)
{
    if (model->nn.be->host_memory) return;
    esa_text_part_free(model->text);
    model->text = NULL;
}
