/* report_data.c - what was measured, as JSON for the page's scripts: runs, variants, clips, and the
 * files as they are.
 * SPDX-License-Identifier: Apache-2.0 */
#include "report/report.h"

#include <math.h>
#include <string.h>

static void reals(cli_json *json, const char *key, const double *x, int64_t n)
{
    cli_json_open(json, key, '[');
    for (int64_t i = 0; i < n; i++) cli_json_real(json, NULL, x[i]);
    cli_json_close(json);
}

/* Selection is part of attention, attention of denoising: the page shows what is left of each. */
static void parts(cli_json *json, const report_variant *v)
{
    if (!isfinite(v->denoise_seconds) || !isfinite(v->attention_seconds)) return;
    const double select = isfinite(v->select_seconds) ? v->select_seconds : 0;
    const double text = isfinite(v->text_seconds) ? v->text_seconds : 0,
                 decode = isfinite(v->decode_seconds) ? v->decode_seconds : 0;
    cli_json_open(json, "parts", '{');
    cli_json_real(json, "text", text);
    cli_json_real(json, "select", select);
    cli_json_real(json, "attention", fmax(0, v->attention_seconds - select));
    cli_json_real(json, "rest", fmax(0, v->denoise_seconds - v->attention_seconds));
    cli_json_real(json, "decode", decode);
    cli_json_real(json, "total", text + v->denoise_seconds + decode);
    cli_json_close(json);
}

static void variant(cli_json *json, const report_variant *v)
{
    cli_json_open(json, NULL, '{');
    cli_json_text(json, "id", v->name);
    cli_json_text(json, "label", v->label);
    cli_json_text(json, "family", v->family);
    cli_json_bool(json, "dense", v->dense);
    cli_json_bool(json, "identical", v->identical);
    cli_json_real(json, "budget", v->budget);
    cli_json_real(json, "density", v->density);
    cli_json_real(json, "mass", v->mass);
    cli_json_real(json, "seconds", v->seconds);
    cli_json_real(json, "step_seconds", v->step_seconds);
    cli_json_real(json, "sparse_seconds", v->sparse_seconds);
    cli_json_real(json, "speedup", v->speedup);
    cli_json_real(json, "sparse_speedup", v->sparse_speedup);
    cli_json_real(json, "psnr", v->psnr);
    cli_json_real(json, "ssim", v->ssim);
    cli_json_real(json, "lpips", v->lpips);
    cli_json_real(json, "flicker", v->flicker);
    parts(json, v);
    reals(json, "steps", v->steps, v->step_count);
    if (v->head_density) {
        cli_json_open(json, "head_density", '[');
        for (int64_t l = 0; l < v->layers; l++)
            reals(json, NULL, v->head_density + l * v->heads, v->heads);
        cli_json_close(json);
    }
    cli_json_close(json);
}

static void run(cli_json *json, const report_run *r)
{
    cli_json_open(json, NULL, '{');
    cli_json_text(json, "tag", r->tag);
    cli_json_text(json, "model", r->model);
    cli_json_text(json, "setting", r->setting);
    cli_json_int(json, "frames", r->frames);
    cli_json_int(json, "height", r->height);
    cli_json_int(json, "width", r->width);
    cli_json_int(json, "steps", r->step_count);
    cli_json_int(json, "warmup", r->warmup);
    cli_json_open(json, "variants", '[');
    for (int i = 0; i < r->variant_count; i++) variant(json, &r->variants[i]);
    cli_json_close(json);
    cli_json_open(json, "files", '{');
    for (int i = 0; i < 3; i++)
        if (r->text[i]) cli_json_raw(json, report_file_names[i], r->text[i], strlen(r->text[i]));
    cli_json_close(json);
    cli_json_close(json);
}

void report_runs_json(cli_json *json, const report_run *runs, int count)
{
    cli_json_open(json, "runs", '[');
    for (int i = 0; i < count; i++) run(json, &runs[i]);
    cli_json_close(json);
}
