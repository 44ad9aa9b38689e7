/* cmd_bench_video.c - `esa bench video`: whole videos, sparse against dense: PSNR, SSIM, LPIPS,
 * seconds per step.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The CSV has one row per clip (prompt, seed, method, budget or work or quality, tail). It is
 * rewritten whole after every clip, and the next run continues from it. A dense clip is made once:
 * it stays in memory for its prompt and seed, and with --dense-dir on disk. With --shard i/n
 * several processes share the work, each with its own file; their rows together are those of one
 * run. */
#include "clip/clip.h"
#include "core/folders.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char what[] = "bench video";
#define COLUMNS                                                                                    \
    "model,size,prompt,seed,method,budget,tail,order,density,psnr,ssim,"                           \
    "psnr_min,ssim_min,seconds_per_step,attention_seconds"
/* The header and what ends a row of the file; the second is from before LPIPS was measured, the
 * third from before work was counted. */
enum { HEADERS = 3 };
static const char *const headers[HEADERS][2] = { { COLUMNS ",attention_work,lpips\n", "\n" },
                                                 { COLUMNS ",attention_work\n", ",\n" },
                                                 { COLUMNS "\n", ",,\n" } };

enum { KEY_SIZE = 896, NAME_SIZE = 560 };
enum { UNIT_BUDGET, UNIT_WORK, UNIT_QUALITY, UNIT_PRESET };

typedef struct bench {
    clip_maker maker;
    cli_prompts prompts;
    cli_list seeds, methods, budgets, tails;
    int own_tails;     /* 1: --tail was not given; error has its own tail, not tails */
    int unit;          /* UNIT_*: what budgets are; PRESET: the work of base's preset */
    clip_request base; /* sizes and settings all clips share */
    const char *csv_path, *dense_dir;
    char *csv; /* text of the file, ends with a 0 */
    size_t used;
    char size[64];      /* frames x height x width x steps */
    int shard, shards;  /* 0, 1: all of it */
    int64_t clips_made; /* sparse clips of this run */
} bench;

/* ---------------------------------------------------------------- the CSV */

static int csv_append(bench *b, const char *text)
{
    const size_t n = strlen(text);
    char *grown = realloc(b->csv, b->used + n + 1);
    if (!grown) return cli_fail("%s: out of memory", what);
    b->csv = grown;
    memcpy(b->csv + b->used, text, n + 1);
    b->used += n;
    return CLI_OK;
}

/* Continues an older file from its last whole line. Columns that the file lacks stay empty. */
static int csv_open(bench *b)
{
    size_t bytes = 0;
    char *old = cli_read_file(b->csv_path, &bytes);
    if (!old && errno != ENOENT)
        return cli_fail("%s: cannot read '%s': %s", what, b->csv_path, cli_error_text(errno));
    int kind = 0;
    while (kind < HEADERS && bytes && strncmp(old, headers[kind][0], strlen(headers[kind][0])) != 0)
        kind++;
    int status = csv_append(b, headers[0][0]);
    if (!status && bytes && (strlen(old) != bytes || kind == HEADERS))
        status = cli_fail("%s: '%s' holds other columns; give another name", what, b->csv_path);
    char *line = bytes ? strchr(old, '\n') : NULL, *end = line ? strchr(++line, '\n') : NULL;
    while (!status && end) {
        *end = 0;
        status = csv_append(b, line);
        if (!status) status = csv_append(b, headers[kind][1]);
        line = end + 1;
        end = strchr(line, '\n');
    }
    free(old);
    return status;
}

typedef struct row {
    double density, psnr, ssim, psnr_min, ssim_min, step, attention, work, lpips;
} row;

/* Reads a number and what follows it; NaN if the place is empty. */
static int csv_optional(const char **at, double *value, char after)
{
    char *end = (char *)(uintptr_t)*at;
    *value = **at == after ? (double)NAN : strtod(*at, &end);
    if (*end != after) return 0;
    *at = end + 1;
    return 1;
}

/* Finds the row that begins with key; returns 1 if there is one. Equal videos have PSNR inf; the
 * work and LPIPS are NaN if they were not measured. */
