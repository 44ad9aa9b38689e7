/* cmd_bench_video.c - `esa bench video`: what sparse attention does to whole videos, against the
 * dense ones: PSNR, SSIM, seconds a step.
 * SPDX-License-Identifier: Apache-2.0
 *
 * One row of a CSV per clip (prompt, seed, method, budget, tail). The file is written anew, whole,
 * after every clip; a run that finds it goes on where the last one ended. Dense clips are made
 * once: kept in memory for their prompt and seed, and with --dense-dir on disk. With --shard i/n
 * several processes share the work, each with a file of its own; the files' rows put together are
 * those of one run. */
#include "clip/clip.h"
#include "core/folders.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char what[] = "bench video";
static const char header[] = "model,size,prompt,seed,method,budget,tail,order,density,psnr,ssim,"
                             "psnr_min,ssim_min,seconds_per_step,attention_seconds\n";

typedef struct bench {
    clip_maker maker;
    cli_prompts prompts;
    cli_list seeds, methods, budgets, tails;
    clip_request base; /* sizes and settings all clips share */
    const char *csv_path, *dense_dir;
    char *csv; /* text of the file, ends with a 0 */
    size_t used, room;
    char size[64];      /* frames x height x width x steps */
    int shard, shards;  /* of --shard; 0, 1: all of it */
    int64_t clips_made; /* sparse ones, in this run */
} bench;

/* ---------------------------------------------------------------- the CSV */

static int csv_append(bench *b, const char *text)
{
    const size_t n = strlen(text);
    if (b->used + n + 1 > b->room) {
        char *grown = realloc(b->csv, 2 * (b->used + n) + 4096);
        if (!grown) return cli_fail("%s: out of memory", what);
        b->csv = grown;
        b->room = 2 * (b->used + n) + 4096;
    }
    memcpy(b->csv + b->used, text, n + 1);
    b->used += n;
    return CLI_OK;
}

/* An older file is taken over: whole lines only, of the same columns. */
static int csv_open(bench *b)
{
    char part[4096];
    FILE *file = fopen(b->csv_path, "rb");
    if (!file)
        return errno == ENOENT
                   ? csv_append(b, header)
                   : cli_fail("%s: cannot read '%s': %s", what, b->csv_path, strerror(errno));
    int status = CLI_OK;
    for (size_t n; !status && (n = fread(part, 1, sizeof part - 1, file)) > 0;) {
        part[n] = 0;
        status = strlen(part) == n ? csv_append(b, part)
                                   : cli_fail("%s: '%s' is no CSV", what, b->csv_path);
    }
    fclose(file);
    if (status) return status;
    if (b->used == 0) return csv_append(b, header);
    if (strncmp(b->csv, header, sizeof header - 1) != 0)
        return cli_fail("%s: '%s' holds other columns; give another name", what, b->csv_path);
    while (b->used && b->csv[b->used - 1] != '\n') b->csv[--b->used] = 0;
    return CLI_OK;
}

typedef struct row {
    double density, psnr, ssim, psnr_min, ssim_min, step, attention;
} row;

/* The row that begins with key, 1 if there is one. Equal videos have an infinite PSNR, written as
 * inf. */
static int csv_find(const bench *b, const char *key, row *r)
{
    const size_t n = strlen(key);
    for (const char *line = b->csv; line && *line;
         line = strchr(line, '\n'), line = line ? line + 1 : NULL) {
        if (strncmp(line, key, n) != 0) continue;
        double *const fields[] = { &r->density,  &r->psnr, &r->ssim,     &r->psnr_min,
                                   &r->ssim_min, &r->step, &r->attention };
        const char *at = line + n;
        for (int i = 0; i < 7; i++) {
            char *end;
            *fields[i] = strtod(at, &end);
            if (end == at || *end != (i < 6 ? ',' : '\n')) return 0;
            at = end + 1;
        }
        return 1;
    }
    return 0;
}

/* The method as it stands in the CSV; of cached masks with the name of their file, because there
 * may be several. */
static void method_name(const bench *b, char out[96], int method)
{
    char name[32];
    const char *slash = b->base.masks ? strrchr(b->base.masks, '/') : NULL,
               *file = slash ? slash + 1 : b->base.masks;
    if (method != METHOD_CACHED)
        snprintf(out, 96, "%s", cli_name(name, METHODS, method));
    else
        snprintf(out, 96, "cached:%.*s",
                 (int)strcspn(file, ".,\n") < 64 ? (int)strcspn(file, ".,\n") : 64, file);
}

