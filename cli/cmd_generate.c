/* cmd_generate.c - `esa generate`: options. The work is in generate_run.c.
 * SPDX-License-Identifier: Apache-2.0 */
#include "clip/generate.h"

#include <string.h>
#include <sys/stat.h>

/* Options that contradict one another. */
static int agree(const generate_options *o, int argc, char **argv)
{
    const int texts = (o->clip.p.prompt != NULL) + (o->prompts_file != NULL) +
                      cli_given(argc, argv, "--num-prompts") + (o->clip.p.prompt_embeds != NULL);
    if (texts > 1)
        return cli_usage(
            "generate: give one of --prompt, --prompts, --num-prompts and --prompt-embeds");
    if (o->out && o->output_dir)
        return cli_usage(
            "generate: --out names one video, --output-dir a folder for several; give one");
    const int agrees = clip_request_agrees(&o->clip, o->compare, "generate");
    if (agrees) return agrees;
    if (!o->compare && (o->dense_out || o->beside_out))
        return cli_usage("generate: --dense-out and --beside-out need --compare dense");
    if (!o->compare && o->clip.open.lpips)
        return cli_usage("generate: --lpips measures the difference to the dense video and needs "
                         "--compare dense");
    if (o->output_dir && (o->dense_out || o->beside_out))
        return cli_usage("generate: --dense-out and --beside-out go with --out");
    if ((o->out && o->dense_out && strcmp(o->out, o->dense_out) == 0) ||
        (o->beside_out && o->out && strcmp(o->out, o->beside_out) == 0) ||
        (o->beside_out && o->dense_out && strcmp(o->dense_out, o->beside_out) == 0))
        return cli_usage("generate: --out, --dense-out and --beside-out are three videos; give "
                         "them three names");
    const int several = o->prompts_file || o->num_prompts > 1 || o->seeds.count > 1;
    if (several && o->out)
        return cli_usage("generate: several prompts or seeds need --output-dir DIR, not --out");
    if (o->seeds.count > 1 && !o->output_dir)
        return cli_usage("generate: several seeds need --output-dir DIR");
    if (several && (o->clip.p.save_embeds || o->clip.p.save_latents || o->clip.p.latents))
        return cli_usage("generate: --save-embeds, --save-latents and --latents go with one prompt "
                         "and one seed");
    return 0;
}

/* The word that may follow --check: a folder, which is the model then, or a weight file. */
static int check_of(generate_options *o, int words, char **argv)
{
    struct stat about;
    if (!words) return 0;
    if (!o->clip.open.check || words > 1)
        return cli_usage("generate: unexpected word '%s'; 'esa generate --help' lists the options",
                         argv[o->clip.open.check ? 1 : 0]);
    if (o->clip.open.model || o->clip.open.transformer || o->clip.open.lora.count ||
        o->clip.open.transformer_2 || o->clip.open.lora_2.count)
        return cli_usage("generate: --check FILE looks at the file alone; give --check "
                         "--transformer FILE to compare it with a model");
    if (stat(argv[0], &about) == 0 && S_ISDIR(about.st_mode))
        o->clip.open.model = argv[0];
    else
        o->clip.open.check_file = argv[0];
    return 0;
}

