/* file_kind.c - says what a weight file is that comes without a model folder, and whether the
 * engine runs it.
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "ctx/engine_door.h"
#include "model/dit/cog_dit.h"
#include "model/dit/hunyuan_dit.h"
#include "model/dit/wan_dit.h"
#include "model/weights_internal.h"

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

static void tell(const esa_model_params *p, const char *line)
{
    if (p->report) p->report(p->report_user, line);
}

/* Recognises the family and compares the file with its configuration. */
static esa_status check(esa_ctx *ctx, esa_weights *w, const char *path, const esa_model_params *p)
{
    const esa_tensors *f = w->shard[0];
    char line[300] = "";
    esa_wan_config wan;
    esa_cog_config cog;
    esa_hunyuan_config hunyuan;
    enum { WAN, COG, HUNYUAN, FAMILIES };
    int32_t family = 0, kind = ESA_KIND_OTHER;
    for (; family < FAMILIES; family++) {
        kind = family == WAN   ? esa_wan_kind(w, &wan, line, sizeof line)
               : family == COG ? esa_cog_kind(w, &cog, line, sizeof line)
                               : esa_hunyuan_kind(w, &hunyuan, line, sizeof line);
        if (kind != ESA_KIND_OTHER) break;
    }
    if (kind == ESA_KIND_OTHER) {
        const char *what = other_kind(f);
        if (p->report) esa_weights_about(w, p->report, p->report_user);
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "%.200s is %s, expected a transformer of Wan, CogVideoX or HunyuanVideo",
                        f->label, what ? what : "no model that the engine knows");
    }
    tell(p, line);
    if (kind == ESA_KIND_KNOWN)
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED, "%.200s: the engine does not run this model: %s",
                        f->label, line);
    esa_nn nn;
    esa_nn_init(&nn, ctx);
    const esa_part_env env = {
        .nn = &nn, .transformer = path, .report = p->report, .report_user = p->report_user
    };
    const esa_status status = family == WAN   ? esa_wan_dit_check(&env, &wan)
                              : family == COG ? esa_cog_dit_check(&env, &cog)
                                              : esa_hunyuan_dit_check(&env, &hunyuan);
    esa_nn_close(&nn);
    return status;
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
