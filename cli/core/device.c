/* device.c - where networks run: --device auto, cpu, cuda or cuda:N; sizes of memory.
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/cli.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Asks GPU `ordinal` whether it can run networks. If not, why gets the reason. */
static int gpu_ready(cli_device *d, int32_t ordinal, char *why, size_t size)
{
    esa_ctx *ctx = NULL;
    esa_ctx_params params = esa_ctx_params_default();
    int32_t count = 0;
    params.threads = 1;
    params.cuda_device = ordinal;
    if (esa_ctx_create(&ctx, &params)) {
        snprintf(why, size, "a context could not be made");
        return 0;
    }
    d->gpu.struct_size = sizeof d->gpu;
    esa_status status = esa_device_count(ctx, &count);
    if (!status) status = esa_device_get_info(ctx, &d->gpu);
    d->gpus = count;
    if (!status) status = esa_device_library(ctx, d->library, (int32_t)sizeof d->library);
    snprintf(why, size, "%s", esa_ctx_error(ctx));
    esa_ctx_free(ctx);
    return !status;
}

/* 1 if this machine has an NVIDIA driver: then its user expects the GPU to be used. */
static int has_driver(void) { return access("/proc/driver/nvidia/version", F_OK) == 0; }

int cli_device_choose(cli_device *d, const char *asked, const char *what)
{
    char why[600];
    memset(d, 0, sizeof *d);
    const int any = !asked || strcmp(asked, "auto") == 0;
    if (!any && strcmp(asked, "cpu") == 0) return CLI_OK;
    if (!any) {
        char *end = NULL;
        const int numbered = strncmp(asked, "cuda:", 5) == 0 && asked[5] >= '0' && asked[5] <= '9';
        const long ordinal = numbered ? strtol(asked + 5, &end, 10) : 0;
        if ((numbered ? *end != 0 || ordinal > 1023 : strcmp(asked, "cuda") != 0))
            return cli_usage("%s: --device is '%s', expected auto, cpu, cuda or cuda:N", what,
                             asked);
        d->ordinal = (int32_t)ordinal;
    }
    if (gpu_ready(d, d->ordinal, why, sizeof why)) {
        d->device = ESA_DEVICE_CUDA;
        fprintf(stderr, "device    cuda:%d: %s, %.1f GiB free\n", (int)d->ordinal, d->gpu.name,
                (double)d->gpu.free_memory / 1073741824.0);
        return CLI_OK;
    }
    if (!any) return cli_fail("%s: --device %s: %s", what, asked, why);
    if (d->gpus > 0 || has_driver()) fprintf(stderr, "device    cpu: %s\n", why);
    return CLI_OK;
}

void cli_device_json(cli_json *json, const cli_device *d)
{
    cli_json_open(json, "device", '{');
    cli_json_text(json, "kind", d->device == ESA_DEVICE_CUDA ? "cuda" : "cpu");
    if (d->device == ESA_DEVICE_CUDA) {
        cli_gpu_json(json, "gpu", &d->gpu);
        cli_json_text(json, "products", d->library);
    }
    cli_json_close(json);
}

int cli_size_parse(const char *text, int64_t *bytes, const char *name, const char *what)
{
    static const char units[] = "KMGT";
    char *end;
    const double number = strtod(text, &end);
    double scale = 1;
    const char *unit = *end ? strchr(units, *end) : NULL;
    if (unit) {
        for (const char *u = units; u <= unit; u++) scale *= 1024;
        end++;
    }
    if (end == text || *end || !(number > 0) || number * scale > 9e15)
        return cli_usage("%s: %s is '%s', expected a size such as 16G or 800M", what, name, text);
    *bytes = (int64_t)(number * scale);
    return CLI_OK;
}
