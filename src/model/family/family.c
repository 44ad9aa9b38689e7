/* family.c - the list of families, and how a folder or a name finds its own.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/family/family.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "io/safetensors.h"
#include "model/sched/sched.h"

const esa_family *const esa_families[] = { &esa_wan_family, &esa_cog_family, &esa_hunyuan_family,
                                           NULL };

esa_status esa_folder_path(esa_folder *f, const char *name)
{
    const size_t n = strlen(f->folder);
    const int length = snprintf(f->path, sizeof f->path, "%s%s%s", f->folder,
                                n && f->folder[n - 1] == '/' ? "" : "/", name);
    if (length < (int)sizeof f->path) return ESA_OK;
    return esa_fail(f->ctx, ESA_ERR_ARGUMENT, "the name of the model's folder is too long");
}

int32_t esa_folder_has(esa_folder *f, const char *name)
{
    return !esa_folder_path(f, name) && access(f->path, R_OK) == 0;
}

static int32_t is_listed(const char *const *list, const char *name)
{
    for (; *list; list++)
        if (strcmp(*list, name) == 0) return 1;
    return 0;
}

/* Appends names to text, with commas between them. */
static void append(char *text, size_t size, const char *name)
{
    const size_t used = strlen(text);
    snprintf(text + used, size - used, "%s%s", used ? ", " : "", name);
}

static void append_all(char *text, size_t size, const char *const *list)
{
    for (; *list; list++) append(text, size, *list);
}

void esa_family_names(char *text, size_t size)
{
    *text = 0;
    for (int32_t i = 0; esa_families[i]; i++) {
        const size_t used = strlen(text);
        snprintf(text + used, size - used, "%s%s",
                 !i                    ? ""
                 : esa_families[i + 1] ? ", "
                                       : " or ",
                 esa_families[i]->name);
    }
}

esa_status esa_family_find(esa_ctx *ctx, const esa_family **family, const esa_model_index *index)
{
    char expected[512] = "";
    *family = NULL;
    for (int32_t i = 0; esa_families[i]; i++) {
        append_all(expected, sizeof expected, esa_families[i]->pipelines);
        if (is_listed(esa_families[i]->pipelines, index->pipeline)) *family = esa_families[i];
    }
    if (*family) return ESA_OK;
    return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                    "model_index.json: _class_name is %s, expected one of %s",
                    esa_quote(index->pipeline).text, expected);
}

esa_status esa_family_check_sched(esa_ctx *ctx, const esa_family *family, int32_t kind)
{
    if (esa_sched_group(kind) == family->sched_group) return ESA_OK;
    return esa_fail(ctx, ESA_ERR_UNSUPPORTED, "%s does not run with the scheduler %s", family->name,
                    esa_sched_name(kind));
}

esa_status esa_family_shape(esa_ctx *ctx, const esa_family **family, void **configs,
                            const char *name, esa_sched_config *sched, int32_t size[3])
{
    char expected[512] = "";
    *configs = NULL;
    for (int32_t i = 0; esa_families[i]; i++) {
        const esa_family *f = esa_families[i];
        void *room = esa_mem_zalloc(&ctx->mem, f->config_bytes);
        if (!room) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for a model");
        if (f->shape(name, room, sched, size)) {
            *family = f;
            *configs = room;
            return ESA_OK;
        }
        esa_mem_free(&ctx->mem, room, f->config_bytes);
        append(expected, sizeof expected, f->shape_names);
    }
    return esa_fail(ctx, ESA_ERR_ARGUMENT,
                    "there are no random weights for %.100s, expected one of %s", name, expected);
}
