/* version.c - names of status codes, version numbers, and the sizes of the public structs.
 * SPDX-License-Identifier: Apache-2.0 */
#define ESA_EXPERIMENTAL /* esa_step_change */
#include <stddef.h>
#include "esa/esa_session.h"
#include "esa/esa_tensors.h"
#include "esa/esa_work.h"
#include "esa_build.h" /* written by the build: ESA_BUILD_ID */

const char *esa_status_name(esa_status status)
{
    switch (status) {
    case ESA_OK: return "ESA_OK";
    case ESA_ERR_ARGUMENT: return "ESA_ERR_ARGUMENT";
    case ESA_ERR_SHAPE: return "ESA_ERR_SHAPE";
    case ESA_ERR_DTYPE: return "ESA_ERR_DTYPE";
    case ESA_ERR_UNSUPPORTED: return "ESA_ERR_UNSUPPORTED";
    case ESA_ERR_MEMORY: return "ESA_ERR_MEMORY";
    case ESA_ERR_DEVICE: return "ESA_ERR_DEVICE";
    case ESA_ERR_IO: return "ESA_ERR_IO";
    case ESA_ERR_FORMAT: return "ESA_ERR_FORMAT";
    case ESA_ERR_MISMATCH: return "ESA_ERR_MISMATCH";
    case ESA_ERR_STATE: return "ESA_ERR_STATE";
    case ESA_ERR_VERSION: return "ESA_ERR_VERSION";
    case ESA_ERR_POLICY: return "ESA_ERR_POLICY";
    case ESA_ERR_INTERNAL: return "ESA_ERR_INTERNAL";
    default: return "unknown esa_status";
    }
}

#define TEXT_OF(x) #x
#define TEXT(x)    TEXT_OF(x)
const char *esa_version(void)
{
    return TEXT(ESA_VERSION_MAJOR) "." TEXT(ESA_VERSION_MINOR) "." TEXT(ESA_VERSION_PATCH);
}
const char *esa_build_id(void) { return ESA_BUILD_ID; }
int32_t esa_api_version(void) { return ESA_API_VERSION; }

const uint32_t *esa_abi(void)
{
    static const uint32_t size[ESA_ABI_COUNT] = {
        [ESA_ABI_CTX_PARAMS] = sizeof(esa_ctx_params),
        [ESA_ABI_TENSOR] = sizeof(esa_tensor),
        [ESA_ABI_LAYOUT] = sizeof(esa_layout),
        [ESA_ABI_SELECT_PARAMS] = sizeof(esa_select_params),
        [ESA_ABI_ATTENTION_PARAMS] = sizeof(esa_attention_params),
        [ESA_ABI_SHAPES] = sizeof(esa_shapes),
        [ESA_ABI_MASK_INFO] = sizeof(esa_mask_info),
        [ESA_ABI_SESSION_PARAMS] = sizeof(esa_session_params),
        [ESA_ABI_SESSION_STATS] = sizeof(esa_session_stats),
        [ESA_ABI_MASK_FILE_INFO] = sizeof(esa_mask_file_info),
        [ESA_ABI_TENSOR_INFO] = sizeof(esa_tensor_info),
        [ESA_ABI_DEVICE_INFO] = sizeof(esa_device_info),
        [ESA_ABI_WORK_PLAN_INFO] = sizeof(esa_work_plan_info),
        [ESA_ABI_WORK_COSTS] = sizeof(esa_work_costs),
        [ESA_ABI_STEP_CHANGE] = sizeof(esa_step_change),
        [ESA_ABI_CARRY] = sizeof(esa_carry),
    };
    return size;
}

/* The offsets are the ABI: a change here needs a new ESA_API_VERSION. */
#define AT(type, field, offset)                                                                    \
    _Static_assert(offsetof(type, field) == (offset), #type "." #field " moved")
AT(esa_ctx_params, alloc, 8);
AT(esa_ctx_params, cuda_stream, 48);
AT(esa_ctx_params, reserved, 64);
AT(esa_tensor, data, 16);
AT(esa_tensor, dim, 24);
AT(esa_tensor, stride, 56);
AT(esa_layout, window, 16);
AT(esa_layout, grid_q, 28);
AT(esa_layout, grid_k, 48);
AT(esa_layout, span_count, 68);
AT(esa_layout, span, 76);
AT(esa_layout, reserved, 204);
AT(esa_select_params, budget, 24);
AT(esa_select_params, keep_sink, 48);
AT(esa_select_params, seed, 64);
AT(esa_select_params, kv_len, 72);
AT(esa_select_params, layout, 80);
AT(esa_attention_params, scale, 16);
AT(esa_attention_params, lse, 32);
AT(esa_shapes, B, 16);
AT(esa_mask_info, B, 16);
AT(esa_mask_info, density_asked, 64);
AT(esa_mask_info, layout, 104);
