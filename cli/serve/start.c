/* start.c - the options of `esa serve`, its key, its models and the files that clients may name.
 * SPDX-License-Identifier: Apache-2.0 */
#include "serve/start.h"

#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const char what[] = "serve";

/* ---------------------------------------------------------------- names */

/* NAME=FILE: the name's length; 0 after a message. Names are letters, digits, '.', '_' and '-'. */
static size_t name_of(const char *text, const char *option, size_t most)
{
    const size_t n = strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                  "._-");
    if (n > 0 && n < most && text[n] == '=' && text[n + 1]) return n;
    cli_usage("%s: %s was given '%s', expected NAME=FILE with a name of letters, digits, '.', '_' "
              "and '-'",
              what, option, text);
    return 0;
}

static int add_name(serve_rules *rules, int kind, const char *text, const char *option)
{
    const size_t n = name_of(text, option, sizeof rules->name[0].name);
    if (!n) return CLI_USAGE;
    if (rules->names == SERVE_NAMES)
        return cli_usage("%s: more than %d names of files", what, SERVE_NAMES);
    serve_name *name = &rules->name[rules->names];
    *name = (serve_name){ .kind = kind, .scale = 1 };
    snprintf(name->name, sizeof name->name, "%.*s", (int)n, text);
    for (int i = 0; i < rules->names; i++)
        if (rules->name[i].kind == kind && strcmp(rules->name[i].name, name->name) == 0)
            return cli_usage("%s: %s names '%s' twice", what, option, name->name);
    const char *file = text + n + 1;
    if (kind == SERVE_LORA) {
        esa_lora lora;
        const int status = clip_lora(&lora, name->file, sizeof name->file, file, what);
        if (status) return status;
        name->scale = lora.scale;
    } else
        snprintf(name->file, sizeof name->file, "%s", file);
    if (cli_is_missing(name->file))
        return cli_fail("%s: %s: there is no file '%s'", what, option, name->file);
    rules->names++;
    return CLI_OK;
}

static int add_names(serve_rules *rules, const serve_options *o)
{
    const cli_texts *const texts[] = { &o->loras, &o->masks, &o->plans };
    static const char *const options[] = { "--lora", "--masks", "--plan" };
    for (int kind = 0; kind < SERVE_KINDS; kind++)
        for (int i = 0; i < texts[kind]->count; i++) {
            const int status = add_name(rules, kind, texts[kind]->text[i], options[kind]);
            if (status) return status;
        }
    return CLI_OK;
}

/* ---------------------------------------------------------------- the key */

/* The first line of the file; at least 16 characters, so that it cannot be guessed. */
static int read_key(serve_rules *rules, const char *path)
{
    size_t bytes = 0;
    char *text = cli_read_file(path, &bytes);
    if (!text) return cli_fail("%s: cannot read '%s': %s", what, path, cli_error_text(errno));
    text[strcspn(text, "\r\n")] = 0;
    const size_t n = strlen(text);
    int plain = 1;
    for (size_t i = 0; i < n; i++) plain &= text[i] > ' ' && text[i] < 127;
    rules->key = text;
    if (n >= 16 && n <= 4096 && plain) return CLI_OK;
    return cli_fail("%s: the first line of '%s' must be a key of 16 to 4096 printable characters "
                    "without spaces",
                    what, path);
}

/* 1 for addresses that only this machine reaches. */
static int is_loopback(const char *host)
{
    struct in_addr four;
    struct in6_addr six;
    if (strcasecmp(host, "localhost") == 0) return 1;
    if (inet_pton(AF_INET, host, &four) == 1) return (ntohl(four.s_addr) >> 24) == 127;
    return inet_pton(AF_INET6, host, &six) == 1 && IN6_IS_ADDR_LOOPBACK(&six);
}

/* ---------------------------------------------------------------- options */

