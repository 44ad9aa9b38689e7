/* esa.c - the esa command: picks a subcommand.
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

static const char about[] = "esa - training-free sparse attention for video diffusion transformers";

int cmd_bench(int argc, char **argv)
{
    static const cli_command table[] = {
        { "attention", cmd_bench_attention,
          "time dense and sparse attention, and sgemm for comparison" },
        { "model", cmd_bench_model,
          "time whole clips, per step and in total: dense, online, cached" },
        { "quality", cmd_bench_quality,
          "kept mass and output error on synthetic video-like heads, as CSV" },
        { "video", cmd_bench_video,
          "PSNR, SSIM and speed of videos against dense ones, as CSV; can be resumed" },
        { NULL, NULL, NULL },
    };
    return cli_dispatch("esa bench", "Measures speed and quality.", table, argc, argv);
}

int cmd_masks(int argc, char **argv)
{
    static const cli_command table[] = {
        { "select", cmd_masks_select, "run a selector on q and k from safetensors files" },
        { "info", cmd_masks_info, "describe a mask file" },
        { "derive", cmd_masks_derive,
          "rewrite a mask file with other budgets or another importance" },
        { "merge", cmd_masks_merge, "add up recordings (shards) into a mask file" },
        { "convert", cmd_masks_convert,
          "convert to and from full_block_cnt / full_block_idx files" },
        { NULL, NULL, NULL },
    };
    return cli_dispatch("esa masks", "Makes, inspects and converts block masks.", table, argc,
                        argv);
}

static int run(int argc, char **argv)
{
    static const cli_command table[] = {
        { "generate", cmd_generate, "make a video from a prompt, with dense or sparse attention" },
        { "serve", cmd_serve,
          "answer requests for videos over HTTP, with a page to type into and a warm model" },
        { "calibrate", cmd_calibrate,
          "record which key blocks matter for a few prompts, and write masks for each budget" },
        { "demo", cmd_demo,
          "compare every selector with dense attention on synthetic video-like heads" },
        { "bench", cmd_bench, "measure speed (attention, model) and quality (quality, video)" },
        { "evaluate", cmd_evaluate,
          "compare videos with their references: PSNR, SSIM, LPIPS, flicker" },
        { "export", cmd_export,
          "convert tensors, frames and latents to MP4, and MP4 to frames and tensors" },
        { "masks", cmd_masks, "run selectors; inspect, derive, merge and convert mask files" },
        { "report", cmd_report,
          "make an HTML page of results: videos side by side, quality, speed, heads, masks" },
        { "experiment", cmd_experiment,
          "calibrate, time and compare, also on a Slurm cluster; gather results" },
        { "doctor", cmd_doctor,
          "show which kernels, libraries and machine are in use, and check them" },
        { NULL, NULL, NULL },
    };
    if (argc == 2 && (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "version") == 0)) {
        printf("esa %s (%s)\n", esa_version(), cli_commit());
        return CLI_OK;
    }
    return cli_dispatch("esa", about, table, argc - 1, argv + 1);
}

/* Weights are used from mapped files (esa_tensors.h). If one of them becomes shorter, or its disk
 * fails, no call returns an error: the access itself raises this signal. */
static void lost_file(int number)
{
    static const char text[] = "\nesa: a file that is in use became shorter, or its disk failed "
                               "(SIGBUS)\n";
    (void)number;
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0) _exit(CLI_FAILED);
    _exit(CLI_FAILED);
}

int main(int argc, char **argv)
{
    /* A closed standard stream must keep failing: without this, its number would go to the next
     * file that is opened. */
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd ? O_RDONLY : O_WRONLY) < 0)
            return CLI_FAILED;
    signal(SIGBUS, lost_file);
    signal(SIGXFSZ, SIG_IGN); /* exceeding a file size limit becomes an error, like a full disk */
    const int status = run(argc, argv);
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout)) return status;
    const char *why = errno ? strerror(errno) : "a write failed";
    fprintf(stderr, "esa: cannot write to standard output: %s\n", why);
    return status ? status : CLI_FAILED;
}