static int csv_find(const bench *b, const char *key, row *r)
{
    const size_t n = strlen(key);
    for (const char *line = b->csv; line && *line;
         line = strchr(line, '\n'), line = line ? line + 1 : NULL) {
        if (strncmp(line, key, n) != 0) continue;
        double *const fields[] = { &r->density,  &r->psnr, &r->ssim,     &r->psnr_min,
                                   &r->ssim_min, &r->step, &r->attention };
        const char *at = line + n;
        char *end;
        for (int i = 0; i < 7; i++) {
            *fields[i] = strtod(at, &end);
            if (end == at || *end != ',') return 0;
            at = end + 1;
        }
        return csv_optional(&at, &r->work, ',') && csv_optional(&at, &r->lpips, '\n');
    }
    return 0;
}

/* "error carry6", "error carry0-5-18-bf16": the number of anchors, or their steps. */
static void add_carry(const bench *b, char out[NAME_SIZE], int method)
{
    const size_t used = strlen(out);
    char steps[CLIP_CARRY_TEXT];
    clip_request r = b->base;
    r.method = method;
    clip_anchors a = clip_anchors_of(&r);
    a.carry = clip_anchor_count(&r);
    if (!a.carry) return;
    clip_carry_name(steps, &a);
    for (char *c = steps; *c; c++)
        if (*c == ',') *c = '-';
    snprintf(out + used, NAME_SIZE - used, " carry%s%s", steps,
             r.carry_format == ESA_CARRY_BF16 ? "-bf16" : "");
}

/* The method's name in the CSV, for cached masks with the name of their file, its precision and its
 * anchors. */
static void method_name(const bench *b, char out[NAME_SIZE], int method)
{
    char name[32];
    const char *slash = b->base.p.masks ? strrchr(b->base.p.masks, '/') : NULL,
               *file = slash ? slash + 1 : b->base.p.masks;
    if (method != METHOD_CACHED)
        snprintf(out, NAME_SIZE, "%s", cli_name(name, METHODS, method));
    else
        snprintf(out, NAME_SIZE, "cached:%.*s",
                 (int)strcspn(file, ".,\n") < 64 ? (int)strcspn(file, ".,\n") : 64, file);
    /* "error 8bit", or "error 8bit-2-1-0": first steps, last steps and number of layers in 16 */
    const clip_request *r = &b->base;
    if (r->eight && method != METHOD_DENSE) {
        snprintf(out + strlen(out), NAME_SIZE - strlen(out), " 8bit");
        if (r->steps16_first || r->steps16_last || r->layers16.count)
            snprintf(out + strlen(out), NAME_SIZE - strlen(out), "-%d-%d-%d", (int)r->steps16_first,
                     (int)r->steps16_last, r->layers16.count);
    }
    add_carry(b, out, method);
}

/* The token order of a method, for the CSV; cached masks bring their own. */
static const char *order_name(const bench *b, char out[32], int method)
{
    clip_request r = b->base;
    r.method = method;
    if (method == METHOD_DENSE) return "any";
    const int order = clip_order(&r);
    return order == ESA_ORDER_DEFAULT ? "masks" : cli_name(out, CLI_ORDERS, order);
}

/* "0.50", "work 0.44", "quality 40" */
static void amount_name(const bench *b, char out[32], int method, double amount)
{
    if (b->unit == UNIT_QUALITY && method != METHOD_DENSE)
        snprintf(out, 32, "quality %g", amount);
    else
        snprintf(out, 32, fabs(100 * amount - round(100 * amount)) < 1e-6 ? "%s%.2f" : "%s%.6g",
                 b->unit && method != METHOD_DENSE ? "work " : "", amount);
}

static void key_of(const bench *b, char key[KEY_SIZE], int64_t prompt, int64_t seed, int method,
                   double budget, int tail)
{
    char m[NAME_SIZE], a[32], t[32], o[32];
    method_name(b, m, method);
    amount_name(b, a, method, budget);
    snprintf(key, KEY_SIZE, "%.60s,%.40s,%lld,%lld,%s,%s,%s,%s,", b->maker.info.name, b->size,
             (long long)prompt, (long long)seed, m, a, cli_name(t, CLI_TAILS, tail),
             order_name(b, o, method));
}

static int csv_add(bench *b, const char *key, const row *r)
{
    char line[KEY_SIZE + 128];
    char lpips[32] = "";
    if (isfinite(r->lpips)) snprintf(lpips, sizeof lpips, "%.6f", r->lpips);
    snprintf(line, sizeof line, "%s%.4f,%.4f,%.6f,%.4f,%.6f,%.4f,%.4f,%.4f,%s\n", key, r->density,
             r->psnr, r->ssim, r->psnr_min, r->ssim_min, r->step, r->attention, r->work, lpips);
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
        cli_fail("%s: interrupted; '%s' is whole, the same command continues it", what,
                 b->csv_path);
    if (status) return status;
    r->density = clip_density(&record);
    r->step = record.stats.denoise_seconds / record.steps;
    r->attention = record.stats.attention_seconds / record.steps;
    r->work = record.stats.session.work;
    clip_record_free(&record);
    return CLI_OK;
}

