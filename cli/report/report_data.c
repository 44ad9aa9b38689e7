/* report_data.c - what was measured, as JSON for the page's scripts: runs, variants, clips, and the
 * text of the result files.
 * SPDX-License-Identifier: Apache-2.0 */
#include "report/report.h"

#include <math.h>

/* Selection is part of attention and attention is part of denoising: the page shows what remains
 * of each. */
static void parts(cli_json *json, const report_variant *v)
{
    if (!isfinite(v->denoise_seconds) || !isfinite(v->attention_seconds)) return;
    const double select = isfinite(v->select_seconds) ? v->select_seconds : 0;
    const double text = isfinite(v->text_seconds) ? v->text_seconds : 0,
                 decode = isfinite(v->decode_seconds) ? v->decode_seconds : 0;
    cli_json_open(json, "parts", '{');
    cli_json_fields(json, "text %g select %g attention %g rest %g decode %g total %g", text, select,
                    fmax(0, v->attention_seconds - select),
                    fmax(0, v->denoise_seconds - v->attention_seconds), decode,
                    text + v->denoise_seconds + decode);
    cli_json_close(json);
}

static void variant(cli_json *json, const report_variant *v)
{
    cli_json_open(json, NULL, '{');
    cli_json_fields(json,
                    "id %s label %s family %s dense %i identical %i budget %g density %g mass %g "
                    "seconds %g step_seconds %g sparse_seconds %g speedup %g sparse_speedup %g "
                    "psnr %g ssim %g lpips %g flicker %g",
                    v->name, v->label, v->family, v->dense, v->identical, v->budget, v->density,
                    v->mass, v->seconds, v->step_seconds, v->sparse_seconds, v->speedup,
                    v->sparse_speedup, v->psnr, v->ssim, v->lpips, v->flicker);
    parts(json, v);
    cli_json_reals(json, "steps", v->steps, v->step_count);
    if (v->head_density) {
        cli_json_open(json, "head_density", '[');
        for (int64_t l = 0; l < v->layers; l++)
            cli_json_reals(json, NULL, v->head_density + l * v->heads, v->heads);
        cli_json_close(json);
    }
    cli_json_close(json);
}

static void run(cli_json *json, const report_run *r)
{
    cli_json_open(json, NULL, '{');
    cli_json_fields(json,
                    "tag %s model %s setting %s frames %ld height %ld width %ld steps %ld "
                    "warmup %ld",
                    r->tag, r->model, r->setting, r->frames, r->height, r->width, r->step_count,
                    r->warmup);
    cli_json_open(json, "variants", '[');
    for (int i = 0; i < r->variant_count; i++) variant(json, &r->variants[i]);
    cli_json_close(json);
    cli_json_open(json, "files", '{');
    for (int i = 0; i < 3; i++)
        if (r->text[i]) cli_json_text(json, report_file_names[i], r->text[i]);
    cli_json_close(json);
    cli_json_close(json);
}

void report_runs_json(cli_json *json, const report_run *runs, int count)
{
    cli_json_open(json, "runs", '[');
    for (int i = 0; i < count; i++) run(json, &runs[i]);
    cli_json_close(json);
}