/* The order of a method's tokens as it stands in the CSV; cached masks bring their own. */
static const char *order_name(const bench *b, char out[32], int method)
{
    clip_request r = b->base;
    r.method = method;
    if (method == METHOD_DENSE) return "any";
    if (r.order == ESA_ORDER_DEFAULT && method == METHOD_RF_V2) r.order = ESA_ORDER_TILE;
    return clip_order(&r) == ESA_ORDER_DEFAULT ? "masks"
                                               : cli_name(out, CLI_ORDERS, clip_order(&r));
}

static void key_of(const bench *b, char key[256], int64_t prompt, int64_t seed, int method,
                   double budget, int tail)
{
    char m[96], t[32], o[32];
    method_name(b, m, method);
    snprintf(key, 256, "%.60s,%.40s,%lld,%lld,%s,%.2f,%s,%s,", b->maker.info.name, b->size,
             (long long)prompt, (long long)seed, m, budget, cli_name(t, CLI_TAILS, tail),
             order_name(b, o, method));
}

static int csv_add(bench *b, const char *key, const row *r)
{
    char line[512];
    snprintf(line, sizeof line, "%s%.4f,%.4f,%.6f,%.4f,%.6f,%.4f,%.4f\n", key, r->density, r->psnr,
             r->ssim, r->psnr_min, r->ssim_min, r->step, r->attention);
    const int status = csv_append(b, line);
    return status ? status : cli_write_file(b->csv_path, b->csv, b->used);
}

/* ---------------------------------------------------------------- clips */

static int make(bench *b, esa_frames **frames, row *r, const clip_request *request,
                const char *label)
{
    clip_record record;
    const int status = clip_make(&b->maker, frames, &record, request, label, 0, 1);
    if (status == CLIP_INTERRUPTED)
        cli_fail("%s: interrupted; '%s' is whole, the same command goes on from there", what,
                 b->csv_path);
    if (status) return status;
    r->density = clip_density(&record);
    r->step = record.stats.denoise_seconds / record.steps;
    r->attention = record.stats.attention_seconds / record.steps;
    clip_record_free(&record);
    return CLI_OK;
}

static void dense_path(const bench *b, char *path, size_t size, int64_t prompt, int64_t seed)
{
    snprintf(path, size, "%s/%s-%s-p%lld-s%lld.rgb", b->dense_dir, b->maker.info.name, b->size,
             (long long)prompt, (long long)seed);
}

/* The dense clip from disk; 0 if it is not there or of another size. */
static int dense_load(bench *b, esa_frames **frames, int64_t prompt, int64_t seed)
{
    char path[4200];
    if (!b->dense_dir) return 0;
    dense_path(b, path, sizeof path, prompt, seed);
    const size_t bytes = (size_t)b->base.frames * (size_t)b->base.height * (size_t)b->base.width *
                         3;
    uint8_t *rgb = malloc(bytes + 1);
    FILE *file = rgb ? fopen(path, "rb") : NULL;
    const int whole = file && fread(rgb, 1, bytes + 1, file) == bytes;
    if (file) fclose(file);
    const int made = whole && b->maker.video.frames_create(
                                  b->maker.ctx, frames, rgb, (int32_t)b->base.frames,
                                  (int32_t)b->base.height, (int32_t)b->base.width,
                                  b->maker.info.fps) == ESA_OK;
    free(rgb);
    return made;
}

static int dense_clip(bench *b, esa_frames **frames, const clip_request *request, int64_t prompt,
                      int64_t seed)
{
    char key[256], path[4200];
    row r = { .psnr = INFINITY, .ssim = 1, .psnr_min = INFINITY, .ssim_min = 1 }, old;
    key_of(b, key, prompt, seed, METHOD_DENSE, 1.0, ESA_TAIL_NONE);
    const int known = csv_find(b, key, &old);
    if (known && dense_load(b, frames, prompt, seed)) return CLI_OK;
    clip_request d = *request;
    d.method = METHOD_DENSE;
    int status = make(b, frames, &r, &d, "dense");
    if (!status && b->dense_dir) {
        esa_frames_info info = { .struct_size = sizeof info };
        dense_path(b, path, sizeof path, prompt, seed);
        if (b->maker.video.frames_get_info(*frames, &info) == ESA_OK)
            status = cli_write_file(path, (const char *)info.rgb,
                                    (size_t)info.frames * (size_t)info.height * (size_t)info.width *
                                        3);
    }
    if (!status && !known) status = csv_add(b, key, &r);
    return status;
}