static void dense_path(const bench *b, char *path, size_t size, int64_t prompt, int64_t seed)
{
    snprintf(path, size, "%s/%s-%s-p%lld-s%lld.rgb", b->dense_dir, b->maker.info.name, b->size,
             (long long)prompt, (long long)seed);
}

/* The dense clip from disk; 0 if it is missing or has another size. */
static int dense_load(bench *b, esa_frames **frames, int64_t prompt, int64_t seed)
{
    char path[4200];
    if (!b->dense_dir) return 0;
    dense_path(b, path, sizeof path, prompt, seed);
    const esa_generate_params *p = &b->base.p;
    const size_t bytes = 3 * (size_t)p->frames * (size_t)p->height * (size_t)p->width;
    uint8_t *rgb = malloc(bytes + 1);
    const int fd = rgb ? cli_open_file(path) : -1;
    FILE *file = fd < 0 ? NULL : fdopen(fd, "rb");
    const int whole = file && fread(rgb, 1, bytes + 1, file) == bytes;
    if (file) fclose(file);
    const int made = whole && !b->maker.video.frames_create(b->maker.ctx, frames, rgb, p->frames,
                                                            p->height, p->width, b->maker.info.fps);
    free(rgb);
    return made;
}

static int dense_clip(bench *b, esa_frames **frames, const clip_request *request, int64_t prompt,
                      int64_t seed)
{
    char key[KEY_SIZE], path[4200];
    row r = { .psnr = INFINITY,
              .ssim = 1,
              .psnr_min = INFINITY,
              .ssim_min = 1,
              .lpips = b->maker.lpips ? 0 : (double)NAN },
        old;
    key_of(b, key, prompt, seed, METHOD_DENSE, 1.0, ESA_TAIL_NONE);
    const int known = csv_find(b, key, &old);
    if (known && dense_load(b, frames, prompt, seed)) return CLI_OK;
    clip_request d = clip_dense(request);
    int status = make(b, frames, &r, &d, "dense");
    if (!status && b->dense_dir) {
        esa_frames_info info = { .struct_size = sizeof info };
        dense_path(b, path, sizeof path, prompt, seed);
        if (!b->maker.video.frames_get_info(*frames, &info))
            status = cli_write_file(path, (const char *)info.rgb,
                                    (size_t)info.frames * (size_t)info.height * (size_t)info.width *
                                        3);
    }
    if (!status && !known) status = csv_add(b, key, &r);
    return status;
}

/* One clip, compared with the dense one of its prompt and seed. */
static int sparse_clip(bench *b, const esa_frames *dense, const clip_request *request,
                       const char *key, const char *label)
{
    esa_frames *frames = NULL;
    esa_metrics m = { 0 };
    row r;
    int status = make(b, &frames, &r, request, label);
    if (!status) status = clip_compare(&b->maker, &m, dense, frames);
    b->maker.video.frames_free(frames);
    if (status) return status;
    r.psnr = m.psnr;
    r.ssim = m.ssim;
    r.psnr_min = m.psnr_min;
    r.ssim_min = m.ssim_min;
    r.lpips = m.lpips;
    status = csv_add(b, key, &r);
    if (status) return status;
    b->clips_made++;
    fprintf(stderr, "%s: %s PSNR %.2f dB, SSIM %.4f, ", label, key, r.psnr, r.ssim);
    if (b->maker.lpips) fprintf(stderr, "LPIPS %.4f, ", r.lpips);
    fprintf(stderr, "%.2f s/step\n", r.step);
    return CLI_OK;
}

/* The tails of a method: those of --tail, else the recommended one of a selector that weighs tails,
 * and tails of the others. */
static cli_list tails_of(const bench *b, int method)
{
    clip_request r = b->base;
    r.method = method;
    const int one = b->own_tails && clip_method_has(method, ESA_TRAIT_WEIGHS_TAIL);
    return one ? (cli_list){ 1, { 0 }, { clip_recommended(&r).attention.tail } } : b->tails;
}

