/* cmd_bench_model.c - `esa bench model`: seconds of whole clips, step by step and end to end,
 * dense, online and cached.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Without options it measures what `esa generate` makes without options. One row per mode and
 * budget; a work has one row. Each round runs all rows once, so that a slower machine slows all of
 * them. The table shows the median over rounds and the spread; the JSON holds every step of every
 * round. */
#include "clip/clip.h"
#include "core/data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char what[] = "bench model";
enum { MODE_ONLINE, MODE_CACHED, MODE_DENSE };

typedef struct row {
    int mode; /* MODE_* */
    double budget;
    clip_record *record; /* [rounds] */
} row;

typedef struct bench {
    clip_maker maker;
    clip_request base;
    cli_list modes, budgets;
    int64_t rounds;
    int method; /* online: METHOD_* */
    int skip_dense, no_decode, turns;
    const char *json;
    row *row;
    int rows;
} bench;


/* ---------------------------------------------------------------- figures over rounds */

/* low and high: the extremes of the rounds */
typedef struct figure {
    double median, low, high;
} figure;

/* What is measured of one clip. */
enum { STEP_SPARSE, STEP_ALL, DENOISE, END_TO_END, SELECT_STEP, ATTENTION_STEP, FIGURES };
static const char *const figure_names[FIGURES] = {
    "step_seconds",       "step_seconds_with_warmup", "denoise_seconds",
    "end_to_end_seconds", "select_seconds_per_step",  "attention_seconds_per_step"
};

static double measure(const clip_record *r, int which)
{
    const int32_t first = r->warmup, count = r->steps - first;
    double sum = 0;
    double *step;
    switch (which) {
    /* the median step after the warm-up: a disturbed one does not count */
    case STEP_SPARSE:
        step = malloc((size_t)count * sizeof *step);
        if (!step) return (double)NAN;
        memcpy(step, r->step_seconds + first, (size_t)count * sizeof *step);
        sum = measure_median(step, count);
        free(step);
        return sum;
    case STEP_ALL: return clip_step_mean(r, 1);
    case DENOISE: return r->stats.denoise_seconds;
    case END_TO_END: return r->stats.seconds;
    default:
        for (int32_t i = first; i < r->steps; i++)
            sum += which == SELECT_STEP ? r->step_select[i] : r->step_attention[i];
        return sum / count;
    }
}

static figure over_rounds(const bench *b, const row *r, int which)
{
    double value[1000];
    for (int64_t i = 0; i < b->rounds; i++) value[i] = measure(&r->record[i], which);
    const double median = measure_median(value, b->rounds);
    return (figure){ median, value[0], value[b->rounds - 1] };
}

/* ---------------------------------------------------------------- runs */

static void request_of(const bench *b, clip_request *r, const row *w)
{
    *r = b->base;
    r->p.session.select.budget = w->budget;
    r->method = w->mode == MODE_DENSE    ? METHOD_DENSE
                : w->mode == MODE_CACHED ? METHOD_CACHED
                                         : b->method;
    if (w->mode != MODE_CACHED) r->p.masks = NULL;
}

static void name_of(const bench *b, char out[48], const row *w)
{
    char method[32];
    if (w->mode == MODE_DENSE)
        snprintf(out, 48, "dense");
    else if (w->mode == MODE_CACHED)
        snprintf(out, 48, "cached");
    else
        snprintf(out, 48, "online %s", cli_name(method, METHODS, b->method));
}

/* NaN: dense, or a work decides. */
static double budget_of(const bench *b, const row *w)
{
    return w->mode == MODE_DENSE || clip_wants_work(&b->base) ? (double)NAN : w->budget;
}

/* One dense step that is not counted: it reads weights, grows memory and loads the text encoder. */
static int warm_caches(bench *b)
{
    esa_frames *frames = NULL;
    clip_request r;
    request_of(b, &r, &(row){ .mode = MODE_DENSE });
    r.p.steps = 1;
    const int status = clip_make(&b->maker, &frames, NULL, &r, "before the first round", 0, 1);
    b->maker.video.frames_free(frames);
    return status;
}

/* Says "ready" and waits until whoever started this process gives it the turn with a line. */
static int wait_turn(const bench *b, int64_t round)
{
    char c = 0;
    ssize_t got = 1;
    puts("ready");
    fflush(stdout);
    while (got > 0 && c != '\n') {
        if (clip_wait_input()) return CLIP_INTERRUPTED;
        got = read(STDIN_FILENO, &c, 1);
    }
    return got < 1 ? cli_fail("%s: standard input ended before round %lld of %lld", what,
                              (long long)round + 1, (long long)b->rounds)
                   : CLI_OK;
}