/* All settings of one prompt and seed; the dense clip is made when the first row is missing. */
static int one_source(bench *b, int64_t prompt, int64_t seed, int64_t *done, int64_t total)
{
    esa_frames *dense = NULL;
    int status = CLI_OK;
    clip_request p = b->base;
    p.prompt = b->prompts.line[prompt];
    p.seed = seed;
    for (int m = 0; m < b->methods.count && !status; m++)
        for (int d = 0; d < b->budgets.count && !status; d++)
            for (int t = 0; t < b->tails.count && !status; t++) {
                const int method = (int)b->methods.whole[m] + 1, tail = (int)b->tails.whole[t];
                char key[256], label[96];
                row r;
                key_of(b, key, prompt, seed, method, b->budgets.real[d], tail);
                ++*done;
                if (csv_find(b, key, &r)) continue;
                if (!dense) status = dense_clip(b, &dense, &p, prompt, seed);
                if (status) break;
                clip_request q = p;
                q.method = method;
                q.budget = b->budgets.real[d];
                q.tail = tail;
                if (method != METHOD_CACHED) q.masks = NULL;
                esa_frames *frames = NULL;
                esa_metrics metrics = { 0 };
                snprintf(label, sizeof label, "clip %lld/%lld", (long long)*done, (long long)total);
                status = make(b, &frames, &r, &q, label);
                if (!status) status = clip_compare(&b->maker, &metrics, dense, frames);
                r.psnr = metrics.psnr;
                r.ssim = metrics.ssim;
                r.psnr_min = metrics.psnr_min;
                r.ssim_min = metrics.ssim_min;
                if (!status) status = csv_add(b, key, &r);
                b->clips_made += !status;
                if (!status)
                    fprintf(stderr, "%s: %s PSNR %.2f dB, SSIM %.4f, %.2f s/step\n", label, key,
                            r.psnr, r.ssim, r.step);
                b->maker.video.frames_free(frames);
            }
    b->maker.video.frames_free(dense);
    return status;
}

/* ---------------------------------------------------------------- the table */

static void print_means(const bench *b)
{
    static const char *const head[] = { "method",  "order", "tail", "budget", "clips",
                                        "density", "PSNR",  "SSIM", "s/step", "speedup" };
    cli_table *table = cli_table_new(10, 3);
    for (int i = 0; i < 10; i++) cli_cell(table, "%s", head[i]);
    for (int m = 0; m < b->methods.count; m++)
        for (int t = 0; t < b->tails.count; t++)
            for (int d = 0; d < b->budgets.count; d++) {
                row sum = { 0 };
                double dense = 0;
                int clips = 0, equal = 0;
                for (int64_t i = 0; i < b->prompts.count; i++)
                    for (int s = 0; s < b->seeds.count; s++) {
                        char key[256];
                        row r, full;
                        key_of(b, key, i, b->seeds.whole[s], METHOD_DENSE, 1.0, ESA_TAIL_NONE);
                        const int known = csv_find(b, key, &full);
                        key_of(b, key, i, b->seeds.whole[s], (int)b->methods.whole[m] + 1,
                               b->budgets.real[d], (int)b->tails.whole[t]);
                        if (!known || !csv_find(b, key, &r)) continue;
                        clips++;
                        equal += isinf(r.psnr);
                        sum.density += r.density;
                        sum.psnr += isinf(r.psnr) ? 0 : r.psnr;
                        sum.ssim += r.ssim;
                        sum.step += r.step;
                        dense += full.step;
                    }
                if (!clips) continue;
                char name[32], method[96];
                method_name(b, method, (int)b->methods.whole[m] + 1);
                cli_cell(table, "%s", method);
                cli_cell(table, "%s", order_name(b, name, (int)b->methods.whole[m] + 1));
                cli_cell(table, "%s", cli_name(name, CLI_TAILS, (int)b->tails.whole[t]));
                cli_cell(table, "%.2f", b->budgets.real[d]);
                cli_cell(table, "%d", clips);
                cli_cell(table, "%.3f", sum.density / clips);
                if (clips > equal)
                    cli_cell(table, "%.2f dB", sum.psnr / (clips - equal));
                else
                    cli_cell(table, "equal");
                cli_cell(table, "%.4f", sum.ssim / clips);
                cli_cell(table, "%.2f", sum.step / clips);
                cli_cell(table, "%.2fx", dense / sum.step);
            }
    cli_table_print(table, stdout);
}

static int run_all(bench *b)
{
    int status = csv_open(b);
    const int64_t each = (int64_t)b->methods.count * b->budgets.count * b->tails.count,
                  sources = b->prompts.count * b->seeds.count;
    const int64_t total = each * ((sources - b->shard + b->shards - 1) / b->shards);
    int64_t done = 0;
    if (!status && total == 0)
        status = cli_fail(
            "%s: shard %d of %d has nothing to do, there are %lld pairs of prompt and seed", what,
            b->shard, b->shards, (long long)sources);
    if (!status && b->dense_dir) {
        char path[4200];
        dense_path(b, path, sizeof path, 0, 0);
        status = cli_make_folder_of(path, NULL, what);
    }
    for (int64_t i = 0; i < b->prompts.count && !status; i++)
        for (int s = 0; s < b->seeds.count && !status; s++)
            if ((i * b->seeds.count + s) % b->shards == b->shard)
                status = one_source(b, i, b->seeds.whole[s], &done, total);
    if (!status) {
        print_means(b);
        printf("\n%s: %lld clips made, %lld were there; PSNR and SSIM against the dense clip of "
               "the same prompt and seed\n",
               b->csv_path, (long long)b->clips_made, (long long)(total - b->clips_made));
    }
    return status;
}

