/* engine_door.h - how public calls of libesa_video enter a ctx, which libesa owns.
 * SPDX-License-Identifier: Apache-2.0
 *
 * This header is compiled into libesa_video, so ESA_BUILD_ID is the id of libesa_video's build. */
#ifndef ESA_CTX_ENGINE_DOOR_H
#define ESA_CTX_ENGINE_DOOR_H

#include <string.h>
#include "base/status.h"
#include "ctx/ctx.h"
#include "esa_build.h" /* written by the build: ESA_BUILD_ID */

/* Like esa_ctx_enter, but also refuses a libesa of another build. End the call with
 * esa_ctx_leave. */
static inline esa_status esa_engine_enter(esa_ctx *ctx)
{
    ESA_TRY(esa_ctx_enter(ctx));
    if (strcmp(esa_build_id(), ESA_BUILD_ID) == 0) return ESA_OK;
    esa_fail(ctx, ESA_ERR_VERSION,
             "libesa_video is build %s, libesa is build %s: install both from one build",
             ESA_BUILD_ID, esa_build_id());
    esa_ctx_leave(ctx);
    return ESA_ERR_VERSION;
}

#endif
