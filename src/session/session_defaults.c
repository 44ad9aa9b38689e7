/* session_defaults.c - the product's default rules: order, blocks and tail of a model run.
 * SPDX-License-Identifier: Apache-2.0
 *
 * docs/quality.md holds the measurements behind them. */
#include <esa/esa_session.h>

/* Small blocks keep several blocks per row in short sequences, and CPU kernels run them as fast as
 * large ones. */
enum { SHORT_BLOCK = 64 };

static int32_t order_of(int32_t mode, int32_t selector)
{
    if (mode == ESA_SESSION_CACHED) return ESA_ORDER_DEFAULT;
    return selector == ESA_SELECT_RF_V2 ? ESA_ORDER_TILE : ESA_ORDER_HILBERT;
}

esa_session_params esa_session_params_recommended(int32_t mode, int32_t selector, int64_t tokens)
{
    esa_session_params p = esa_session_params_default();
    if (mode != ESA_SESSION_ONLINE) selector = ESA_SELECT_ENTROPY;
    p.mode = mode;
    p.select = esa_select_params_default(selector);
    p.select.layout.order = order_of(mode, selector);
    if (tokens > 0 && tokens <= ESA_SHORT_TOKENS) p.select.block_q = p.select.block_k = SHORT_BLOCK;
    const int skips = mode == ESA_SESSION_ONLINE || mode == ESA_SESSION_CACHED;
    p.attention.tail = skips ? ESA_TAIL_POOLED : ESA_TAIL_NONE;
    return p;
}
