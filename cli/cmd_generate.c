/* cmd_generate.c - `esa generate`: options. The work is in generate_run.c.
 * SPDX-License-Identifier: Apache-2.0 */
#include "generate.h"

#include <math.h>

static int usage(const char *sentence)
{
    cli_fail("generate: %s", sentence);
    return CLI_USAGE;
}

/* Options that contradict one another. */
static int agree(const generate_options *o, int argc, char **argv)
{
    const int texts = (o->prompt != NULL) + (o->prompts_file != NULL) + cli_given(argc, argv, "--num-prompts") + (o->prompt_embeds != NULL);
    if (texts > 1) return usage("--prompt, --prompts, --num-prompts and --prompt-embeds are four ways to say one thing; give one");
    if (o->out && o->output_dir) return usage("--out names one video, --output-dir a folder for several; give one");
    if (o->method == METHOD_CACHED && !o->masks) return usage("--method cached needs --masks FILE (made by `esa calibrate`)");
    if (o->method != METHOD_CACHED && o->masks) return usage("--masks is read by --method cached only");
    if (o->compare && o->method == METHOD_DENSE) return usage("--compare dense needs another --method to compare");
    if (!o->compare && (o->dense_out || o->beside_out)) return usage("--dense-out and --beside-out need --compare dense");
    if (o->output_dir && (o->dense_out || o->beside_out)) return usage("--dense-out and --beside-out go with --out");
    if (o->window.count && o->order != ESA_ORDER_TILE3D) return usage("--window belongs to --order tile3d");
    if ((o->prompts_file || o->num_prompts > 1) && o->out) return usage("several prompts need --output-dir DIR, not --out");
    if ((o->prompts_file || o->num_prompts > 1) && (o->save_embeds || o->save_latents || o->latents))
        return usage("--save-embeds, --save-latents and --latents go with one prompt");
    return 0;
}

