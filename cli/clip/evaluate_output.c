/* evaluate_output.c - what was measured, as JSON and as a table.
 * SPDX-License-Identifier: Apache-2.0 */
#include "clip/evaluate.h"

#include <math.h>
#include <string.h>

/* [frames], or null where LPIPS was not measured */
static void json_frames(cli_json *json, const char *key, const evaluate_video *v, int metric)
{
    if (metric == ESA_METRIC_LPIPS && isnan(v->metrics.lpips)) {
        cli_json_text(json, key, NULL);
        return;
    }
    cli_json_open(json, key, '[');
    for (int32_t i = 0; i < v->frames; i++)
        cli_json_real(json, NULL, v->each[i * ESA_METRIC_COUNT + metric]);
    cli_json_close(json);
}

static void json_video(cli_json *json, const evaluate_video *v, int frames)
{
    const esa_metrics *m = &v->metrics;
    cli_json_open(json, NULL, '{');
    cli_json_fields(json,
                    "name %s reference %s generated %s frames %d height %d width %d identical %i "
                    "psnr %g psnr_mean %g psnr_min %g ssim %g ssim_min %g lpips %g lpips_max %g "
                    "flicker %g",
                    v->name, v->reference, v->generated, v->frames, v->height, v->width,
                    isinf(m->psnr) != 0, m->psnr, v->psnr_mean, m->psnr_min, m->ssim, m->ssim_min,
                    m->lpips, m->lpips_max, m->flicker);
    if (frames) {
        cli_json_open(json, "each", '{');
        json_frames(json, "psnr", v, ESA_METRIC_PSNR);
        json_frames(json, "ssim", v, ESA_METRIC_SSIM);
        json_frames(json, "lpips", v, ESA_METRIC_LPIPS);
        json_frames(json, "flicker", v, ESA_METRIC_FLICKER);
        cli_json_close(json);
    }
    cli_json_close(json);
}

void evaluate_json(cli_json *json, const evaluate_result *r, int frames)
{
    cli_json_open(json, "lpips", '{');
    cli_json_fields(json, "net %s weights %s note %s", r->net[0] ? r->net : NULL,
                    r->lpips_file[0] ? r->lpips_file : NULL, r->note[0] ? r->note : NULL);
    cli_json_close(json);
    cli_json_open(json, "mean", '{');
    cli_json_fields(json, "videos %ld identical %ld psnr %g ssim %g lpips %g flicker %g", r->count,
                    r->equal, r->mean[ESA_METRIC_PSNR], r->mean[ESA_METRIC_SSIM],
                    r->mean[ESA_METRIC_LPIPS], r->mean[ESA_METRIC_FLICKER]);
    cli_json_close(json);
    cli_json_open(json, "videos", '[');
    for (int64_t i = 0; i < r->count; i++) json_video(json, &r->video[i], frames);
    cli_json_close(json);
}

void evaluate_print(FILE *out, const evaluate_result *r)
{
    cli_table *t = cli_table_new(10, 1);
    cli_row(t, "video|frames|size|PSNR dB|worst|SSIM|worst|LPIPS|worst|flicker");
    for (int64_t i = 0; i < r->count; i++) {
        const evaluate_video *v = &r->video[i];
        const esa_metrics *m = &v->metrics;
        cli_cell(t, "%s", v->name);
        cli_row(t, "%d|%dx%d|%.2f|%.2f|%.4f|%.4f|%.4f|%.4f|%.3f", v->frames, v->width, v->height,
                m->psnr, m->psnr_min, m->ssim, m->ssim_min, m->lpips, m->lpips_max, m->flicker);
    }
    cli_row(t, "mean|||%.2f||%.4f||%.4f||%.3f", r->mean[ESA_METRIC_PSNR], r->mean[ESA_METRIC_SSIM],
            r->mean[ESA_METRIC_LPIPS], r->mean[ESA_METRIC_FLICKER]);
    cli_table_print(t, out);
    if (r->equal && r->equal < r->count)
        fprintf(out,
                "\n%lld of %lld videos equal their reference; the mean PSNR leaves them out.\n",
                (long long)r->equal, (long long)r->count);
    if (r->note[0]) fprintf(out, "\n%s\n", r->note);
}
