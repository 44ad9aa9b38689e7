/* report_data.c - what was measured, as JSON for the page's scripts: runs, variants, clips, and the
 * text of the result files.
 * SPDX-License-Identifier: Apache-2.0 */
#include "report/report.h"

#include <math.h>

static double known(double x) { return isfinite(x) ? x : 0; }

/* Selection is part of attention and attention is part of denoising: the page shows what remains
 * of each. */
static void parts(cli_json *json, const double *x)
{
    if (!isfinite(x[REPORT_DENOISE]) || !isfinite(x[REPORT_ATTENTION])) return;
    const double select = known(x[REPORT_SELECT]), text = known(x[REPORT_TEXT]),
                 decode = known(x[REPORT_DECODE]);
    cli_json_open(json, "parts", '{');
    cli_json_fields(json, "text %g select %g attention %g rest %g decode %g total %g", text, select,
                    fmax(0, x[REPORT_ATTENTION] - select),
                    fmax(0, x[REPORT_DENOISE] - x[REPORT_ATTENTION]), decode,
                    text + x[REPORT_DENOISE] + decode);
    cli_json_close(json);
}

static void variant(cli_json *json, const report_variant *v)
{
    static const char *const names[REPORT_TEXT] = { "budget",  "density",        "mass",
                                                    "seconds", "step_seconds",   "sparse_seconds",
                                                    "speedup", "sparse_speedup", "psnr",
                                                    "ssim",    "lpips",          "flicker",
                                                    "anchors", "carry_age" };
    cli_json_open(json, NULL, '{');
    cli_json_fields(json, "id %s label %s family %s dense %i identical %i", v->name, v->label,
                    v->family, v->dense, v->identical);
    for (int i = 0; i < REPORT_TEXT; i++) cli_json_real(json, names[i], v->figure[i]);
    parts(json, v->figure);
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