int cmd_generate(int argc, char **argv)
{
    generate_options o = { .method = METHOD_ENTROPY, .tail = ESA_TAIL_POOLED, .order = ESA_ORDER_DEFAULT, .num_prompts = 1, .refresh = 1,
                           .dense_first = 1, .samples = 4, .budget = 0.5, .guidance = NAN, .warmup = 0.2, .cdf = 1.0 };
    int compare = -1, done;
    const cli_option options[] = {
        { "--model", CLI_TEXT, &o.model, "FOLDER|NAME", 0, 0, 0, "a diffusers folder, or wan-tiny, wan-t2v-1.3b, wan-t2v-14b (wan-tiny)" },
        { "--prompt", CLI_TEXT, &o.prompt, "TEXT", 0, 0, 0, "what to show (a red ball rolls to the right over a blue floor)" },
        { "--prompts", CLI_TEXT, &o.prompts_file, "FILE", 0, 0, 0, "one video per line of a file" },
        { "--num-prompts", CLI_INT, &o.num_prompts, "N", 1, CLI_PROMPTS, 0, "the first N built-in prompts (1)" },
        { "--negative-prompt", CLI_TEXT, &o.negative, "TEXT", 0, 0, 0, "what to keep away from" },
        { "--method", CLI_CHOICE, &o.method, METHODS, 0, 0, 0, "how self-attention runs (entropy)" },
        { "--budget", CLI_REAL, &o.budget, "X", 0, 1, 0, "kept fraction of key blocks (0.5)" },
        { "--masks", CLI_TEXT, &o.masks, "FILE", 0, 0, 0, "mask file of --method cached" },
        { "--tail", CLI_CHOICE, &o.tail, CLI_TAILS, 0, 0, 0, "what stands in for skipped blocks (pooled)" },
        { "--order", CLI_CHOICE, &o.order, CLI_ORDERS, 0, 0, 0, "token order (tile for rf_v2, else raster)" },
        { "--window", CLI_INTS, &o.window, "t,h,w", 1, 4096, 3, "box of order tile3d" },
        { "--block", CLI_TEXT, &o.block, "QxK", 0, 0, 0, "query x key tokens of a block (64x64)" },
        { "--samples", CLI_INT, &o.samples, "N", 1, 256, 0, "entropy: queries scored per block (4)" },
        { "--cdf", CLI_REAL, &o.cdf, "X", 0, 1, 0, "ada_bsa: CDF threshold (1: off)" },
        { "--warmup", CLI_REAL, &o.warmup, "X", 0, 1, 0, "fraction of the steps that run dense first (0.2)" },
        { "--dense-first-layer", CLI_INT, &o.dense_first, "0|1", 0, 1, 0, "layer 0 always runs dense (1)" },
        { "--refresh", CLI_INT, &o.refresh, "N", 1, 1000, 0, "new masks every N steps (1)" },
        { "--step-map", CLI_CHOICE, &o.step_map, "exact|nearest", 0, 0, 0, "cached: masks made for another number of steps (exact)" },
        { "--frames", CLI_INT, &o.frames, "N", 1, 100000, 0, "rounded down to what the model makes (the model's own)" },
        { "--height", CLI_INT, &o.height, "N", 1, 16384, 0, "pixels (the model's own)" },
        { "--width", CLI_INT, &o.width, "N", 1, 16384, 0, "pixels (the model's own)" },
        { "--steps", CLI_INT, &o.steps, "N", 1, 10000, 0, "of denoising (the model's own)" },
        { "--seed", CLI_INT, &o.seed, "N", 0, 9e15, 0, "of the noise, as in diffusers with a CPU generator (0)" },
        { "--guidance", CLI_REAL, &o.guidance, "X", 0, 1000, 0, "classifier-free guidance, 1 or less: none (the model's own)" },
        { "--scheduler", CLI_CHOICE, &o.scheduler, "model|unipc|unipc-0.36|euler", 0, 0, 0,
          "unipc-0.36: the sigmas of diffusers up to 0.36 (model)" },
        { "--flow-shift", CLI_REAL, &o.shift, "X", 0, 1000, 0, "of the scheduler (the model's own)" },
        { "--vae-tile", CLI_INT, &o.vae_tile, "N", 0, 16384, 0, "decode in tiles of so many pixels (0: whole frames)" },
        { "--out", CLI_TEXT, &o.out, "FILE", 0, 0, 0, "x.mp4, x.y4m, or a folder of PNG: x/ (out.mp4)" },
        { "--output-dir", CLI_TEXT, &o.output_dir, "DIR", 0, 0, 0, "videos as 000.mp4, 001.mp4, ..." },
        { "--compare", CLI_CHOICE, &compare, "dense", 0, 0, 0, "also make the dense video; speedup, PSNR and SSIM" },
        { "--dense-out", CLI_TEXT, &o.dense_out, "FILE", 0, 0, 0, "the dense video (beside --out, with -dense in its name)" },
        { "--beside-out", CLI_TEXT, &o.beside_out, "FILE", 0, 0, 0, "dense left, the other right" },
        { "--fps", CLI_REAL, &o.fps, "X", 0, 1000, 0, "frames a second of the file (the model's own)" },
        { "--quality", CLI_INT, &o.quality, "N", 0, 100, 0, "of MP4 (75)" },
        { "--prompt-embeds", CLI_TEXT, &o.prompt_embeds, "FILE", 0, 0, 0, "embeddings instead of a prompt: no text encoder" },
        { "--save-embeds", CLI_TEXT, &o.save_embeds, "FILE", 0, 0, 0, "write such a file" },
        { "--latents", CLI_TEXT, &o.latents, "FILE", 0, 0, 0, "start from these latents instead of noise" },
        { "--save-latents", CLI_TEXT, &o.save_latents, "FILE", 0, 0, 0, "write the final latents" },
        { "--check", CLI_FLAG, &o.check, NULL, 0, 0, 0, "only check the model's files: every name and shape" },
        { "--hold", CLI_CHOICE, &o.hold, "auto|file|f32|bf16", 0, 0, 0, "how weights are held in memory (auto)" },
        { "--threads", CLI_INT, &o.threads, "N", 0, ESA_MAX_THREADS, 0, "0: one per core (0)" },
        { "--json", CLI_TEXT, &o.json, "FILE", 0, 0, 0, "also write times, densities and metrics as JSON" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    int status = cli_options("esa generate", "[options]",
                             "Makes a video from a prompt. Without options: the embedded model, its own settings, out.mp4.",
                             options, argc, argv, NULL, &done);
    if (status || done) return status;
    o.compare = compare == 0;
    if ((status = agree(&o, argc, argv)) != 0) return status;
    return generate_run(&o);
}