int cmd_generate(int argc, char **argv)
{
    generate_options o = { .clip = clip_request_default(),
                           .num_prompts = 1,
                           .seeds = { 1, { 0 }, { 0 } } };
    const int method = cli_given(argc, argv, "--method"),
              budget = cli_given(argc, argv, "--budget");
    int compare = -1, done;
    o.clip.method = METHOD_ERROR;
    cli_option table[CLIP_MAX_OPTIONS];
    const cli_option own[] = {
        { "--prompt", CLI_TEXT, &o.clip.p.prompt, "TEXT", 0, 0, 0,
          "the prompt (a red ball rolls to the right over a blue floor)" },
        { "--prompts", CLI_TEXT, &o.prompts_file, "FILE", 0, 0, 0,
          "a file with one prompt per line; one video each" },
        { "--num-prompts", CLI_INT, &o.num_prompts, "N", 1, CLI_PROMPTS, 0,
          "use the first N built-in prompts; one video each (1)" },
        { "--method", CLI_CHOICE, &o.clip.method, METHODS, 0, 0, 0,
          "how self-attention runs (error; with --budget: entropy; with --masks: cached)" },
        { "--budget", CLI_REAL, &o.clip.p.session.select.budget, "X", 0, 1, 0,
          "fraction of key blocks to keep in every sparse call (0.5; error has --preset balanced "
          "instead)" },
        { "--seed", CLI_INTS, &o.seeds, "N,...", 0, 9e15, 0,
          "seed of the noise, as in diffusers with a CPU generator; one video per seed (0)" },
        { "--out", CLI_TEXT, &o.out, "FILE", 0, 0, 0,
          "x.mp4, x.y4m, a tensor (x.npy, x.safetensors), or a folder of PNG: x/ (out.mp4)" },
        { "--output-dir", CLI_TEXT, &o.output_dir, "DIR", 0, 0, 0,
          "folder for several videos, created if missing: 000.mp4, or 000-s1.mp4" },
        { "--compare", CLI_CHOICE, &compare, "dense", 0, 0, 0,
          "also make the dense video; report speedup, PSNR and SSIM (off)" },
        { "--lpips", CLI_TEXT, &o.clip.open.lpips, "FILE", 0, 0, 0,
          "with --compare: LPIPS too, with the weights tools/convert_lpips.py makes (off)" },
        { "--dense-out", CLI_TEXT, &o.dense_out, "FILE", 0, 0, 0,
          "where the dense video goes (the name of --out with -dense)" },
        { "--beside-out", CLI_TEXT, &o.beside_out, "FILE", 0, 0, 0,
          "also write both side by side, dense on the left (off)" },
        { "--fps", CLI_REAL, &o.fps, "X", 0, 1000, 0,
          "frames per second of the file, from 0.01 (the model's own)" },
        { "--mp4-quality", CLI_INT, &o.quality, "N", 0, 100, 0,
          "quality of MP4, from 1; higher is better (75)" },
        { "--vae-tile", CLI_INT32, &o.clip.p.vae_tile, "N", 0, 16384, 0,
          "decode in tiles of N pixels, to save memory; 0: whole frames if they fit (0)" },
        { "--prompt-embeds", CLI_TEXT, &o.clip.p.prompt_embeds, "FILE", 0, 0, 0,
          "read embeddings instead of encoding a prompt" },
        { "--save-embeds", CLI_TEXT, &o.clip.p.save_embeds, "FILE", 0, 0, 0,
          "write the embeddings to a file" },
        { "--latents", CLI_TEXT, &o.clip.p.latents, "FILE", 0, 0, 0,
          "start from latents in a file instead of noise" },
        { "--save-latents", CLI_TEXT, &o.clip.p.save_latents, "FILE", 0, 0, 0,
          "write the final latents to a file" },
        { "--check", CLI_FLAG, &o.clip.open.check, NULL, 0, 0, 0,
          "only check every name and shape in the model's files, or say what FILE is (off)" },
        { "--transformer", CLI_TEXT, &o.clip.open.transformer, "FILE", 0, 0, 0,
          "the transformer's weights in one file, safetensors or GGUF (those of the model)" },
        { "--lora", CLI_TEXTS, &o.clip.open.lora, "FILE[:SCALE]", 0, 0, 0,
          "merge a LoRA into the transformer, times SCALE; may be given several times (none)" },
        { "--transformer-2", CLI_TEXT, &o.clip.open.transformer_2, "FILE", 0, 0, 0,
          "Wan 2.2: the same for the second transformer, of little noise (those of the model)" },
        { "--lora-2", CLI_TEXTS, &o.clip.open.lora_2, "FILE[:SCALE]", 0, 0, 0,
          "Wan 2.2: a LoRA for the second transformer (none)" },
        { "--hold", CLI_CHOICE, &o.clip.open.hold, "auto|file|f32|bf16", 0, 0, 0,
          "how weights are held in memory (auto)" },
        { "--json", CLI_TEXT, &o.json, "FILE", 0, 0, 0,
          "also write times, densities, works and metrics as JSON" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    int words = 0;
    int status = cli_options("esa generate", "[options], or esa generate --check FILE",
                             "Makes a video from a prompt. Without options: the bundled model, "
                             "its own settings, out.mp4.",
                             clip_options(table, own, CLIP_OPTIONS_ALL, &o.clip), argc, argv,
                             &words, &done);
    if (status || done) return status;
    if ((status = check_of(&o, words, argv)) != 0) return status;
    o.compare = compare == 0;
    if ((status = clip_choose_method(&o.clip, method, budget, "generate")) != 0) return status;
    if ((status = agree(&o, argc, argv)) != 0) return status;
    return generate_run(&o);
}