/* Clips of one prompt and seed, without the dense one. */
static int64_t clips_each(const bench *b)
{
    int64_t tails = 0;
    for (int i = 0; i < b->methods.count; i++)
        tails += tails_of(b, (int)b->methods.whole[i] + 1).count;
    return tails * b->budgets.count;
}

static void set_amount(const bench *b, clip_request *q, double amount)
{
    if (b->unit == UNIT_QUALITY)
        q->p.quality = amount;
    else if (b->unit == UNIT_WORK)
        q->p.session.work = amount;
    else if (b->unit == UNIT_BUDGET)
        q->p.session.select.budget = amount;
}

/* One prompt and seed. */
typedef struct source {
    int64_t prompt, seed;
    esa_frames *dense; /* made when the first row is missing */
} source;

/* Makes the clip of one method, amount and tail, unless its row is there. */
static int one_setting(bench *b, source *from, int method, double amount, int tail,
                       const char *label)
{
    char key[KEY_SIZE];
    row r;
    clip_request q = b->base;
    q.p.prompt = b->prompts.line[from->prompt];
    q.p.seed = (uint64_t)from->seed;
    q.method = method;
    q.tail = tail;
    set_amount(b, &q, amount);
    if (method != METHOD_CACHED) q.p.masks = NULL;
    key_of(b, key, from->prompt, from->seed, method, amount, tail);
    if (csv_find(b, key, &r)) return CLI_OK;
    int status = CLI_OK;
    if (!from->dense) status = dense_clip(b, &from->dense, &q, from->prompt, from->seed);
    return status ? status : sparse_clip(b, from->dense, &q, key, label);
}

/* All settings of one prompt and seed. */
static int one_source(bench *b, int64_t prompt, int64_t seed, int64_t *done, int64_t total)
{
    source from = { prompt, seed, NULL };
    int status = CLI_OK;
    for (int m = 0; m < b->methods.count; m++) {
        const int method = (int)b->methods.whole[m] + 1;
        const cli_list tails = tails_of(b, method);
        for (int i = 0; i < b->budgets.count * tails.count && !status; i++) {
            char label[96];
            snprintf(label, sizeof label, "clip %lld/%lld", (long long)++*done, (long long)total);
            status = one_setting(b, &from, method, b->budgets.real[i / tails.count],
                                 (int)tails.whole[i % tails.count], label);
        }
    }
    b->maker.video.frames_free(from.dense);
    return status;
}

/* ---------------------------------------------------------------- the table */

/* One line: means over all clips of a method, tail and budget that are in the CSV. */
static void means_row(const bench *b, cli_table *table, int method, int tail, double budget)
{
    row sum = { 0 };
    double dense = 0;
    int clips = 0, equal = 0;
    char key[KEY_SIZE], name[32], amount[32], method_text[NAME_SIZE];
    for (int64_t i = 0; i < b->prompts.count * b->seeds.count; i++) {
        const int64_t prompt = i / b->seeds.count, seed = b->seeds.whole[i % b->seeds.count];
        row r, full;
        key_of(b, key, prompt, seed, METHOD_DENSE, 1.0, ESA_TAIL_NONE);
        if (!csv_find(b, key, &full)) continue;
        key_of(b, key, prompt, seed, method, budget, tail);
        if (!csv_find(b, key, &r)) continue;
        clips++;
        equal += isinf(r.psnr);
        sum.density += r.density;
        sum.work += r.work;
        sum.psnr += isinf(r.psnr) ? 0 : r.psnr;
        sum.ssim += r.ssim;
        sum.lpips += r.lpips;
        sum.step += r.step;
        dense += full.step;
    }
    if (!clips) return;
    method_name(b, method_text, method);
    cli_cell(table, "%s", method_text);
    cli_cell(table, "%s", order_name(b, name, method));
    amount_name(b, amount, method, budget);
    cli_row(table, "%s|%s|%d|%.3f|%.3f|%.2f dB|%.4f|%.2f|%.2fx", cli_name(name, CLI_TAILS, tail),
            amount, clips, sum.density / clips, sum.work / clips,
            clips > equal ? sum.psnr / (clips - equal) : (double)INFINITY, sum.ssim / clips,
            sum.step / clips, dense / sum.step);
    if (b->maker.lpips) cli_cell(table, "%.4f", sum.lpips / clips); /* -: not in every row */
}