static int run_rounds(bench *b)
{
    const int64_t total = b->rounds * b->rows;
    int status = warm_caches(b);
    for (int64_t i = 0; i < total && !status; i++) {
        if (b->turns && i % b->rows == 0 && (status = wait_turn(b, i / b->rows)) != 0) break;
        row *w = &b->row[i % b->rows];
        char label[96], name[48];
        esa_frames *frames = NULL;
        clip_request r;
        request_of(b, &r, w);
        name_of(b, name, w);
        snprintf(label, sizeof label, "round %lld/%lld, %s %g", (long long)(i / b->rows) + 1,
                 (long long)b->rounds, name, w->budget);
        status = clip_make(&b->maker, &frames, &w->record[i / b->rows], &r, label, total - i - 1,
                           1);
        b->maker.video.frames_free(frames);
    }
    if (status == CLIP_INTERRUPTED) cli_fail("%s: interrupted, nothing was written", what);
    return status;
}

/* ---------------------------------------------------------------- results */

/* dense NULL: NaN */
static double speedup(const figure *dense, const figure *figures, int which)
{
    return dense ? dense[which].median / figures[which].median : (double)NAN;
}

/* median, half the spread in per cent, speedup */
static void cells(cli_table *t, const figure *dense, const figure *figures, int which)
{
    const figure *f = &figures[which];
    cli_row(t, "%.3f|%.0f %%|%.2fx", f->median, 50 * (f->high - f->low) / f->median,
            speedup(dense, figures, which));
}

/* A line for each row with anchors, whose steps take longer than the median step. */
static void print_carry(const bench *b)
{
    for (int i = 0; i < b->rows; i++) {
        char name[48];
        name_of(b, name, &b->row[i]);
        if (!clip_anchor_steps(NULL, &b->row[i].record[0])) continue;
        printf("%s, ", name);
        clip_carry_print(stdout, &b->row[i].record[0]);
    }
}

static void print_table(const bench *b, figure (*figures)[FIGURES])
{
    const figure *dense = b->row[0].mode == MODE_DENSE ? figures[0] : NULL;
    cli_table *t = cli_table_new(14, 1);
    cli_row(t, "mode|budget|density|s/step|+-|speedup|select|attention|with warm-up|+-|speedup|"
               "end to end|+-|speedup");
    for (int i = 0; i < b->rows; i++) {
        char name[48];
        name_of(b, name, &b->row[i]);
        cli_row(t, "%s|%g|%.3f", name, budget_of(b, &b->row[i]),
                clip_density(&b->row[i].record[0]));
        cells(t, dense, figures[i], STEP_SPARSE);
        cli_row(t, "%.2f ms|%.1f ms", 1e3 * figures[i][SELECT_STEP].median,
                1e3 * figures[i][ATTENTION_STEP].median);
        cells(t, dense, figures[i], STEP_ALL);
        cells(t, dense, figures[i], END_TO_END);
    }
    cli_table_print(t, stdout);
    printf("\ns/step: median step after the dense warm-up steps; select and attention: their mean "
           "parts of it; with warm-up: mean of all %d steps;\n"
           "end to end: text, steps%s. All are medians of %lld round%s; +- is half the distance "
           "between the fastest and the slowest round.\n",
           (int)b->row[0].record[0].steps, b->no_decode ? "" : " and decoding",
           (long long)b->rounds, b->rounds == 1 ? "" : "s");
    print_carry(b);
}

/* Where the time of a step goes, from the first round: mean milliseconds over all steps. */
static void print_work(const bench *b)
{
    cli_table *t = cli_table_new(9, 1);
    printf("\n");
    cli_row(t, "mode|budget|ms/step|products|attention|selection|cross|convolutions|other");
    for (int i = 0; i < b->rows; i++) {
        const clip_record *r = &b->row[i].record[0];
        const double *w = r->stats.work_seconds, ms = 1e3 / r->steps;
        char name[48];
        name_of(b, name, &b->row[i]);
        cli_row(t, "%s|%g|%.1f|%.1f|%.1f|%.1f|%.1f|%.1f|%.1f", name, budget_of(b, &b->row[i]),
                ms * r->stats.denoise_seconds, ms * w[ESA_WORK_PRODUCTS],
                ms * w[ESA_WORK_ATTENTION], ms * w[ESA_WORK_SELECTION], ms * w[ESA_WORK_CROSS],
                ms * w[ESA_WORK_CONVOLUTIONS], ms * w[ESA_WORK_OTHER]);
    }
    cli_table_print(t, stdout);
    printf(
        "\nms/step: denoising over all steps of the first round; then the work of the whole clip "
        "by kind, also over steps.\n");
}

static void json_figure(cli_json *json, const char *name, const figure *f)
{
    cli_json_open(json, name, '{');
    cli_json_fields(json, "median %g min %g max %g", f->median, f->low, f->high);
    cli_json_close(json);
}

