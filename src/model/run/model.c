/* model.c - opens, checks and describes a model folder.
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctx/engine_door.h"
#include "model/run/model.h"

#include "model/config/json_file.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

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
        sizeof(esa_decode_params),   sizeof(esa_preview),
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
    return m->dit ? esa_store_give(esa_dit_store(esa_pair_active(m->dit)), bytes) : ESA_OK;
}

/* The transformer lacks device memory: the text encoder, which is done, leaves as a whole. */
static esa_status ask_text(void *user, int64_t bytes)
{
    (void)bytes;
    esa_model_drop_text(user);
    return ESA_OK;
}

/* ---------------------------------------------------------------- configurations */

static esa_status read_configs(esa_model *m)
{
    esa_folder f = { .ctx = m->ctx, .folder = m->folder, .parts = m->parts, .index = &m->index };
    ESA_TRY(esa_folder_path(&f, "model_index.json"));
    ESA_TRY(esa_config_index(m->ctx, &m->index, f.path));
    ESA_TRY(esa_family_find(m->ctx, &m->family, &m->index));
    m->configs = esa_mem_zalloc(&m->ctx->mem, m->family->config_bytes);
    if (!m->configs) return esa_fail(m->ctx, ESA_ERR_MEMORY, "out of memory for a model");
    ESA_TRY(m->family->read(&f, m->configs));
    ESA_TRY(esa_folder_path(&f, "scheduler/scheduler_config.json"));
    ESA_TRY(esa_config_sched(m->ctx, &m->sched, f.path));
    m->sched.to_zero = m->family->sigmas_to_zero;
    return esa_family_check_sched(m->ctx, m->family, m->sched.kind);
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

/* The published model with these sizes; NULL: none. */
static const esa_known_model *find_known(const esa_family *family, const esa_facts *facts)
{
    const esa_known_model *found = NULL;
    for (int32_t k = 0; k < family->known_count; k++) {
        const esa_known_model *n = &family->known[k];
        if (n->layers == facts->info.layers && n->heads == facts->info.heads &&
            n->head_dim == facts->info.head_dim && n->text_dim == facts->info.text_dim &&
            n->variant == facts->variant)
            found = n;
    }
    return found;
}

static void describe(esa_model *m)
{
    esa_model_info *i = &m->facts.info;
    m->family->describe(m->configs, &m->facts);
    i->struct_size = sizeof *i;
    last_name(i->name, sizeof i->name, m->folder);
    const esa_known_model *like = find_known(m->family, &m->facts);
    if (like)
        snprintf(i->name, sizeof i->name, "%s", like->name);
    else
        like = &m->family->known[m->family->known_default];
    i->frames = (like->frames - 1) / i->factor[0] * i->factor[0] + 1;
    i->height = down_to(like->height, (int64_t)i->factor[1] * i->patch[1]);
    i->width = down_to(like->width, (int64_t)i->factor[2] * i->patch[2]);
    i->steps = like->steps;
    i->guidance = like->guidance;
    i->boundary = m->facts.boundary;
    i->guidance_2 = m->facts.boundary <= 0 ? 0
                    : like->guidance_2 > 0 ? like->guidance_2
                                           : like->guidance;
}

/* Random weights: folder is the name of a shape. */
static esa_status describe_shape(esa_model *m)
{
    esa_model_info *i = &m->facts.info;
    int32_t size[3];
    ESA_TRY(esa_family_shape(m->ctx, &m->family, &m->configs, m->folder, &m->sched, size));
    m->sched.to_zero = m->family->sigmas_to_zero;
    describe(m);
    snprintf(i->name, sizeof i->name, "%s", m->folder);
    i->frames = size[0];
    i->height = size[1];
    i->width = size[2];
    return ESA_OK;
}

static esa_status describe_folder(esa_model *m)
{
    ESA_TRY(read_configs(m));
    describe(m);
    return ESA_OK;
}

/* What the transformer's weights take on the device. */
static void describe_store(const esa_model *m, esa_model_info *info)
{
    esa_store_plan plan;
    esa_store_get_plan(esa_dit_store(esa_pair_active(m->dit)), &plan);
    info->device = m->nn.be->device;
    info->resident_blocks = (int32_t)plan.resident;
    info->device_bytes = plan.resident_bytes + plan.lane_bytes;
    info->streamed_bytes = plan.streamed_bytes;
}

esa_status esa_model_get_info(const esa_model *model, esa_model_info *info)
{
    if (!model || !info) return ESA_ERR_ARGUMENT;
    if (info->struct_size != sizeof *info) return ESA_ERR_VERSION;
    *info = model->facts.info;
    info->image = model->facts.image;
    info->compute = model->nn.bf16 || !model->nn.be->host_memory ? ESA_COMPUTE_BF16
                                                                 : ESA_COMPUTE_F32;
    int64_t held[3] = { 0, 0, 0 }, mapped[3] = { 0, 0, 0 };
    if (model->dit) esa_pair_memory(model->dit, &info->parameters[0], &held[0], &mapped[0]);
    if (model->dit) describe_store(model, info);
    if (model->vae) esa_vae_memory(model->vae, &info->parameters[1], &held[1], &mapped[1]);
    if (model->text && model->text->loaded)
        esa_text_memory(model->text, &info->parameters[2], &held[2], &mapped[2]);
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
    esa_text_free(model->text);
    esa_vae_free(model->vae);
    esa_pair_free(model->dit);
    if (model->family) esa_mem_free(&mem, model->configs, model->family->config_bytes);
    esa_embeds_forget(model);
    esa_nn_close(&model->nn);
    esa_mem_free(&mem, model->folder, model->folder_bytes);
    esa_mem_free(&mem, model, sizeof *model);
}

/* Chooses the type that linear layers and attention are computed in. */
static esa_status choose_type(esa_nn *nn, const esa_model_params *p)
{
    const int32_t wanted = p->compute;
    if (wanted < ESA_COMPUTE_DEFAULT || wanted > ESA_COMPUTE_AUTO)
        return esa_fail(nn->ctx, ESA_ERR_ARGUMENT,
                        "compute is %d, expected ESA_COMPUTE_DEFAULT, F32, BF16 or AUTO", wanted);
    if (!nn->be->host_memory)
        return wanted == ESA_COMPUTE_F32
                   ? esa_fail(nn->ctx, ESA_ERR_UNSUPPORTED, "the %s computes in bf16, not in f32",
                              nn->be->name)
                   : ESA_OK;
    if (wanted == ESA_COMPUTE_BF16 && p->hold == ESA_HOLD_F32)
        return esa_fail(nn->ctx, ESA_ERR_ARGUMENT,
                        "weights held in f32 were asked for, and products in bf16; give one");
    const int32_t bf16 = wanted == ESA_COMPUTE_BF16 ||
                         (wanted == ESA_COMPUTE_AUTO && p->hold != ESA_HOLD_F32 &&
                          esa_nn_bf16_pays(nn->ctx));
    return esa_nn_use_dtype(nn, bf16 ? ESA_DTYPE_BF16 : ESA_DTYPE_F32);
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
    if (p.linear < ESA_LINEAR_BF16 || p.linear > ESA_LINEAR_F8_FAST)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "linear is %d, expected ESA_LINEAR_BF16, F8 or F8_FAST", p.linear);
    if ((p.transformer || p.transformer_2) && p.random)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "random weights were asked for, and weights from a file; give one");
    if ((p.lora_count || p.lora_2_count) && p.random)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "random weights were asked for, and LoRAs for them; give one");
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
    if (!status) status = choose_type(&m->nn, &p);
    m->nn.fast = p.linear == ESA_LINEAR_F8_FAST;
    m->folder_bytes = (int64_t)strlen(folder) + 1;
    m->folder = esa_mem_alloc(&m->ctx->mem, m->folder_bytes);
    m->env = (esa_part_env){ .nn = &m->nn,
                             .transformer = p.transformer,
                             .lora = p.lora,
                             .loras = p.lora_count,
                             .transformer_2 = p.transformer_2,
                             .lora_2 = p.lora_2,
                             .loras_2 = p.lora_2_count,
                             .hold = p.hold,
                             .linear = p.linear == ESA_LINEAR_BF16 ? ESA_DTYPE_BF16 : ESA_DTYPE_F8,
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
    if (!status) status = p.random ? describe_shape(m) : describe_folder(m);
    if (status)
        esa_model_free(m);
    else
        *model = m;
    return status;
}