static void print_means(const bench *b)
{
    cli_table *table = cli_table_new(b->maker.lpips ? 12 : 11, 3);
    cli_row(table, "method|order|tail|budget|clips|density|work|PSNR|SSIM|s/step|speedup");
    if (b->maker.lpips) cli_cell(table, "LPIPS");
    for (int m = 0; m < b->methods.count; m++) {
        const int method = (int)b->methods.whole[m] + 1;
        const cli_list tails = tails_of(b, method);
        for (int t = 0; t < tails.count; t++)
            for (int d = 0; d < b->budgets.count; d++)
                means_row(b, table, method, (int)tails.whole[t], b->budgets.real[d]);
    }
    cli_table_print(table, stdout);
}

/* Whether the plan knows works for the qualities, before the first clip. */
static int check_qualities(const bench *b)
{
    esa_work_plan *plan = NULL;
    double work;
    if (b->unit != UNIT_QUALITY) return CLI_OK;
    esa_status status = esa_work_plan_open(b->maker.ctx, &plan, b->base.p.plan);
    for (int i = 0; i < b->budgets.count && !status; i++)
        status = esa_work_plan_reach(plan, b->budgets.real[i], &work);
    esa_work_plan_free(plan);
    return cli_status(b->maker.ctx, status, what);
}

static int run_all(bench *b)
{
    int status = check_qualities(b);
    if (!status) status = csv_open(b);
    const int64_t sources = b->prompts.count * b->seeds.count,
                  total = clips_each(b) * ((sources - b->shard + b->shards - 1) / b->shards);
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
        printf("\n%s: %lld clips made, %lld were there; PSNR, SSIM%s against the dense clip of "
               "the same prompt and seed\n",
               b->csv_path, (long long)b->clips_made, (long long)(total - b->clips_made),
               b->maker.lpips ? ", LPIPS" : "");
    }
    return status;
}