static int with_model(bench *b, const char *prompts_file, int64_t number)
{
    clip_request_resolve(&b->base, &b->maker);
    snprintf(b->size, sizeof b->size, "%lldx%lldx%lldx%lld", (long long)b->base.frames,
             (long long)b->base.height, (long long)b->base.width, (long long)b->base.steps);
    int status = cli_prompts_get(&b->prompts, NULL, prompts_file, number, clip_is_tiny(&b->maker),
                                 what);
    if (!status) status = run_all(b);
    cli_prompts_free(&b->prompts);
    return status;
}

int cmd_bench_video(int argc, char **argv)
{
    bench b = { .seeds = { 2, { 0, 1 }, { 0, 1 } },
                .methods = { 3, { 0 }, { 0, 1, 2 } },
                .budgets = { 4, { 0.7, 0.5, 0.3, 0.2 }, { 0 } },
                .tails = { 2, { 0 }, { 0, 1 } },
                .shards = 1,
                .base = clip_request_default() };
    const char *model = NULL, *prompts = NULL, *shard = NULL;
    clip_opening opening = { .parts = ESA_PART_ALL };
    int64_t number = 8;
    int done;
    cli_option table[CLIP_MAX_OPTIONS];
    const cli_option own[] = {
        { "--csv", CLI_OUTPUT, &b.csv_path, "FILE", 0, 0, 0,
          "one row per clip; what is in it is not made again; required" },
        { "--dense-dir", CLI_TEXT, &b.dense_dir, "DIR", 0, 0, 0,
          "keep the dense clips there (of one state of the model's weights)" },
        { "--model", CLI_TEXT, &model, "FOLDER|NAME", 0, 0, 0, "(wan-tiny)" },
        { "--prompts", CLI_TEXT, &prompts, "FILE", 0, 0, 0, "one prompt per line" },
        { "--num-prompts", CLI_INT, &number, "N", 1, CLI_PROMPTS, 0,
          "the first N built-in prompts (8)" },
        { "--seeds", CLI_INTS, &b.seeds, "N,...", 0, 9e15, 0, "of the noise (0,1)" },
        { "--method", CLI_CHOICES, &b.methods, "entropy|rf_v2|ada_bsa|cached", 0, 0, 0,
          "any, with commas (entropy,rf_v2,ada_bsa)" },
        { "--budget", CLI_REALS, &b.budgets, "X,...", 0, 1, 0,
          "kept fractions of key blocks (0.7,0.5,0.3,0.2)" },
        { "--tail", CLI_CHOICES, &b.tails, CLI_TAILS, 0, 0, 0, "any, with commas (none,pooled)" },
        { "--shard", CLI_TEXT, &shard, "i/n", 0, 0, 0,
          "only the i-th part of the pairs of prompt and seed (from 0)" },
        { "--threads", CLI_INT, &opening.threads, "N", 0, ESA_MAX_THREADS, 0,
          "0: one per core (0)" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    int status = cli_options("esa bench video", "--csv FILE [options]",
                             "Makes videos with every method, budget and tail and measures them "
                             "against the dense ones. Can be stopped and\n"
                             "started again.",
                             clip_options(table, own,
                                          CLIP_OPTIONS_SIZE | CLIP_OPTIONS_NOISE |
                                              CLIP_OPTIONS_DENSE | CLIP_OPTIONS_BLOCKS |
                                              CLIP_OPTIONS_CACHED,
                                          &b.base),
                             argc, argv, NULL, &done);
    if (status || done) return status;
    if (!b.csv_path) {
        cli_fail("%s: --csv FILE is required", what);
        return CLI_USAGE;
    }
    if (shard && (status = cli_shard(shard, &b.shard, &b.shards, what)) != 0) return status;
    int cached = 0;
    for (int i = 0; i < b.methods.count; i++) cached |= b.methods.whole[i] + 1 == METHOD_CACHED;
    if (cached != (b.base.masks != NULL)) {
        cli_fail(cached ? "%s: --method cached needs --masks FILE (made by `esa calibrate`)"
                        : "%s: --masks is read by --method cached only",
                 what);
        return CLI_USAGE;
    }
    if ((status = clip_request_check(&b.base, what)) != 0) return status;
    status = clip_open(&b.maker, model, &opening, what);
    if (!status) status = with_model(&b, prompts, number);
    clip_close(&b.maker);
    free(b.csv);
    return status;
}