static const void *config_at(const esa_model *m, size_t at)
{
    return (const char *)m->configs + at;
}

/* The image encoder belongs to the transformer's part. */
static esa_status make_transformer(esa_model *m)
{
    const esa_family *f = m->family;
    const void *second = m->facts.boundary > 0 ? config_at(m, f->dit_2_config) : NULL;
    const esa_status status = esa_pair_make(&m->env, &m->dit, f->dit, config_at(m, f->dit_config),
                                            second);
    if (!m->facts.image || (status && !m->env.report)) return status;
    char first[sizeof m->ctx->error];
    memcpy(first, m->ctx->error, sizeof first);
    const esa_status after = f->image_check(&m->env, m->configs);
    if (status) memcpy(m->ctx->error, first, sizeof first);
    return status ? status : after;
}

static esa_status make_text(esa_model *m)
{
    esa_part_env env = m->env;
    env.ask = ask_transformer;
    return esa_text_make(&env, &m->text, m->family->text, config_at(m, m->family->text_config));
}

static esa_status make_vae(esa_model *m)
{
    return esa_vae_make(&m->env, &m->vae, m->family->vae, config_at(m, m->family->vae_config));
}

/* Makes the parts, which compares them with their files. With a report all of them are compared, so
 * that it is complete; the message is that of the first that failed. */