static int save_json(const bench *b, figure (*figures)[FIGURES])
{
    char name[32], method[32];
    const esa_generate_stats *s = &b->row[0].record[0].stats;
    const figure *dense = b->row[0].mode == MODE_DENSE ? figures[0] : NULL;
    cli_json *json = cli_json_new();
    cli_machine_json(json, b->maker.ctx, NULL);
    clip_maker_json(json, &b->maker);
    cli_json_fields(json,
                    "model %s config_hash %s frames %d height %d width %d steps %d tokens %d "
                    "rounds %ld guidance %g tail %s precision %d masks %s decoded %i",
                    b->maker.info.name, b->maker.info.config_hash, s->frames, s->height, s->width,
                    s->steps, s->tokens, b->rounds, b->base.p.guidance,
                    cli_name(name, CLI_TAILS, b->base.p.session.attention.tail),
                    b->base.eight ? 8 : 16, b->base.p.masks, !b->no_decode);
    cli_json_open(json, "rows", '[');
    for (int i = 0; i < b->rows; i++) {
        const row *w = &b->row[i];
        cli_json_open(json, NULL, '{');
        cli_json_fields(json, "mode %s method %s budget %g density %g warmup_steps %d",
                        cli_name(name, "online|cached|dense", w->mode),
                        w->mode == MODE_DENSE    ? "dense"
                        : w->mode == MODE_CACHED ? "cached"
                                                 : cli_name(method, METHODS, b->method),
                        w->mode == MODE_DENSE ? 1 : w->budget, clip_density(&w->record[0]),
                        w->record[0].warmup);
        const esa_session_stats *t = &w->record[0].stats.session;
        cli_json_open(json, "attention_work", '{');
        cli_json_fields(json, "asked %g realised %g", t->work_asked, t->work);
        cli_json_close(json);
        for (int f = 0; f < FIGURES; f++) json_figure(json, figure_names[f], &figures[i][f]);
        cli_json_fields(
            json, "speedup %g speedup_with_warmup %g speedup_end_to_end %g peak_bytes %ld",
            speedup(dense, figures[i], STEP_SPARSE), speedup(dense, figures[i], STEP_ALL),
            speedup(dense, figures[i], END_TO_END), w->record[0].stats.peak_bytes);
        cli_json_open(json, "round", '[');
        for (int64_t k = 0; k < b->rounds; k++) {
            cli_json_open(json, NULL, '{');
            clip_record_json(json, &w->record[k]);
            cli_json_close(json);
        }
        cli_json_close(json);
        cli_json_close(json);
    }
    return cli_json_save(json, b->json);
}

/* ---------------------------------------------------------------- the command */

/* The dense row first, then each mode, budget by budget. */
static int make_rows(bench *b)
{
    b->row = calloc(1 + (size_t)b->modes.count * (size_t)b->budgets.count, sizeof *b->row);
    if (!b->row) return cli_fail("%s: out of memory", what);
    if (!b->skip_dense) b->row[b->rows++] = (row){ .mode = MODE_DENSE, .budget = 1 };
    for (int m = 0; m < b->modes.count; m++)
        for (int d = 0; d < b->budgets.count && b->modes.whole[m] != MODE_DENSE; d++)
            b->row[b->rows++] = (row){ .mode = (int)b->modes.whole[m],
                                       .budget = b->budgets.real[d] };
    for (int i = 0; i < b->rows; i++)
        if (!(b->row[i].record = calloc((size_t)b->rounds, sizeof(clip_record))))
            return cli_fail("%s: out of memory", what);
    return CLI_OK;
}

static int run_bench(bench *b)
{
    cli_prompts prompts;
    int status = clip_resolve(&b->maker, &b->base);
    /* before the dense clips are made */
    if (!status && b->base.p.masks) status = clip_check_masks(&b->maker, &b->base);
    if (status) return status;
    status = cli_prompts_get(&prompts, b->base.p.prompt, NULL, 1, clip_is_tiny(&b->maker), what);
    if (status) return status;
    b->base.p.prompt = prompts.line[0];
    status = make_rows(b);
    if (!status) status = run_rounds(b);
    if (!status) {
        figure(*figures)[FIGURES] = calloc((size_t)b->rows, sizeof *figures);
        for (int i = 0; figures && i < b->rows; i++)
            for (int f = 0; f < FIGURES; f++) figures[i][f] = over_rounds(b, &b->row[i], f);
        if (figures) print_table(b, figures);
        if (figures) print_work(b);
        status = figures ? b->json ? save_json(b, figures) : CLI_OK
                         : cli_fail("%s: out of memory", what);
        free(figures);
    }
    for (int i = 0; i < b->rows; i++) {
        for (int64_t k = 0; b->row[i].record && k < b->rounds; k++)
            clip_record_free(&b->row[i].record[k]);
        free(b->row[i].record);
    }
    free(b->row);
    cli_prompts_free(&prompts);
    return status;
}