static int with_model(bench *b, const char *prompts_file, int64_t number)
{
    const esa_generate_params *p = &b->base.p;
    int status = clip_resolve(&b->maker, &b->base);
    if (status) return status;
    if (b->unit == UNIT_PRESET) b->budgets.real[0] = p->session.work;
    snprintf(b->size, sizeof b->size, "%dx%dx%dx%d", p->frames, p->height, p->width, p->steps);
    status = cli_prompts_get(&b->prompts, NULL, prompts_file, number, clip_is_tiny(&b->maker),
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
    const char *prompts = NULL, *shard = NULL;
    const int budgets = cli_given(argc, argv, "--budget"),
              methods = cli_given(argc, argv, "--method");
    b.own_tails = !cli_given(argc, argv, "--tail");
    cli_list works = { 0 }, qualities = { 0 };
    int64_t number = 8;
    int done;
    cli_option table[CLIP_MAX_OPTIONS];
    const cli_option own[] = {
        { "--csv", CLI_OUTPUT, &b.csv_path, "FILE", 0, 0, 0,
          "the table, one row per clip; clips that it holds are not made again; required" },
        { "--dense-dir", CLI_TEXT, &b.dense_dir, "DIR", 0, 0, 0,
          "keep the dense clips in this folder; empty it when the weights change (not kept)" },
        { "--lpips", CLI_TEXT, &b.base.open.lpips, "FILE", 0, 0, 0,
          "measure LPIPS too, with the weights tools/convert_lpips.py makes; rows that are there "
          "stay as they are (off: the column is empty)" },
        { "--prompts", CLI_TEXT, &prompts, "FILE", 0, 0, 0,
          "a file with one prompt per line (the built-in prompts)" },
        { "--num-prompts", CLI_INT, &number, "N", 1, CLI_PROMPTS, 0,
          "use the first N built-in prompts (8)" },
        { "--seeds", CLI_INTS, &b.seeds, "N,...", 0, 9e15, 0, "seeds of the noise (0,1)" },
        { "--method", CLI_CHOICES, &b.methods, "entropy|rf_v2|ada_bsa|cached|error", 0, 0, 0,
          "one or more, with commas (error; with --budget: entropy,rf_v2,ada_bsa)" },
        { "--budget", CLI_REALS, &b.budgets, "X,...", 0, 1, 0,
          "fractions of key blocks to keep (methods other than error: 0.7,0.5,0.3,0.2; error alone "
          "has the work of preset balanced)" },
        { "--work", CLI_REALS, &works, "X,...", 0.01, 1, 0,
          "instead of --budget: works of whole clips; the table names them \"work 0.44\"; cached: "
          "the largest work in the mask file that is not above it (not given)" },
        { "--quality", CLI_REALS, &qualities, "DB,...", 1, 100, 0,
          "instead of --work: PSNR against dense that --plan expects to reach; the table names "
          "them \"quality 40\" (not given)" },
        { "--plan", CLI_TEXT, &b.base.p.plan, "FILE", 0, 0, 0,
          "for --work and --quality: a work plan, made by `esa calibrate --plan` (the uniform "
          "rule)" },
        { "--refresh", CLI_SCHEDULE, &b.base.refresh_every, "early|N", 0, 1000, 0,
          CLIP_REFRESH_HELP },
        { "--order-every", CLI_SCHEDULE, &b.base.order_every, "early|N", 0, 1000, 0,
          CLIP_ORDER_EVERY_HELP },
        { "--share-branches", CLI_INT32, &b.base.share_branches, "0|1", 0, 1, 0,
          "1: the negative prompt uses the masks of the prompt (0; error: 1)" },
        { "--tail", CLI_CHOICES, &b.tails, CLI_TAILS, 0, 0, 0,
          "one or more, with commas (none,pooled; error: levels)" },
        { "--shard", CLI_TEXT, &shard, "i/n", 0, 0, 0,
          "part i of n of the pairs of prompt and seed, i from 0 (all)" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    int status = cli_options(
        "esa bench video", "--csv FILE [options]",
        "Makes videos with every method, budget (or work, or quality), and tail, and compares them "
        "with the dense ones.\nThe same command continues a stopped run.",
        clip_options(table, own,
                     CLIP_OPTIONS_MODEL | CLIP_OPTIONS_SIZE | CLIP_OPTIONS_NOISE |
                         CLIP_OPTIONS_DENSE | CLIP_OPTIONS_BLOCKS | CLIP_OPTIONS_CACHED |
                         CLIP_OPTIONS_PRECISION | CLIP_OPTIONS_CARRY,
                     &b.base),
        argc, argv, NULL, &done);
    if (status || done) return status;
    if (!b.csv_path) return cli_usage("%s: --csv FILE is required", what);
    if (shard && (status = cli_shard(shard, &b.shard, &b.shards, what)) != 0) return status;
    if ((works.count > 0) + (qualities.count > 0) + budgets > 1)
        return cli_usage("%s: --budget, --work and --quality say the same thing; give one", what);
    if (b.base.p.plan && !works.count && !qualities.count)
        return cli_usage("%s: --plan needs --work X,... or --quality DB,...", what);
    if (works.count || qualities.count) {
        b.budgets = works.count ? works : qualities;
        b.unit = works.count ? UNIT_WORK : UNIT_QUALITY;
    }
    /* without options: what `esa generate` makes without options */
    clip_request usual = b.base;
    if (methods && b.methods.count == 1) usual.method = (int)b.methods.whole[0] + 1;
    clip_use_defaults(&usual, methods, budgets);
    if (!methods && !budgets) b.methods = (cli_list){ 1, { 0 }, { usual.method - 1 } };
    if (!b.unit && usual.preset >= 0) {
        b.unit = UNIT_PRESET;
        b.base.method = usual.method;
        b.base.preset = usual.preset;
        b.budgets.count = 1; /* its work is known when the number of steps is */
    }
    int cached = 0, weighs = 0;
    for (int i = 0; i < b.methods.count; i++) {
        const int method = (int)b.methods.whole[i] + 1;
        cached |= method == METHOD_CACHED;
        weighs |= clip_method_has(method, ESA_TRAIT_WEIGHS_TAIL);
    }
    if (b.base.score_groups && !weighs)
        return cli_usage("%s: " CLI_SCORE_GROUPS " needs --method error", what);
    if (cached && !b.base.p.masks)
        return cli_usage("%s: --method cached needs --masks FILE (made by `esa calibrate`)", what);
    if (!cached && b.base.p.masks) return cli_usage("%s: --masks needs --method cached", what);
    clip_request one = b.base;
    if (b.unit) set_amount(&b, &one, b.budgets.real[0]);
    for (int m = 0; m < b.methods.count; m++) {
        one.method = (int)b.methods.whole[m] + 1;
        const cli_list tails = tails_of(&b, one.method);
        for (int t = 0; t < tails.count && !status; t++) {
            one.tail = (int)tails.whole[t];
            status = clip_request_check(&one, what);
        }
    }
    if (status) return status;
    status = clip_open(&b.maker, &b.base.open, what);
    if (!status) status = with_model(&b, prompts, number);
    clip_close(&b.maker);
    free(b.csv);
    return status;
}