static int check(const serve_options *o, serve_rules *rules)
{
    int status = add_names(rules, o);
    if (!status && o->key_file) status = read_key(rules, o->key_file);
    if (status) return status;
    if (!o->key_file && !o->insecure && !is_loopback(o->host))
        return cli_usage("%s: --host %s can be reached from other machines: give --api-key-file "
                         "FILE, or --insecure to let everyone in",
                         what, o->host);
    if (o->key_file && o->insecure)
        return cli_usage("%s: --api-key-file and --insecure contradict one another", what);
    if (snprintf(rules->folder, sizeof rules->folder, "%s", o->folder) > 4000)
        return cli_usage("%s: the name of --output-dir is too long", what);
    clip_request usual = rules->usual;
    status = clip_choose_method(&usual, rules->method, rules->budget, what);
    if (!status && usual.method == METHOD_CACHED)
        status = cli_usage("%s: --method cached is for requests, with masks by their name", what);
    if (!status) status = clip_request_agrees(&usual, 0, what);
    return status ? status : clip_request_check(&usual, what);
}

int serve_options_read(serve_options *o, serve_rules *rules, int argc, char **argv, int *done)
{
    cli_option table[CLIP_MAX_OPTIONS];
    *o = (serve_options){ .host = "127.0.0.1", .folder = "esa-videos", .port = 8000 };
    rules->usual = clip_request_default();
    rules->usual.method = METHOD_ERROR;
    rules->keep = 100;
    rules->max_queue = 64;
    rules->max_body = SERVE_BODY;
    rules->max_prompt = SERVE_PROMPT;
    rules->max_pixels = SERVE_PIXELS;
    rules->timeout = SERVE_TIMEOUT;
    rules->preview_every = -1;
    rules->method = cli_given(argc, argv, "--method");
    rules->budget = cli_given(argc, argv, "--budget");
    rules->started = (int64_t)time(NULL);
    const cli_option own[] = {
        { "--host", CLI_TEXT, &o->host, "ADDRESS", 0, 0, 0,
          "the address to listen on; others than this machine's own need --api-key-file "
          "(127.0.0.1)" },
        { "--port", CLI_INT, &o->port, "N", 0, 65535, 0,
          "the port; 0: any that is free, printed on the first line (8000)" },
        { "--api-key-file", CLI_TEXT, &o->key_file, "FILE", 0, 0, 0,
          "a file whose first line is the key that clients must send (none)" },
        { "--insecure", CLI_FLAG, &o->insecure, NULL, 0, 0, 0,
          "listen on any address without a key (off)" },
        { "--model", CLI_TEXTS, &o->models, "[NAME=]FOLDER|NAME", 0, 0, 0,
          "a model that requests may name, as in `esa generate`; may be given several times: the "
          "first is opened at once and is the default, one is in memory at a time (wan-tiny)" },
        { "--output-dir", CLI_TEXT, &o->folder, "DIR", 0, 0, 0,
          "folder for videos and the records of jobs, created if missing (esa-videos)" },
        { "--keep", CLI_INT, &rules->keep, "N", 1, 100000, 0,
          "finished videos to keep; older ones are deleted (100)" },
        { "--max-queue", CLI_INT, &rules->max_queue, "N", 1, 10000, 0,
          "videos that may wait; further requests are refused (64)" },
        { "--lora", CLI_TEXTS, &o->loras, "NAME=FILE[:SCALE]", 0, 0, 0,
          "a LoRA that requests may name; may be given several times (none)" },
        { "--masks", CLI_TEXTS, &o->masks, "NAME=FILE", 0, 0, 0,
          "a mask file that requests may name; may be given several times (none)" },
        { "--plan", CLI_TEXTS, &o->plans, "NAME=FILE", 0, 0, 0,
          "a work plan that requests may name; may be given several times (none)" },
        { "--max-body", CLI_INT, &rules->max_body, "N", 1024, 1 << 28, 0,
          "bytes of a request's body (16777216)" },
        { "--max-prompt", CLI_INT, &rules->max_prompt, "N", 1, 1000000, 0,
          "bytes of a prompt (10000)" },
        { "--max-pixels", CLI_INT, &rules->max_pixels, "N", 1024, 1e15, 0,
          "pixels of a video: width x height x frames (250000000)" },
        { "--timeout", CLI_INT, &rules->timeout, "N", 1, 3600, 0,
          "seconds that a client has for the headers of a request; four times that for the body "
          "(15)" },
        { "--preview-every", CLI_INT, &rules->preview_every, "N", 0, 10000, 0,
          "steps between previews; 0: none (eight previews a video)" },
        { "--mp4-quality", CLI_INT, &rules->quality, "N", 0, 100, 0,
          "default of requests: quality of MP4, from 1; higher is better (75)" },
        { "--method", CLI_CHOICE, &rules->usual.method, METHODS, 0, 0, 0,
          "default of requests, as all that follow: how self-attention runs (error)" },
        { "--budget", CLI_REAL, &rules->usual.p.session.select.budget, "X", 0, 1, 0,
          "fraction of key blocks to keep in every sparse call (0.5; error has --preset balanced "
          "instead)" },
        { "--vae-tile", CLI_INT32, &rules->usual.p.vae_tile, "N", 0, 16384, 0,
          "decode in tiles of N pixels, to save memory; 0: whole frames if they fit (0)" },
        { "--transformer", CLI_TEXT, &rules->usual.open.transformer, "FILE", 0, 0, 0,
          "one model: its transformer's weights in one file (those of the model)" },
        { "--transformer-2", CLI_TEXT, &rules->usual.open.transformer_2, "FILE", 0, 0, 0,
          "one model of Wan 2.2: the same for the second transformer (those of the model)" },
        { "--hold", CLI_CHOICE, &rules->usual.open.hold, "auto|file|f32|bf16", 0, 0, 0,
          "how weights are held in memory (auto)" },
        { "--keep-bf16", CLI_TEXT, &rules->usual.open.keep, "NAME,...", 0, 0, 0,
          "fp8: tensors that stay in bf16, as --keep of `esa generate` (none)" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    const int count = (int)(sizeof own / sizeof own[0]) - 1;
    clip_options(table, own, CLIP_OPTIONS_ALL, &rules->usual);
    static const char *const others[] = { "--model", "--masks",    "--plan",
                                          "--image", "--step-map", "--keep" };
    for (int i = 0; i < 6; i++) serve_options_drop(table, others[i], count);
    int status = cli_options("esa serve", "[options]",
                             "Answers requests for videos over HTTP, one after the other, with a "
                             "model that stays in memory.",
                             table, argc, argv, NULL, done);
    if (status || *done) return status;
    return check(o, rules);
}

/* ---------------------------------------------------------------- models */

/* A name for clients: given before '=', or the last part of the folder. */
static void set_model_name(serve_model *m, const char *text, const char **folder)
{
    const char *equals = strchr(text, '='), *slash = strchr(text, '/');
    *folder = text;
    if (equals && equals != text && (!slash || equals < slash)) {
        snprintf(m->name, sizeof m->name, "%.*s", (int)(equals - text), text);
        *folder = equals + 1;
        return;
    }
    snprintf(m->name, sizeof m->name, "%s", text);
    size_t n = strlen(m->name);
    while (n > 1 && m->name[n - 1] == '/') m->name[--n] = 0;
    const char *last = strrchr(m->name, '/');
    if (last && last[1]) memmove(m->name, last + 1, strlen(last));
}

/* Opens the VAE alone, on the CPU: that is quick, and reads and compares the configurations. */
static int look(serve_model *m)
{
    clip_maker maker;
    const clip_opening o = {
        .model = m->folder, .parts = ESA_PART_VAE, .threads = 1, .device = "cpu"
    };
    const int status = clip_open(&maker, &o, what);
    if (!status) {
        m->info = maker.info;
        m->image = maker.info.image ? SERVE_IMAGE_NEEDED : SERVE_IMAGE_NONE;
        m->known = 1;
    }
    clip_close(&maker);
    return status;
}

int serve_models_look(serve_rules *rules, const serve_options *o)
{
    const int count = o->models.count ? o->models.count : 1;
    if (count > 1 && (rules->usual.open.transformer || rules->usual.open.transformer_2))
        return cli_usage("%s: --transformer goes with one --model", what);
    for (int i = 0; i < count; i++) {
        serve_model *m = &rules->model[i];
        const char *folder;
        set_model_name(m, o->models.count ? o->models.text[i] : "wan-tiny", &folder);
        for (int k = 0; k < i; k++)
            if (strcmp(rules->model[k].name, m->name) == 0)
                return cli_usage("%s: two models are called '%s'; name one: --model NAME=FOLDER",
                                 what, m->name);
        int status = cli_model_find(m->folder, sizeof m->folder, folder, what);
        if (!status) status = look(m);
        if (status) return status;
        rules->models = i + 1;
    }
    return CLI_OK;
}

void serve_rules_free(serve_rules *rules)
{
    free(rules->key);
    rules->key = NULL;
}
