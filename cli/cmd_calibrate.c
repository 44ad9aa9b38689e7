/* cmd_calibrate.c - `esa calibrate`: its options. The work is in clip/calibrate_run.c.
 * SPDX-License-Identifier: Apache-2.0 */
#include "clip/calibrate.h"
#include "clip/plan.h"

#include <math.h>

int cmd_calibrate(int argc, char **argv)
{
    calibrate_options o = calibrate_options_default();
    plan_options plan = { .num_prompts = 2, .held_out = 2, .groups = 8 };
    const int counted = cli_given(argc, argv, "--num-prompts");
    const char *shard = NULL;
    cli_option table[CLIP_MAX_OPTIONS];
    int done;
    const cli_option own[] = {
        { "--output", CLI_TEXT, &o.output, "FILE", 0, 0, 0,
          "the mask file; its folder is created; this or --plan is required" },
        { "--plan", CLI_TEXT, &plan.output, "FILE", 0, 0, 0,
          "instead of masks, measure a work plan: how much each layer and step matters" },
        { "--quality", CLI_REAL, &plan.quality, "DB", 1, 100, 0,
          "--plan: find the work that reaches this PSNR, and check it on held-out prompts "
          "(not given)" },
        { "--speedup", CLI_REAL, &plan.speedup, "X", 1, 100, 0,
          "--plan: check the work 1/X on held-out prompts (not given)" },
        { "--curve-prompts", CLI_INT, &plan.curve_prompts, "N", 1, 1000, 0,
          "--plan: prompts of the quality curve, the measured ones first; more prompts make it "
          "more certain (as many as are measured)" },
        { "--held-out", CLI_INT, &plan.held_out, "N", 1, 1000, 0,
          "--plan: prompts for that check, after the others (2)" },
        { "--groups", CLI_INT, &plan.groups, "N", 1, 64, 0,
          "--plan: groups of layers and of steps that are measured apart (8)" },
        { "--prompts", CLI_TEXT, &o.prompts_file, "FILE", 0, 0, 0,
          "a file with one prompt per line (the built-in prompts)" },
        { "--num-prompts", CLI_INT, &o.num_prompts, "N", 1, CLI_PROMPTS, 0,
          "the first N built-in prompts (5; --plan: 2)" },
        { "--seed", CLI_INT, &o.clip.p.seed, "N", 0, 9e15, 0,
          "seed of the noise; prompt i uses N + i (0)" },
        { "--method", CLI_CHOICE, &o.method, CALIBRATE_METHODS, 0, 0, 0,
          "what is recorded: entropy (importance of blocks, for masks per budget) or error (error "
          "scores, for masks per total work) (entropy)" },
        { "--work", CLI_REALS, &o.works, "X,...", 0.01, 1, 0,
          "error: attention work of a whole video as a share of dense, for each set of masks "
          "(0.57,0.44,0.3)" },
        { "--weights", CLI_TEXT, &o.weights, "PLAN", 0, 0, 0,
          "error: a work plan (`esa calibrate --plan`) that says how much each layer and step "
          "matters (all alike)" },
        { "--exact-rows", CLI_INT32, &o.exact_rows, "N", 0, ESA_MAX_EXACT_ROWS, 0,
          "error: queries of each block that are computed exactly and correct the others; the work "
          "includes them (2)" },
        { "--budgets", CLI_REALS, &o.budgets, "X,...", 0, 1, 0,
          "entropy: kept fractions of key blocks to prebuild (0.7,0.5,0.3)" },
        { "--importance", CLI_CHOICE, &o.importance, "none|u8|f16", 0, 0, 0,
          "entropy: format of the stored importance, from which other budgets are derived (u8)" },
        { "--record-steps", CLI_INT32, &o.record_steps, "N", 1, 10000, 0,
          "steps to run and record, at most --steps; the masks still serve a run of --steps "
          "(--steps)" },
        { "--step-groups", CLI_INT32, &o.clip.p.session.record_groups, "N", 1, 10000, 0,
          "average the steps within N groups, for a smaller file (one group per step)" },
        { "--per-branch", CLI_FLAG, &o.clip.p.session.record_per_branch, NULL, 0, 0, 0,
          "store masks of prompt and negative prompt separately, not averaged (off)" },
        { "--store-dense", CLI_FLAG, &o.store_dense, NULL, 0, 0, 0,
          "also store the first layer and the warm-up steps, which run dense (off)" },
        { "--shard", CLI_TEXT, &shard, "i/n", 0, 0, 0,
          "record part i of n of the prompts, i from 0; `esa masks merge` joins the parts (all)" },
        { "--keep-recording", CLI_FLAG, &o.keep_recording, NULL, 0, 0, 0,
          "also write the raw sums to FILE.recording (off)" },
        { "--restart", CLI_FLAG, &o.restart, NULL, 0, 0, 0,
          "discard what an interrupted run has recorded (off)" },
        { "--hold", CLI_CHOICE, &o.clip.open.hold, "auto|file|f32|bf16", 0, 0, 0,
          "how weights are held in memory (auto)" },
        { "--json", CLI_TEXT, &o.json, "FILE", 0, 0, 0,
          "also write sizes, times and budgets as JSON" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    static const char *const entropy_only[] = { "--budgets", "--importance", "--samples" };
    static const char *const error_only[] = { "--work", "--weights", "--exact-rows",
                                              CLI_SCORE_GROUPS };
    const char *for_entropy = NULL, *for_error = NULL;
    for (int i = 0; i < 3; i++)
        if (cli_given(argc, argv, entropy_only[i])) for_entropy = entropy_only[i];
    for (int i = 0; i < 4; i++)
        if (cli_given(argc, argv, error_only[i])) for_error = error_only[i];
    const int texts = (cli_given(argc, argv, "--prompts") != 0) +
                      (cli_given(argc, argv, "--num-prompts") != 0);
    int status = cli_options("esa calibrate", "--output FILE | --plan FILE [options]",
                             "Runs a few prompts dense, records which key blocks matter in every "
                             "layer and step, and writes masks for each budget or work.\n"
                             "The same command continues an interrupted run.",
                             clip_options(table, own,
                                          CLIP_OPTIONS_MODEL | CLIP_OPTIONS_SIZE |
                                              CLIP_OPTIONS_NOISE | CLIP_OPTIONS_DENSE |
                                              CLIP_OPTIONS_BLOCKS | CLIP_OPTIONS_CARRY,
                                          &o.clip),
                             argc, argv, NULL, &done);
    if (status || done) return status;
    if (plan.output && plan.output[0]) {
        if (o.output || shard || o.keep_recording)
            return cli_usage("calibrate: --plan measures a plan, --output, --shard and "
                             "--keep-recording record masks; give one kind");
        if (plan.quality > 0 && plan.speedup > 0)
            return cli_usage("calibrate: give one of --quality and --speedup");
        plan.clip = o.clip;
        plan.prompts_file = o.prompts_file;
        plan.json = o.json;
        plan.restart = o.restart;
        if (counted) plan.num_prompts = o.num_prompts;
        return plan_run(&plan);
    }
    if (plan.quality > 0 || plan.speedup > 0)
        return cli_usage("calibrate: --quality and --speedup need --plan FILE");
    if (o.clip.carry || o.clip.carry_format)
        return cli_usage("calibrate: --carry and --carry-format need --plan FILE: recordings are "
                         "dense, and their masks serve runs with carry and without");
    if (!o.output || !o.output[0])
        return cli_usage("calibrate: --output FILE is required (or --plan FILE)");
    if (texts > 1) return cli_usage("calibrate: give one of --prompts and --num-prompts");
    if (o.method == CALIBRATE_ERROR ? for_entropy != NULL : for_error != NULL)
        return cli_usage("calibrate: %s goes with --method %s",
                         for_entropy ? for_entropy : for_error, for_entropy ? "entropy" : "error");
    if (shard && o.keep_recording)
        return cli_usage(
            "calibrate: a shard is a recording already: --keep-recording goes without --shard");
    if (shard && (status = cli_shard(shard, &o.shard_index, &o.shard_count, "calibrate")) != 0)
        return status;
    const cli_list *const amounts = o.method == CALIBRATE_ERROR ? &o.works : &o.budgets;
    for (int i = 0; i < amounts->count; i++) /* mask files know budgets and works in per mille */
        for (int k = 0; k < i; k++)
            if (lround(1000 * amounts->real[i]) == lround(1000 * amounts->real[k]))
                return cli_usage("calibrate: --%s names a %s twice (in per mille)",
                                 o.method == CALIBRATE_ERROR ? "work" : "budgets",
                                 o.method == CALIBRATE_ERROR ? "work" : "budget");
    status = clip_request_check(&o.clip, "calibrate");
    return status ? status : calibrate_run(&o);
}
