// entry.cu - the only exported function of the plugin. It checks that both sides come from the same
// build and returns the table.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/runtime/plugin.cuh"

#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include "esa_build.h" // written by the build: ESA_BUILD_ID

#define TEXT_OF(x) #x
#define TEXT(x)    TEXT_OF(x)
#define PLUGIN_VERSION                                                                             \
    TEXT(ESA_VERSION_MAJOR) "." TEXT(ESA_VERSION_MINOR) "." TEXT(ESA_VERSION_PATCH)

static const esa_cuda_rows rows = { norm_run, qk_run, act_run };
static const esa_cuda_products products = { products_library, product_prepare, product_workspace,
                                            product_run };
static const esa_cuda_transfer transfer = { transfer_pin,    transfer_unpin,  transfer_fetch,
                                            transfer_store,  transfer_arrive, transfer_used,
                                            transfer_landed, convert_run };
static const esa_cuda_latents latents = { patches_run, modulate_run, guide_run, step_run,
                                          figures_run };
static const esa_cuda_biased biased = { biased_run };
static const esa_cuda_planes planes = { conv_bytes,       conv_pack,      conv_run,
                                        pixel_norm_run,   group_norm_run, border_run,
                                        from_latents_run, to_bytes_run,   zero_run };

static const esa_cuda_table table = {
    sizeof(esa_cuda_table),
    ESA_CUDA_ABI,
    PLUGIN_VERSION,
    device_count,
    device_open,
    device_close,
    device_error,
    device_info,
    device_alloc,
    device_release,
    device_upload,
    device_download,
    device_copy,
    device_sync,
    mark_create,
    mark_release,
    mark_record,
    mark_elapsed,
    attention_workspace,
    attention_run,
    attention_kernel,
    attention_both,
    exact_take,
    exact_mend,
    select_workspace,
    select_run,
    importance_run,
    from_importance_run,
    errors_run,
    order_workspace,
    order_run,
    bits_to_lists,
    lists_to_bits,
    &rows,
    &products,
    &latents,
    &biased,
    &planes,
    &transfer,
};

extern "C" __attribute__((visibility("default"))) const esa_cuda_table *esa_cuda_entry(
    uint32_t abi, const esa_cuda_host *host, char *error, int32_t error_bytes)
{
    /* only a struct of the same size has its build where we look for it */
    const esa_cuda_host ours = esa_cuda_host_of(ESA_BUILD_ID);
    const bool sizes = abi == ESA_CUDA_ABI && host->struct_size == sizeof *host &&
                       !memcmp(host, &ours, offsetof(esa_cuda_host, build));
    const char *theirs = sizes && host->build ? host->build : "of another interface";
    if (sizes && strcmp(theirs, ESA_BUILD_ID) == 0) return &table;
    snprintf(error, (size_t)error_bytes,
             "libesa_cuda is build %s (plugin interface %d), libesa is build %s (interface %u): "
             "install both from one build",
             ESA_BUILD_ID, ESA_CUDA_ABI, theirs, abi);
    return nullptr;
}
