/* calibrate_size.c - the size of a calibration: blocks, disk, memory.
 * SPDX-License-Identifier: Apache-2.0 */
#include "clip/calibrate.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#include <sys/statvfs.h>

#define MOST_CONTRIBUTIONS 255 /* per cell, see docs/mask-files.md */

static int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t calibrate_groups(const clip_request *r)
{
    return r->p.session.record_groups ? r->p.session.record_groups : r->p.steps;
}

int calibrate_measure(calibrate_size *z, const calibrate_options *o, const esa_model_info *info,
                      int64_t prompts)
{
    const clip_request *r = &o->clip;
    const esa_session_params *s = &r->p.session;
    const int64_t branches = r->p.guidance > 1 ? 2 : 1, groups = calibrate_groups(r);
    memset(z, 0, sizeof *z);
    z->nq = up(r->tokens, s->select.block_q);
    z->nk = up(r->tokens, s->select.block_k);
    const int64_t apart = s->record_per_branch ? branches : 1,
                  cells = apart * info->layers * groups, rows = info->heads * z->nq;
    const int errors = o->method == CALIBRATE_ERROR, levels = s->select.tail == ESA_TAIL_LEVELS;
    const int64_t masks = errors ? o->works.count : o->budgets.count,
                  scores = errors                                ? 0
                           : o->importance == ESA_IMPORTANCE_U8  ? z->nk + up(z->nk, 4) + 4
                           : o->importance == ESA_IMPORTANCE_F16 ? 2 * z->nk
                                                                 : 0,
                  planes = errors && levels ? 2 : 1;
    const int64_t row_bytes = scores + masks * planes * up(z->nk, 8);
    z->recording_bytes = cells * (rows * z->nk * (errors ? 8 * planes : 4) + 4) + 4096;
    /* Dense layers and steps are recorded, but not stored. Rounding to groups is left out. */
    const double sparse = o->store_dense
                              ? 1
                              : (1 - (double)(s->dense_first_layer != 0) / info->layers) *
                                    (1 - s->warmup_frac);
    const int64_t stored = (int64_t)ceil(sparse * (double)cells);
    z->masks_bytes = stored * (rows * row_bytes + info->heads * 4 * (1 + masks) + 4 * masks) + 8192;
    const int64_t each = up(r->p.steps, groups) * (s->record_per_branch ? 1 : branches);
    z->prompts_per_recording = MOST_CONTRIBUTIONS / each;
    if (z->prompts_per_recording < 1)
        return cli_fail("calibrate: %d steps in %lld groups are %lld contributions per prompt and "
                        "group, a recording holds %d: give more --step-groups",
                        r->p.steps, (long long)groups, (long long)each, MOST_CONTRIBUTIONS);
    z->recordings = up(prompts, z->prompts_per_recording);
    /* A new recording is written beside the old one, at the end the mask file beside them all. */
    const int64_t beside = z->masks_bytes > z->recording_bytes && !o->shard_count
                               ? z->masks_bytes
                               : z->recording_bytes;
    z->work_bytes = z->recordings * z->recording_bytes + beside;
    return CLI_OK;
}

/* "12.0 kB", "3.1 MB", "12.0 GB" */
static const char *amount(char out[32], int64_t bytes)
{
    if (bytes < 1000000)
        snprintf(out, 32, "%.1f kB", 1e-3 * (double)bytes);
    else if (bytes < 1000000000)
        snprintf(out, 32, "%.1f MB", 1e-6 * (double)bytes);
    else
        snprintf(out, 32, "%.1f GB", 1e-9 * (double)bytes);
    return out;
}

int calibrate_announce(const calibrate_size *z, const calibrate_options *o,
                       const esa_model_info *info, int64_t prompts, const calibrate_work *work)
{
    const clip_request *r = &o->clip;
    char need[32], room[32], rest[32], sums[32];
    struct statvfs disk;
    cli_machine machine;
    fprintf(stderr,
            "calibrate: %s, %d x %d, %d frames: %lld tokens in %lld x %lld blocks, %d layers of %d "
            "heads\n",
            info->name, r->p.width, r->p.height, r->p.frames, (long long)r->tokens,
            (long long)z->nq, (long long)z->nk, info->layers, info->heads);
    fprintf(stderr, "calibrate: %lld prompt%s of %d dense steps%s", (long long)prompts,
            prompts == 1 ? "" : "s", r->p.steps, r->p.guidance > 1 ? " with guidance" : "");
    if (work->done) fprintf(stderr, ", %lld already recorded", (long long)work->done);
    fprintf(stderr, "; needs %s on disk while it works, leaves %s, and %s of memory for sums\n",
            amount(need, z->work_bytes),
            amount(rest, o->shard_count ? z->recordings * z->recording_bytes : z->masks_bytes),
            amount(sums, z->recording_bytes));
    cli_machine_get(&machine);
    if (z->recording_bytes > machine.memory_bytes)
        return cli_fail("calibrate: the sums need %s of memory and this machine has %s; fewer "
                        "--step-groups or a larger --block need less",
                        amount(sums, z->recording_bytes), amount(room, machine.memory_bytes));
    if (statvfs(work->folder, &disk) != 0)
        return cli_fail("calibrate: the free space of '%s' is unknown: %s", work->folder,
                        strerror(errno));
    const double there = (double)disk.f_bavail * (double)disk.f_frsize + (double)work->bytes;
    if ((double)z->work_bytes > there)
        return cli_fail("calibrate: %s are needed in '%s' and %s are free; fewer --step-groups or "
                        "a larger --block need less",
                        amount(need, z->work_bytes), work->folder,
                        amount(room, there < 9e18 ? (int64_t)there : INT64_MAX));
    return CLI_OK;
}
