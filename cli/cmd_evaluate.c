/* cmd_evaluate.c - `esa evaluate`: options, table, JSON. The work is in evaluate.c.
 * SPDX-License-Identifier: Apache-2.0 */
#include "clip/clip.h"
#include "clip/evaluate.h"
#include "core/folders.h"

#include <string.h>

static const char what[] = "evaluate";

static int save(const evaluate_result *r, const evaluate_options *o, const char *output, int frames)
{
    esa_ctx *ctx;
    /* the machine is described as the measurement saw it */
    const int status = cli_ctx_new(&ctx, o->threads);
    if (status) return status;
    cli_json *json = cli_json_new();
    cli_machine_json(json, ctx, NULL);
    cli_json_fields(json, "reference %s generated %s", o->reference, o->generated);
    evaluate_json(json, r, frames);
    esa_ctx_free(ctx);
    return cli_json_save(json, output);
}

/* Other commands take a GPU here, so the option says why this one does not. */
static int check_device(const char *device)
{
    if (!device || strcmp(device, "auto") == 0 || strcmp(device, "cpu") == 0) return CLI_OK;
    return cli_usage("%s: --device is '%s', expected auto or cpu: the measures agree with other "
                     "programs to many digits, which needs f32, and GPUs convolve in bf16 here",
                     what, device);
}

int cmd_evaluate(int argc, char **argv)
{
    evaluate_options o = { .net = EVALUATE_ANY };
    const char *output = NULL, *device = NULL;
    int no_frames = 0, done;
    const cli_option options[] = {
        { "--reference", CLI_TEXT, &o.reference, "PATH", 0, 0, 0,
          "a video or a folder of videos; required" },
        { "--generated", CLI_TEXT, &o.generated, "PATH", 0, 0, 0,
          "a video or a folder to compare with it; folders are paired by file name; required" },
        { "--output", CLI_TEXT, &output, "FILE", 0, 0, 0,
          "also write everything as JSON; its folder is created (not written)" },
        { "--lpips", CLI_TEXT, &o.lpips_weights, "FILE", 0, 0, 0,
          "weights of LPIPS that tools/convert_lpips.py makes "
          "($ESA_MODELS/lpips-NET.safetensors)" },
        { "--lpips-weights", CLI_TEXT, &o.lpips_weights, "FILE", 0, 0, 0, "the same as --lpips" },
        { "--net", CLI_CHOICE, &o.net, EVALUATE_NETS, 0, 0, 0, "backbone of LPIPS (alex)" },
        { "--no-frames", CLI_FLAG, &no_frames, NULL, 0, 0, 0,
          "leave the values of single frames out of the JSON (off)" },
        { "--device", CLI_TEXT, &device, "auto|cpu", 0, 0, 0, "both mean the CPU (auto)" },
        { "--threads", CLI_INT, &o.threads, "N", 0, ESA_MAX_THREADS, 0,
          "CPU threads; 0: one per core (0)" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    int status = cli_options("esa evaluate", "--reference PATH --generated PATH [options]",
                             "Compares videos with their references: PSNR, SSIM, LPIPS and flicker "
                             "per frame, per video and on average.\n"
                             "Videos: MP4, MKV, WebM, AVI and others, Y4M, folders of PNG, tensors "
                             "[frames, height, width, 3] in safetensors or NPY.",
                             options, argc, argv, NULL, &done);
    if (status || done) return status;
    status = check_device(device);
    if (status) return status;
    if (!o.reference || !o.generated)
        return cli_usage("%s: %s is missing; 'esa evaluate --help' lists the options", what,
                         o.reference ? "--generated PATH" : "--reference PATH");
    char folder[4200] = "";
    size_t kept = 0;
    evaluate_result r = { 0 };
    if (output) {
        cli_folder_of(folder, sizeof folder, output);
        status = cli_make_folder_of(output, &kept, what);
        if (status) return status;
        status = cli_file_ready(output, what);
    }
    if (!status) status = evaluate_run(&r, &o, what);
    if (status == CLIP_INTERRUPTED) cli_fail("%s: interrupted, nothing was written", what);
    if (!status) evaluate_print(stdout, &r);
    if (!status && output) status = save(&r, &o, output, !no_frames);
    if (status && output) cli_unmake_folders(folder, kept);
    evaluate_free(&r);
    return status;
}