int cmd_bench_model(int argc, char **argv)
{
    bench b = { .base = clip_request_default(),
                .budgets = { 3, { 0.7, 0.5, 0.3 }, { 0 } },
                .rounds = 3 };
    cli_option table[CLIP_MAX_OPTIONS];
    const int budgets = cli_given(argc, argv, "--budgets"),
              method = cli_given(argc, argv, "--method");
    int done, cached = 0, online = 0;
    const cli_option own[] = {
        { "--mode", CLI_CHOICES, &b.modes, "online|cached|dense", 0, 0, 0,
          "one or more, with commas (online, and cached with --masks)" },
        { "--budgets", CLI_REALS, &b.budgets, "X,...", 0, 1, 0,
          "fractions of key blocks to keep (mode cached, and methods other than error: "
          "0.7,0.5,0.3; error has --preset balanced instead)" },
        { "--method", CLI_CHOICE, &online, ONLINE_METHODS, 0, 0, 0,
          "selector of mode online (error; with --budgets or mode cached: entropy)" },
        { "--masks", CLI_TEXT, &b.base.p.masks, "FILE", 0, 0, 0,
          "mask file of mode cached; steps of the run use the nearest steps of the file" },
        { "--rounds", CLI_INT, &b.rounds, "N", 1, 1000, 0,
          "rounds; the table shows medians over them (3)" },
        { "--skip-dense", CLI_FLAG, &b.skip_dense, NULL, 0, 0, 0,
          "make no dense clip to compare with (off)" },
        { "--no-decode", CLI_FLAG, &b.no_decode, NULL, 0, 0, 0, "leave out the decoder (off)" },
        { "--prompt", CLI_TEXT, &b.base.p.prompt, "TEXT", 0, 0, 0,
          "the prompt (the first built-in prompt)" },
        { "--seed", CLI_INT, &b.base.p.seed, "N", 0, 9e15, 0, "seed of the noise (0)" },
        { "--random-weights", CLI_FLAG, &b.base.open.random, NULL, 0, 0, 0,
          "measure true shapes without a checkpoint: --model wan-1.3b-480p, wan-1.3b-720p, "
          "wan-14b-480p, wan-14b-720p, cogvideox-2b, cogvideox-5b, hunyuan-544p or hunyuan-720p; "
          "there is no text encoder (off)" },
        { "--json", CLI_OUTPUT, &b.json, "FILE", 0, 0, 0,
          "also write every step of every round as JSON" },
        { "--turns", CLI_FLAG, &b.turns, NULL, 0, 0, 0,
          "before each round print \"ready\" and wait for a line on standard input: for programs "
          "that measure in turns (off)" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    int status = cli_options(
        "esa bench model", "[options]",
        "Times whole clips, dense, online and cached: one step after the warm-up, all steps, and "
        "end "
        "to end.",
        clip_options(table, own, CLIP_OPTIONS_ALL & ~CLIP_OPTIONS_CACHED, &b.base), argc, argv,
        NULL, &done);
    if (status || done) return status;
    if (clip_wants_work(&b.base) && budgets)
        return cli_usage("bench model: --budgets and --work say the same thing; give one");
    if (!b.modes.count)
        b.modes = (cli_list){ b.base.p.masks ? 2 : 1, { 0 }, { MODE_ONLINE, MODE_CACHED } };
    int others = 0;
    for (int i = 0; i < b.modes.count; i++) {
        cached |= b.modes.whole[i] == MODE_CACHED;
        others += b.modes.whole[i] != MODE_DENSE;
    }
    if (cached && !b.base.p.masks)
        return cli_usage("bench model: --mode cached needs --masks FILE (made by `esa calibrate`)");
    if (!cached && b.base.p.masks) return cli_usage("bench model: --masks needs --mode cached");
    if (b.skip_dense && !others)
        return cli_usage("bench model: --skip-dense contradicts --mode dense");
    if (method) b.base.method = clip_method(ONLINE_METHODS, online);
    /* cached masks are compared with a selector at the same budgets */
    clip_use_defaults(&b.base, method, budgets || (cached && !clip_wants_work(&b.base)));
    b.method = b.base.method;
    if (clip_wants_work(&b.base)) /* one row: the work decides */
        b.budgets = (cli_list){ 1, { b.base.p.session.select.budget }, { 0 } };
    if ((status = clip_request_check(&b.base, what)) != 0) return status;
    b.base.p.session.step_map = ESA_STEP_MAP_NEAREST;
    b.base.p.decode = !b.no_decode;
    if (b.no_decode) b.base.open.parts = ESA_PART_TRANSFORMER | ESA_PART_TEXT;
    status = clip_open(&b.maker, &b.base.open, what);
    if (!status) status = run_bench(&b);
    clip_close(&b.maker);
    return status;
}
