/* clip_options.c - option rows that the commands which make clips share, read into a clip_request.
 * SPDX-License-Identifier: Apache-2.0 */
#include "clip/clip.h"

#include <string.h>

static int add(cli_option *table, int used, const cli_option *rows)
{
    for (; rows->name && used < CLIP_MAX_OPTIONS - 1; rows++) table[used++] = *rows;
    memset(&table[used], 0, sizeof table[used]);
    return used;
}

const cli_option *clip_options(cli_option table[CLIP_MAX_OPTIONS], const cli_option *own,
                               int groups, clip_request *r)
{
    const cli_option end = { NULL, 0, NULL, NULL, 0, 0, 0, NULL };
    const cli_option size[] = {
        { "--frames", CLI_INT, &r->frames, "N", 1, 100000, 0,
          "rounded down to what the model makes (the model's own)" },
        { "--height", CLI_INT, &r->height, "N", 1, 16384, 0, "pixels (the model's own)" },
        { "--width", CLI_INT, &r->width, "N", 1, 16384, 0, "pixels (the model's own)" },
        { "--steps", CLI_INT, &r->steps, "N", 1, 10000, 0, "of denoising (the model's own)" },
        end,
    };
    const cli_option noise[] = {
        { "--guidance", CLI_REAL, &r->guidance, "X", 0, 1000, 0,
          "classifier-free guidance, 1 or less: none (the model's own)" },
        { "--negative-prompt", CLI_TEXT, &r->negative, "TEXT", 0, 0, 0, "what to keep away from" },
        { "--scheduler", CLI_CHOICE, &r->scheduler, "model|unipc|unipc-0.36|euler", 0, 0, 0,
          "unipc-0.36: the sigmas of diffusers up to 0.36 (model)" },
        { "--flow-shift", CLI_REAL, &r->shift, "X", 0, 1000, 0,
          "of the scheduler (the model's own)" },
        end,
    };
    const cli_option dense[] = {
        { "--warmup", CLI_REAL, &r->warmup, "X", 0, 1, 0,
          "fraction of the steps that run dense first (0.2)" },
        { "--dense-first-layer", CLI_INT, &r->dense_first, "0|1", 0, 1, 0,
          "layer 0 always runs dense (1)" },
        { "--dense-layers", CLI_INTS, &r->dense_layers, "N,...", 0, 65535, 0,
          "further layers that run dense" },
        end,
    };
    const cli_option blocks[] = {
        { "--order", CLI_CHOICE, &r->order, CLI_ORDERS, 0, 0, 0,
          "token order (hilbert; rf_v2: tile)" },
        { "--window", CLI_INTS, &r->window, "t,h,w", 1, 4096, 3, "box of order tile3d" },
        { "--block", CLI_TEXT, &r->block, "QxK", 0, 0, 0,
          "query x key tokens of a block (64x64; beyond 16384 tokens 256x128, rf_v2 and ada_bsa "
          "128x128)" },
        { "--samples", CLI_INT, &r->samples, "N", 1, 256, 0,
          "entropy: queries scored per block (4)" },
        end,
    };
    const cli_option sparse[] = {
        { "--tail", CLI_CHOICE, &r->tail, CLI_TAILS, 0, 0, 0,
          "what stands in for skipped blocks (pooled)" },
        { "--cdf", CLI_REAL, &r->cdf, "X", 0, 1, 0, "ada_bsa: CDF threshold (1: off)" },
        { "--refresh", CLI_INT, &r->refresh, "N", 1, 1000, 0, "new masks every N steps (1)" },
        end,
    };
    const cli_option cached[] = {
        { "--masks", CLI_TEXT, &r->masks, "FILE", 0, 0, 0,
          "cached: the mask file, made by `esa calibrate`" },
        { "--step-map", CLI_CHOICE, &r->step_map, "exact|nearest", 0, 0, 0,
          "cached: masks made for another number of steps (exact)" },
        end,
    };
    const cli_option *const rows[] = { size, noise, dense, blocks, sparse, cached };
    int used = add(table, 0, own);
    for (int i = 0; i < 6; i++)
        if (groups & 1 << i) used = add(table, used, rows[i]);
    return table;
}
