/* cmd_generate.c - `esa generate`: options. The work is in generate_run.c.
 * SPDX-License-Identifier: Apache-2.0 */
#include "clip/generate.h"

#include <string.h>

static int usage(const char *sentence)
{
    cli_fail("generate: %s", sentence);
    return CLI_USAGE;
}

/* Options that contradict one another. */
static int agree(const generate_options *o, int argc, char **argv)
{
    const int texts = (o->clip.prompt != NULL) + (o->prompts_file != NULL) +
                      cli_given(argc, argv, "--num-prompts") + (o->clip.prompt_embeds != NULL);
    if (texts > 1)
        return usage("--prompt, --prompts, --num-prompts and --prompt-embeds are four ways to say "
                     "one thing; give one");
    if (o->out && o->output_dir)
        return usage("--out names one video, --output-dir a folder for several; give one");
    if (o->clip.method == METHOD_CACHED && !o->clip.masks)
        return usage("--method cached needs --masks FILE (made by `esa calibrate`)");
    if (o->clip.method != METHOD_CACHED && o->clip.masks)
        return usage("--masks is read by --method cached only");
    if (o->compare && o->clip.method == METHOD_DENSE)
        return usage("--compare dense needs another --method to compare");
    if (!o->compare && (o->dense_out || o->beside_out))
        return usage("--dense-out and --beside-out need --compare dense");
    if (o->output_dir && (o->dense_out || o->beside_out))
        return usage("--dense-out and --beside-out go with --out");
    if ((o->out && o->dense_out && strcmp(o->out, o->dense_out) == 0) ||
        (o->beside_out && o->out && strcmp(o->out, o->beside_out) == 0) ||
        (o->beside_out && o->dense_out && strcmp(o->dense_out, o->beside_out) == 0))
        return usage("--out, --dense-out and --beside-out are three videos; give them three names");
    const int several = o->prompts_file || o->num_prompts > 1 || o->seeds.count > 1;
    if (several && o->out)
        return usage("several prompts or seeds need --output-dir DIR, not --out");
    if (o->seeds.count > 1 && !o->output_dir) return usage("several seeds need --output-dir DIR");
    if (several && (o->clip.save_embeds || o->clip.save_latents || o->clip.latents))
        return usage("--save-embeds, --save-latents and --latents go with one prompt and one seed");
    return 0;
}

int cmd_generate(int argc, char **argv)
{
    generate_options o = { .clip = clip_request_default(),
                           .num_prompts = 1,
                           .seeds = { 1, { 0 }, { 0 } } };
    int compare = -1, done;
    cli_option table[CLIP_MAX_OPTIONS];
    const cli_option own[] = {
        { "--model", CLI_TEXT, &o.model, "FOLDER|NAME", 0, 0, 0,
          "a diffusers folder, or wan-tiny, wan-t2v-1.3b, wan-t2v-14b (wan-tiny)" },
        { "--prompt", CLI_TEXT, &o.clip.prompt, "TEXT", 0, 0, 0,
          "what to show (a red ball rolls to the right over a blue floor)" },
        { "--prompts", CLI_TEXT, &o.prompts_file, "FILE", 0, 0, 0, "one video per line of a file" },
        { "--num-prompts", CLI_INT, &o.num_prompts, "N", 1, CLI_PROMPTS, 0,
          "the first N built-in prompts (1)" },
        { "--method", CLI_CHOICE, &o.clip.method, METHODS, 0, 0, 0,
          "how self-attention runs (entropy)" },
        { "--budget", CLI_REAL, &o.clip.budget, "X", 0, 1, 0, "kept fraction of key blocks (0.5)" },
        { "--seed", CLI_INTS, &o.seeds, "N,...", 0, 9e15, 0,
          "of the noise, as in diffusers with a CPU generator; several: a video each (0)" },
        { "--out", CLI_TEXT, &o.out, "FILE", 0, 0, 0,
          "x.mp4, x.y4m, a tensor (x.npy, x.safetensors), or a folder of PNG: x/ (out.mp4)" },
        { "--output-dir", CLI_TEXT, &o.output_dir, "DIR", 0, 0, 0,
          "one video per prompt and seed: 000.mp4, or 000-s1.mp4; made with its parents" },
        { "--compare", CLI_CHOICE, &compare, "dense", 0, 0, 0,
          "also make the dense video; speedup, PSNR and SSIM" },
        { "--dense-out", CLI_TEXT, &o.dense_out, "FILE", 0, 0, 0,
          "the dense video (beside --out, with -dense in its name)" },
        { "--beside-out", CLI_TEXT, &o.beside_out, "FILE", 0, 0, 0, "dense left, the other right" },
        { "--fps", CLI_REAL, &o.fps, "X", 0, 1000, 0,
          "frames a second of the file (the model's own)" },
        { "--quality", CLI_INT, &o.quality, "N", 0, 100, 0, "of MP4 (75)" },
        { "--vae-tile", CLI_INT, &o.clip.vae_tile, "N", 0, 16384, 0,
          "decode in tiles of so many pixels (0: whole frames)" },
        { "--prompt-embeds", CLI_TEXT, &o.clip.prompt_embeds, "FILE", 0, 0, 0,
          "embeddings instead of a prompt: no text encoder" },
        { "--save-embeds", CLI_TEXT, &o.clip.save_embeds, "FILE", 0, 0, 0, "write such a file" },
        { "--latents", CLI_TEXT, &o.clip.latents, "FILE", 0, 0, 0,
          "start from these latents instead of noise" },
        { "--save-latents", CLI_TEXT, &o.clip.save_latents, "FILE", 0, 0, 0,
          "write the final latents" },
        { "--check", CLI_FLAG, &o.check, NULL, 0, 0, 0,
          "only check the model's files: every name and shape" },
        { "--hold", CLI_CHOICE, &o.hold, "auto|file|f32|bf16", 0, 0, 0,
          "how weights are held in memory (auto)" },
        { "--threads", CLI_INT, &o.threads, "N", 0, ESA_MAX_THREADS, 0, "0: one per core (0)" },
        { "--json", CLI_TEXT, &o.json, "FILE", 0, 0, 0,
          "also write times, densities and metrics as JSON" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    int status = cli_options("esa generate", "[options]",
                             "Makes a video from a prompt. Without options: the embedded model, "
                             "its own settings, out.mp4.",
                             clip_options(table, own, CLIP_OPTIONS_ALL, &o.clip), argc, argv, NULL,
                             &done);
    if (status || done) return status;
    o.compare = compare == 0;
    if ((status = agree(&o, argc, argv)) != 0) return status;
    return generate_run(&o);
}
