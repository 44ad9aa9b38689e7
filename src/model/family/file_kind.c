/* file_kind.c - says what a weight file is that comes without a model folder, and whether the
 * engine runs it.
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "ctx/engine_door.h"
#include "model/family/family.h"
#include "model/weights/weights_internal.h"

/* Files that are no transformer of a family below, by a part of a name in them. The first that fits
 * is told. */
static const struct {
    const char *part, *says;
} others[] = {
    { "lora_A", "a LoRA, for --lora" },
    { "lora_down", "a LoRA, for --lora" },
    { "encoder.block.", "a T5 text encoder" },
    { "enc.blk.", "a T5 text encoder" },
    { "text_model.", "a CLIP model" },
    { "model.layers.", "a language model" },
    { "decoder.", "a VAE" },
};

static const char *other_kind(const esa_tensors *f)
{
    for (size_t k = 0; k < sizeof others / sizeof others[0]; k++)
        for (int64_t i = 0; i < f->count; i++)
            if (strstr(f->entry[i].name, others[k].part)) return others[k].says;
    return NULL;
}

static esa_status compare(esa_ctx *ctx, const esa_dit_kind *kind, const void *config,
                          const char *path, const esa_model_params *p)
{
    esa_nn nn;
    esa_dit *dit;
    esa_nn_init(&nn, ctx);
    const esa_part_env env = {
        .nn = &nn, .transformer = path, .report = p->report, .report_user = p->report_user
    };
    const esa_status status = esa_dit_make(&env, &dit, kind, config);
    esa_dit_free(dit);
    esa_nn_close(&nn);
    return status;
}

/* If the file is of the kind, says what it is and compares it with its configuration. */
static esa_status try_kind(esa_ctx *ctx, esa_weights *w, const esa_dit_kind *kind, int32_t *known,
                           const char *path, const esa_model_params *p)
{
    char line[300] = "";
    const int64_t bytes = esa_dit_config_bytes(kind);
    void *config = esa_mem_zalloc(&ctx->mem, bytes);
    if (!config) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for a model");
    esa_status status = ESA_OK;
    *known = esa_dit_recognise(kind, w, config, line, sizeof line);
    if (*known != ESA_KIND_OTHER && p->report) p->report(p->report_user, line);
    if (*known == ESA_KIND_KNOWN)
        status = esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                          "%.200s: the engine does not run this model: %s", w->shard[0]->label,
                          line);
    if (*known == ESA_KIND_RUNS) status = compare(ctx, kind, config, path, p);
    esa_mem_free(&ctx->mem, config, bytes);
    return status;
}

static esa_status check(esa_ctx *ctx, esa_weights *w, const char *path, const esa_model_params *p)
{
    const esa_tensors *f = w->shard[0];
    for (int32_t i = 0; esa_families[i]; i++) {
        int32_t known;
        ESA_TRY(try_kind(ctx, w, esa_families[i]->dit, &known, path, p));
        if (known != ESA_KIND_OTHER) return ESA_OK;
    }
    char names[256];
    const char *what = other_kind(f);
    esa_family_names(names, sizeof names);
    if (p->report) esa_weights_about(w, p->report, p->report_user);
    return esa_fail(ctx, ESA_ERR_UNSUPPORTED, "%.200s is %s, expected a transformer of %s",
                    f->label, what ? what : "no model that the engine knows", names);
}

static esa_status check_file(esa_ctx *ctx, const char *path, const esa_model_params *params)
{
    const esa_model_params p = params ? *params : esa_model_params_default();
    esa_weights *w = NULL;
    if (!path || !*path) return esa_fail(ctx, ESA_ERR_ARGUMENT, "no file was given");
    if (p.struct_size != sizeof p)
        return esa_fail(ctx, ESA_ERR_VERSION,
                        "esa_model_params has struct_size %u, this library expects %u",
                        p.struct_size, (unsigned)sizeof p);
    ESA_TRY(esa_weights_open_file(ctx, &w, path, "file"));
    const esa_status status = check(ctx, w, path, &p);
    esa_weights_free(w);
    return status;
}

esa_status esa_model_check_file(esa_ctx *ctx, const char *path, const esa_model_params *params)
{
    ESA_TRY(esa_engine_enter(ctx));
    const esa_status status = check_file(ctx, path, params);
    esa_ctx_leave(ctx);
    return status;
}
