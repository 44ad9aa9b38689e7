/* evaluate_output.c - what was measured, as JSON and as a table.
 * SPDX-License-Identifier: Apache-2.0 */
#include "clip/evaluate.h"

#include <math.h>
#include <string.h>

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
    cli_json_text(json, "name", v->name);
    cli_json_text(json, "reference", v->reference);
    cli_json_text(json, "generated", v->generated);
    cli_json_int(json, "frames", v->frames);
    cli_json_int(json, "height", v->height);
    cli_json_int(json, "width", v->width);
    cli_json_bool(json, "identical", isinf(m->psnr));
    cli_json_real(json, "psnr", m->psnr);
    cli_json_real(json, "psnr_mean", v->psnr_mean);
    cli_json_real(json, "psnr_min", m->psnr_min);
    cli_json_real(json, "ssim", m->ssim);
    cli_json_real(json, "ssim_min", m->ssim_min);
    cli_json_real(json, "lpips", m->lpips);
    cli_json_real(json, "lpips_max", m->lpips_max);
    cli_json_real(json, "flicker", m->flicker);
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
    cli_json_text(json, "net", r->net[0] ? r->net : NULL);
    cli_json_text(json, "weights", r->lpips_file[0] ? r->lpips_file : NULL);
    cli_json_text(json, "note", r->note[0] ? r->note : NULL);
    cli_json_close(json);
    cli_json_open(json, "mean", '{');
    cli_json_int(json, "videos", r->count);
    cli_json_int(json, "identical", r->equal);
    cli_json_real(json, "psnr", r->mean[ESA_METRIC_PSNR]);
    cli_json_real(json, "ssim", r->mean[ESA_METRIC_SSIM]);
    cli_json_real(json, "lpips", r->mean[ESA_METRIC_LPIPS]);
    cli_json_real(json, "flicker", r->mean[ESA_METRIC_FLICKER]);
    cli_json_close(json);
    cli_json_open(json, "videos", '[');
    for (int64_t i = 0; i < r->count; i++) json_video(json, &r->video[i], frames);
    cli_json_close(json);
}

/* Not a number: "-"; infinite: "equal". */
static void cell(cli_table *t, double value, int digits)
{
    if (isnan(value))
        cli_cell(t, "-");
    else if (isinf(value))
        cli_cell(t, "equal");
    else
        cli_cell(t, "%.*f", digits, value);
}

void evaluate_print(FILE *out, const evaluate_result *r)
{
    static const char *const head[] = { "video", "frames", "size",  "PSNR dB", "worst",
                                        "SSIM",  "worst",  "LPIPS", "worst",   "flicker" };
    cli_table *t = cli_table_new(10, 1);
    for (int i = 0; i < 10; i++) cli_cell(t, "%s", head[i]);
    for (int64_t i = 0; i < r->count; i++) {
        const evaluate_video *v = &r->video[i];
        const esa_metrics *m = &v->metrics;
        cli_cell(t, "%s", v->name);
        cli_cell(t, "%d", v->frames);
        cli_cell(t, "%dx%d", v->width, v->height);
        cell(t, m->psnr, 2);
        cell(t, m->psnr_min, 2);
        cell(t, m->ssim, 4);
        cell(t, m->ssim_min, 4);
        cell(t, m->lpips, 4);
        cell(t, m->lpips_max, 4);
        cell(t, m->flicker, 3);
    }
    cli_cell(t, "mean");
    for (int i = 0; i < 2; i++) cli_cell(t, "%s", "");
    cell(t, r->mean[ESA_METRIC_PSNR], 2);
    cli_cell(t, "%s", "");
    cell(t, r->mean[ESA_METRIC_SSIM], 4);
    cli_cell(t, "%s", "");
    cell(t, r->mean[ESA_METRIC_LPIPS], 4);
    cli_cell(t, "%s", "");
    cell(t, r->mean[ESA_METRIC_FLICKER], 3);
    cli_table_print(t, out);
    if (r->equal && r->equal < r->count)
        fprintf(
            out,
            "\n%lld of %lld videos equal their reference; the mean of PSNR is over the others.\n",
            (long long)r->equal, (long long)r->count);
    if (r->note[0]) fprintf(out, "\n%s\n", r->note);
}