static esa_status make_parts(esa_model *m)
{
    esa_status (*const make[3])(esa_model *) = { make_transformer, make_vae, make_text };
    esa_status status = ESA_OK;
    char first[sizeof m->ctx->error] = "";
    for (int32_t i = 0; i < 3; i++) {
        if (!(m->parts & ESA_PART_TRANSFORMER << i)) continue;
        const esa_status each = make[i](m);
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
    if (!esa_json_file_open(ctx, &file, path)) esa_json_hash(&file, hash);
    const esa_status status = file.status;
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
    if (!status) status = make_parts(m);
    esa_model_free(m);
    esa_ctx_leave(ctx);
    return status;
}

/* The text encoder is loaded when it is first needed. */
static esa_status load_parts(esa_model *m)
{
    ESA_TRY(make_parts(m));
    m->env.report = NULL; /* the report is complete */
    /* The transformer takes the device memory that is left. */
    if (m->vae) ESA_TRY(esa_vae_load(m->vae));
    return m->dit ? esa_pair_load(m->dit) : ESA_OK;
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
    if (!status) status = load(m, params);
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
    if (model->text && model->text->loaded) return ESA_OK;
    if (!(model->parts & ESA_PART_TEXT))
        return esa_fail(
            model->ctx, ESA_ERR_STATE,
            "this model was opened without its text encoder; give embeddings instead of a prompt");
    if (!model->text) ESA_TRY(make_text(model));
    const esa_status status = esa_text_load(model->text);
    if (!status) return ESA_OK;
    esa_text_free(model->text);
    model->text = NULL;
    return status;
}

void esa_model_drop_text(esa_model *model)
{
    if (model->nn.be->host_memory || !model->text || !model->text->loaded) return;
    esa_text_free(model->text);
    model->text = NULL;
}

void esa_model_size(const esa_model *model, const int32_t latent[3], int32_t size[3])
{
    esa_vae_size(model->family->vae, config_at(model, model->family->vae_config), latent, size);
}
