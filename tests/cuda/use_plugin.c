/* use_plugin.c - opens libesa_cuda as libesa does and holds it to cuda.h: a caller built
 * differently is refused with a message, the table is whole, and without a GPU every way in
 * answers with a status and a message. With a GPU it is opened, asked and closed. use_plugin
 * PLUGIN
 * SPDX-License-Identifier: Apache-2.0 */
#include "cuda/cuda.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "esa_build.h" /* written by the build: ESA_BUILD_ID */

static char error[256];

static void expect(int32_t holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "use_plugin: %s (\"%s\")\n", what, error);
    exit(1);
}

/* A refusal is NULL and a message that says what to do. */
static void expect_refused(esa_cuda_entry_fn *entry, uint32_t abi, const esa_cuda_host *host,
                           const char *what)
{
    error[0] = 0;
    expect(entry(abi, host, error, sizeof error) == NULL, what);
    expect(strstr(error, "install both from one build") != NULL, "a refusal without a message");
}

int main(int argc, char **argv)
{
    if (argc != 2) return fprintf(stderr, "use_plugin PLUGIN\n"), 2;
    void *plugin = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!plugin) return fprintf(stderr, "%s\n", dlerror()), 1;
    esa_cuda_entry_fn *entry;
    *(void **)&entry = dlsym(plugin, ESA_CUDA_ENTRY_NAME);
    expect(entry != NULL, "the entry function is missing");

    const esa_cuda_host host = esa_cuda_host_of(ESA_BUILD_ID);
    expect_refused(entry, ESA_CUDA_ABI + 1, &host, "another interface was accepted");
    for (size_t field = 0; field < offsetof(esa_cuda_host, build) / sizeof(uint32_t); field++) {
        esa_cuda_host other = host;
        ((uint32_t *)&other)[field]++;
        expect_refused(entry, ESA_CUDA_ABI, &other,
                       "a caller with another struct size was accepted");
    }

    esa_cuda_host stranger = host;
    stranger.build = "0.0.0-stranger";
    expect_refused(entry, ESA_CUDA_ABI, &stranger, "a caller of another build was accepted");
    expect(strstr(error, "0.0.0-stranger") && strstr(error, ESA_BUILD_ID),
           "the refusal does not name both builds");

    const esa_cuda_table *table = entry(ESA_CUDA_ABI, &host, error, sizeof error);
    expect(table != NULL, "the plugin refuses its own header");
    expect(table->struct_size == sizeof *table && table->abi == ESA_CUDA_ABI && table->version[0],
           "the head of the table");
    for (size_t at = offsetof(esa_cuda_table, devices); at < sizeof *table; at += sizeof(void *)) {
        void *function;
        memcpy(&function, (const char *)table + at, sizeof function);
        expect(function != NULL, "an entry of the table is NULL");
    }
    expect(table->rows->norm && table->rows->qk && table->rows->act,
           "an operation on rows is NULL");
    expect(table->latents->patches && table->latents->guide && table->latents->step &&
               table->latents->figures,
           "an operation on latents is NULL");
    expect(table->products->library && table->products->prepare && table->products->workspace &&
               table->products->product,
           "an operation of products is NULL");
    expect(table->biased->attention != NULL, "attention with biases is NULL");
    expect(table->planes->conv_bytes && table->planes->conv_pack && table->planes->conv &&
               table->planes->pixel_norm && table->planes->group_norm && table->planes->border &&
               table->planes->from_latents && table->planes->to_bytes && table->planes->zero,
           "an operation on planes is NULL");

    int32_t count = -1;
    esa_cuda_device *dev = (esa_cuda_device *)(void *)error; /* must become NULL */
    error[0] = 0;
    const esa_status found = table->devices(&count, error, sizeof error);
    if (found) {
        expect(found == ESA_ERR_DEVICE && count == 0 && strlen(error) > 10,
               "no GPU, but no clear answer");
        error[0] = 0;
        expect(table->open(&dev, 0, NULL, error, sizeof error) == ESA_ERR_DEVICE && !dev &&
                   strlen(error) > 10,
               "a GPU that is not there was opened");
        printf("no GPU: %s\n", error);
        return 0;
    }
    expect(count > 0, "no GPU, but no error");
    expect(table->open(&dev, count, NULL, error, sizeof error) == ESA_ERR_DEVICE && !dev,
           "a GPU past the last one was opened");
    dev = (esa_cuda_device *)(void *)error;
    expect(table->open(&dev, 0, "sm70", error, sizeof error) == ESA_ERR_UNSUPPORTED && !dev,
           "an unknown kernel level was accepted");
    expect(table->open(&dev, 0, "sm80", error, sizeof error) == ESA_OK && dev,
           "GPU 0 did not open with sm80");
    esa_cuda_info info;
    expect(table->info(dev, &info) == ESA_OK && !strcmp(info.kernels, "sm80"),
           "sm80 was asked for");
    table->close(dev);
    expect(table->open(&dev, 0, "", error, sizeof error) == ESA_OK &&
               table->info(dev, &info) == ESA_OK,
           "GPU 0 did not open");
    printf("GPU 0: %s, compute capability %d.%d, kernels %s, %lld MiB free\n", info.name,
           (int)info.major, (int)info.minor, info.kernels, (long long)(info.free_memory >> 20));
    table->close(dev);
    return 0;
}
