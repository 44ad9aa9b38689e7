/* begin.c - the memory of a video: the transformer's activations, scratch, and a decoder that fits.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/run/run.h"

#include <stdio.h>
#include "base/host_limits.h"
#include "base/number.h"
#include "nn/ops.h"

/* ---------------------------------------------------------------- tiles of the decoder */

/* Sides of tiles in pixels that are tried when whole frames do not fit. */
static const int32_t tiles[] = { 1024, 512, 256, 128, 64 };

/* 1 if the decoder can have these bytes, of which spare are left. Host memory is also allocated
 * once and freed again, as there are limits that spare does not know (ulimit -v); a transformer
 * that has its activations gives them back before. */
static int32_t holds(esa_model *m, int64_t bytes, int64_t spare)
{
    const int64_t more = bytes - (m->dit ? esa_dit_bytes(esa_pair_active(m->dit)) : 0);
    void *probe = NULL;
    if (bytes == INT64_MAX || bytes > spare) return 0;
    if (!m->nn.be->host_memory || more <= 0) return 1;
    if (m->nn.be->alloc(m->ctx, &probe, more)) return 0;
    m->nn.be->release(m->ctx, probe, more);
    return 1;
}

int64_t esa_model_host_spare(const esa_model *m)
{
    const int64_t left = esa_host_available(m->host_root ? m->host_root : "");
    if (left == INT64_MAX) return left;
    return left - left / 16 + (m->dit ? esa_dit_bytes(esa_pair_active(m->dit)) : 0);
}

/* *spare = device memory that the decoder can have at most. An idle text encoder gives way. */
static esa_status find_spare(esa_model *m, int64_t *spare, int64_t scratch, int64_t need)
{
    if (!m->dit) { /* the decoder alone: all but a margin, within the limit */
        ESA_TRY(m->nn.be->transfer->room(m->ctx, spare));
        *spare -= *spare / 16;
        if (m->env.limit) *spare = esa_min64(*spare, m->env.limit - m->env.limit / 16 - m->nn.held);
        return ESA_OK;
    }
    ESA_TRY(esa_store_spare(esa_dit_store(esa_pair_active(m->dit)), spare, scratch));
    if (*spare >= need || !m->text) return ESA_OK;
    esa_model_drop_text(m);
    return esa_store_spare(esa_dit_store(esa_pair_active(m->dit)), spare, scratch);
}

esa_status esa_model_find_tile(esa_model *m, const int32_t latent[3], const esa_decoder_room *room,
                               int32_t *tile, int64_t *bytes)
{
    const int64_t more = room->more;
    const int32_t unit = m->facts.tile_unit, asked = *tile;
    const int32_t side = m->facts.info.factor[1] * (latent[1] > latent[2] ? latent[1] : latent[2]);
    const int64_t whole = esa_vae_bytes(m->vae, latent, asked);
    int64_t spare = room->host;
    *bytes = whole;
    if (!m->nn.be->host_memory)
        ESA_TRY(find_spare(m, &spare, room->scratch, esa_size_add(whole, more)));
    if (holds(m, whole, spare - more)) return ESA_OK;
    for (size_t i = 0; i < sizeof tiles / sizeof tiles[0] && !asked; i++) {
        if (tiles[i] >= side || tiles[i] % unit) continue;
        *bytes = esa_vae_bytes(m->vae, latent, tiles[i]);
        if (!holds(m, *bytes, spare - more)) continue;
        *tile = tiles[i];
        m->ctx->error[0] = 0; /* no failure */
        esa_log(m->ctx, ESA_LOG_INFO, "decoding in tiles of %d pixels: whole frames take %.2f GB",
                (int)*tile, 1e-9 * (double)whole);
        return ESA_OK;
    }
    int32_t size[3];
    char left[48] = "";
    esa_model_size(m, latent, size);
    if (spare != INT64_MAX)
        esa_text_format(left, sizeof left, ", %.2f GB are left",
                        1e-9 * (double)esa_max64(0, spare - more));
    return esa_fail(m->ctx, ESA_ERR_MEMORY,
                    "out of memory: decoding %d x %d pixels%s takes %.2f GB%s", size[2], size[1],
                    asked ? " in these tiles" : ", even in tiles,", 1e-9 * (double)*bytes, left);
}

