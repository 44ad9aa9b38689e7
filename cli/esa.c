/* esa.c - the esa command: picks a subcommand.
 * SPDX-License-Identifier: Apache-2.0 */
#include "cli.h"

#include <string.h>

static const char about[] = "esa - training-free sparse attention for video diffusion transformers";

int cmd_bench(int argc, char **argv)
{
    static const cli_command table[] = {
        { "attention", cmd_bench_attention, "time dense and sparse attention beside sgemm" },
        { "quality", cmd_bench_quality, "kept mass and output error on synthetic video-like heads, as CSV" },
        { NULL, NULL, NULL },
    };
    return cli_dispatch("esa bench", "Measures speed and quality.", table, argc, argv);
}

int cmd_masks(int argc, char **argv)
{
    static const cli_command table[] = {
        { "select", cmd_masks_select, "run a selector on q and k from safetensors files" },
        { "info", cmd_masks_info, "say what a mask file holds" },
        { "derive", cmd_masks_derive, "rewrite a mask file with other budgets or another importance" },
        { "merge", cmd_masks_merge, "sum recordings (shards) into a mask file" },
        { "convert", cmd_masks_convert, "to and from the full_block_cnt / full_block_idx exchange" },
        { NULL, NULL, NULL },
    };
    return cli_dispatch("esa masks", "Makes, inspects and converts block masks.", table, argc, argv);
}

int main(int argc, char **argv)
{
    static const cli_command table[] = {
        { "demo", cmd_demo, "dense attention against every selector on synthetic video-like heads" },
        { "bench", cmd_bench, "measure speed (attention) and quality (quality)" },
        { "masks", cmd_masks, "run selectors; inspect, derive, merge and convert mask files" },
        { "doctor", cmd_doctor, "say which kernels, libraries and machine are in use, and check them" },
        { NULL, NULL, NULL },
    };
    if (argc == 2 && (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "version") == 0)) {
        printf("esa %s (%s)\n", esa_version(), cli_commit());
        return CLI_OK;
    }
    return cli_dispatch("esa", about, table, argc - 1, argv + 1);
}