/* ---------------------------------------------------------------- the plan in words */

static void say_memory(const esa_model *m, const esa_run *r)
{
    const double gib = 1073741824.0;
    char line[256], tile[48] = "", carry[48] = "";
    esa_store_plan plan;
    esa_store_get_plan(esa_dit_store(esa_pair_active(m->dit)), &plan);
    const int64_t weights = plan.resident_bytes + plan.lane_bytes,
                  activations = esa_dit_bytes(esa_pair_active(m->dit)),
                  attention = esa_nn_reserved(&m->nn) + r->mask_bytes;
    if (r->carry_device)
        esa_text_format(carry, sizeof carry, "carry %.2f, ", (double)r->carry_device / gib);
    if (r->tile) snprintf(tile, sizeof tile, " in tiles of %d pixels", (int)r->tile);
    esa_text_format(
        line, sizeof line,
        "memory    %.2f GiB: weights %.2f, activations %.2f, attention %.2f, %srest %.2f; then "
        "%.2f for the decoder%s",
        (double)(m->nn.held + attention + r->carry_device) / gib, (double)weights / gib,
        (double)activations / gib, (double)attention / gib, carry,
        (double)(m->nn.held - weights - activations) / gib, (double)r->decoder / gib, tile);
    r->p.say(r->p.say_user, line);
}

/* On the CPU: the type of linear layers and attention. */
static void say_type(const esa_model *m, const esa_run *r)
{
    char line[160];
    snprintf(line, sizeof line, "compute   %s in linear layers and attention (kernels: %s)",
             m->nn.bf16 ? "bf16" : "f32", esa_nn_kernels(&m->nn));
    r->p.say(r->p.say_user, line);
}

void esa_run_say(const esa_model *m, const esa_run *r)
{
    if (!r->p.say) return;
    if (m->nn.be->host_memory) {
        say_type(m, r);
        return;
    }
    esa_run_say_carry(m, r);
    say_memory(m, r);
}

/* ---------------------------------------------------------------- beginning */

esa_status esa_run_begin(esa_model *m, esa_run *r)
{
    const int32_t host = m->nn.be->host_memory;
    const int64_t records = r->p.session.mode == ESA_SESSION_RECORD ? r->mask_bytes : 0;
    esa_dit_room room = { .beside = r->mask_bytes };
    if (!r->p.session.carry_alloc) room.beside += r->carry_least;
    if (!host) room.beside += esa_run_preview_bytes(m, r);
    esa_decoder_room left = { .more = host ? 0 : records };
    ESA_TRY(esa_nn_reserve(&m->nn, -1, &room.scratch)); /* for products */
    room.scratch = esa_max64(room.scratch, r->scratch);
    for (int32_t b = 0; b < r->branches; b++)
        room.text_rows += esa_dit_text_rows(esa_pair_active(m->dit), &r->embeds.text[b]);
    r->tile = r->p.vae_tile;
    left.scratch = room.scratch;
    /* On a device the weights leave room for the decoder. In host memory it takes the place of the
     * activations, so they must be there first; but what the system has left is asked before, as
     * memory counts there only once it is used. */
    r->host_left = esa_model_host_spare(m);
    left.host = r->host_left;
    if (!host && r->p.decode)
        ESA_TRY(esa_model_find_tile(m, r->latent, &left, &r->tile, &r->decoder));
    room.after = r->decoder + records; /* a session that records lives as long as the call */
    esa_pair_set_room(m->dit, &room);
    ESA_TRY(esa_pair_begin(m->dit, r->latent, &r->layout, r->selector, r->mode, r->branches));
    ESA_TRY(esa_nn_reserve(&m->nn, r->scratch, NULL));
    if (r->p.decode && host)
        ESA_TRY(esa_model_find_tile(m, r->latent, &left, &r->tile, &r->decoder));
    if (r->p.say)
        esa_store_describe(esa_dit_store(esa_pair_active(m->dit)), r->p.say, r->p.say_user);
    return ESA_OK;
}
