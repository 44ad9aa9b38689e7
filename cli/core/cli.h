/* cli.h - what the commands of esa share: options, errors, tables, JSON, progress, machine, BLAS.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The command line uses the public headers only. A command returns its exit status: 0, CLI_FAILED
 * after a message on stderr, or CLI_USAGE after a message about wrong arguments. Functions that
 * return such a status have printed the message. Only cli_hear keeps state between calls. */
#ifndef ESA_CLI_CLI_H
#define ESA_CLI_CLI_H

#include <stdint.h>
#include <stdio.h>
#include <esa/esa_session.h>

#include "core/files.h"
#include "core/json.h"

enum { CLI_OK = 0, CLI_FAILED = 1, CLI_USAGE = 2 };

/* ---------------------------------------------------------------- commands */

typedef int (*cli_run)(int argc, char **argv);
typedef struct cli_command {
    const char *name; /* NULL ends a table */
    cli_run run;      /* argv[0] is the first word after the command's name */
    const char *help; /* one line */
} cli_command;

/* Runs the command argv[0] of the table. Suggests a name for a typing error, and prints the list
 * for --help and without words. path is what the user has typed so far: "esa masks". */
int cli_dispatch(const char *path, const char *about, const cli_command *table, int argc,
                 char **argv);

int cmd_bench(int argc, char **argv);
int cmd_bench_attention(int argc, char **argv);
int cmd_bench_model(int argc, char **argv);
int cmd_bench_quality(int argc, char **argv);
int cmd_bench_video(int argc, char **argv);
int cmd_calibrate(int argc, char **argv);
int cmd_demo(int argc, char **argv);
int cmd_doctor(int argc, char **argv);
int cmd_experiment(int argc, char **argv);
int cmd_evaluate(int argc, char **argv);
int cmd_export(int argc, char **argv);
int cmd_generate(int argc, char **argv);
int cmd_masks(int argc, char **argv);
int cmd_report(int argc, char **argv);
int cmd_serve(int argc, char **argv);
int cmd_masks_select(int argc, char **argv);
int cmd_masks_info(int argc, char **argv);
int cmd_masks_derive(int argc, char **argv);
int cmd_masks_merge(int argc, char **argv);
int cmd_masks_convert(int argc, char **argv);

/* ---------------------------------------------------------------- errors (option.c) */

/* Prints "esa: message" on stderr; returns CLI_FAILED. */
int cli_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The same for wrong arguments; returns CLI_USAGE. */
int cli_usage(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The same with the message of a failed library call; what names the work ("masks select: reading
 * q"). */
int cli_fail_esa(const esa_ctx *ctx, esa_status status, const char *what);
/* CLI_OK for ESA_OK, else the same. */
int cli_status(const esa_ctx *ctx, esa_status status, const char *what);

/* Messages of this thread go to text from now on, without "esa: " and the line's end, instead of to
 * stderr; the first is kept until text[0] is 0. NULL: to stderr again. For threads of a server,
 * whose messages are answers. Returns what was before, to be put back. */
typedef struct cli_hearing {
    char *text;
    size_t size;
} cli_hearing;
cli_hearing cli_hear(char *text, size_t size);

/* Makes a context with the default settings and this many threads; 0: one per core. (machine.c) */
int cli_ctx_new(esa_ctx **ctx, int64_t threads);
/* The same on GPU `ordinal`, if a GPU is used. */
int cli_ctx_on(esa_ctx **ctx, int64_t threads, int32_t ordinal);
/* Makes a context on a GPU and describes the GPU; what names the work. */
int cli_ctx_gpu(esa_ctx **ctx, esa_device_info *gpu, int32_t ordinal, const char *what);

/* ---------------------------------------------------------------- options (option.c) */

/* OUTPUT is TEXT that names a file the command writes at the end: cli_options refuses a path that
 * cannot be written. INT32 is INT for a field of an API struct. SCHEDULE is INT32, or the word
 * early for ESA_REFRESH_EARLY. TEXTS is TEXT that may be given several times. */
enum {
    CLI_FLAG,
    CLI_TEXT,
    CLI_OUTPUT,
    CLI_INT,
    CLI_INT32,
    CLI_SCHEDULE,
    CLI_REAL,
    CLI_CHOICE,
    CLI_INTS,
    CLI_REALS,
    CLI_CHOICES,
    CLI_TEXTS
};
#define CLI_MAX_LIST 16

typedef struct cli_list { /* value of CLI_INTS, CLI_REALS, CLI_CHOICES */
    int count;
    double real[CLI_MAX_LIST];
    int64_t whole[CLI_MAX_LIST];
} cli_list;

typedef struct cli_texts { /* value of CLI_TEXTS */
    int count;
    const char *text[CLI_MAX_LIST];
} cli_texts;

typedef struct cli_option {
    const char *name; /* "--budget"; NULL ends a table */
    int type;         /* CLI_* */
    /* FLAG int*, TEXT and OUTPUT const char**, INT int64_t*, INT32 and SCHEDULE int32_t*,
     * REAL double*, CHOICE int*, TEXTS cli_texts*, other lists cli_list* */
    void *value;
    /* the value's name in the help; CHOICE(S): all names, "a|b|c", in the order of their numbers */
    const char *argument;
    double lo, hi;    /* numbers: inclusive range, checked if lo < hi and shown in the help */
    int length;       /* lists: required length; 0: 1 .. CLI_MAX_LIST */
    const char *help; /* what it means and, in brackets, the default */
} cli_option;

/* Parses "--name value", "--name=value" and the words between them. Prints the usage and sets *done
 * on --help. Moves words to the front of argv and counts them in *words (NULL: none are allowed).
 */
int cli_options(const char *path, const char *usage, const char *about, const cli_option *table,
                int argc, char **argv, int *words, int *done);
/* Reads the value of one option as cli_options does; text must live as long as the value. CLI_USAGE
 * after a message that begins with path and names the option as o->name does. */
int cli_option_read(const char *path, const cli_option *o, const char *text);
/* Copies a list of whole numbers; an empty list leaves out as it is. */
void cli_list_copy(int32_t *out, const cli_list *list);
/* The works of the presets with guidance: those of esa_preset_work_for for two branches. */
cli_list cli_preset_works(int32_t steps, int32_t carry);
/* Reads --shard i/n, with i from 0. */
int cli_shard(const char *text, int *index, int *count, const char *what);
/* 1 if the option was given. Call it before cli_options, which moves words. */
int cli_given(int argc, char **argv, const char *name);
/* The position of name in "a|b|c", or -1. */
int cli_choice(const char *names, const char *name, int length);
/* The entry nearest to word (at most two typing errors away), or NULL. */
const char *cli_nearest(const char *word, const char *const *names, int count);

/* ---------------------------------------------------------------- output */

/* A table that is printed aligned at the end; the first `left` columns are flush left. Cells are
 * copied. (table_print.c) */
typedef struct cli_table cli_table;
cli_table *cli_table_new(int columns, int left);
/* One cell; after the last column a new row starts. NaN is shown as "-", infinity, which is the
 * PSNR of equal videos, as "equal". */
void cli_cell(cli_table *table, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Several cells: "%s|%d|%.2f dB". */
void cli_row(cli_table *table, const char *format, ...) __attribute__((format(printf, 2, 3)));
void cli_table_print(cli_table *table, FILE *out); /* prints and frees */

/* A progress line on stderr. A terminal shows it in place; other files get a line every quarter. */
void cli_progress(const char *what, int64_t done, int64_t total);
void cli_progress_end(void);

/* Writes a word quoted for a shell. */
void cli_put_word(FILE *out, const char *word);

/* ---------------------------------------------------------------- machine (machine.c) */

typedef struct cli_machine {
    char cpu[128], os[160];
    int cores; /* that this process may use */
    int64_t memory_bytes;
} cli_machine;
void cli_machine_get(cli_machine *machine);
/* 1 if the system says that its processors have a feature, by its name in /proc/cpuinfo. */
int cli_machine_has(const char *feature);
/* Adds "machine" and "commit", as in every JSON file of esa. ctx gives threads and kernels; ctx and
 * blas may be NULL. */
void cli_machine_json(cli_json *json, const esa_ctx *ctx, const char *blas);
/* Prints the same as one line. */
void cli_machine_print(FILE *out, const esa_ctx *ctx);
const char *cli_commit(void);
/* Adds a GPU as an object, or prints it as one line: name, compute capability, memory, driver,
 * kernels. */
void cli_gpu_json(cli_json *json, const char *key, const esa_device_info *gpu);
void cli_gpu_print(FILE *out, const esa_device_info *gpu);

/* ---------------------------------------------------------------- the device (device.c) */

/* Where networks run. */
typedef struct cli_device {
    int32_t device, ordinal; /* ESA_DEVICE_*; number of the GPU */
    int32_t gpus;            /* in this machine */
    esa_device_info gpu;     /* if it is used */
    char library[400];       /* of matrix products on the GPU: version and path */
} cli_device;
#define CLI_DEVICE_NAMES "auto|cpu|cuda|cuda:N"
#define CLI_DEVICE_HELP  "where networks run; auto: the first GPU if there is one that can (auto)"

/* Reads --device (NULL: auto). Names a GPU on stderr when it is taken, and says why if one is there
 * and cannot be used, for example because the plugin is of another build. CLI_USAGE or CLI_FAILED
 * after a message. */
int cli_device_choose(cli_device *device, const char *asked, const char *what);
/* Writes the object "device". */
void cli_device_json(cli_json *json, const cli_device *device);
/* Reads a size: 800M, 16G (1024 each), or bytes. CLI_USAGE after a message with the option's
 * name. */
int cli_size_parse(const char *text, int64_t *bytes, const char *name, const char *what);
double cli_seconds(void); /* monotonic clock */

/* ---------------------------------------------------------------- the machine's CBLAS, opened at
 * run time (blas.c) */

typedef struct cli_blas {
    void *handle; /* NULL: none found */
    char name[64];
    char core[32]; /* the processor whose kernels OpenBLAS chose; "" if it does not say */
    void (*sgemm)(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a,
                  int lda, const float *b, int ldb, float beta, float *c, int ldc);
    int threads_set; /* 1: the thread count could be set */
} cli_blas;
void cli_blas_open(cli_blas *blas, int threads);
void cli_blas_close(cli_blas *blas);

/* ---------------------------------------------------------------- names and shapes (names.c) */

#define CLI_SELECTORS cli_selectors()                       /* ESA_SELECT_* */
#define CLI_ORDERS    "raster|tile|tile3d|hilbert|adaptive" /* ESA_ORDER_* */
#define CLI_TAILS     "none|pooled|centroid|levels"         /* ESA_TAIL_* */
#define CLI_PRESETS   "faithful|balanced|fast"              /* ESA_PRESET_* */
#define CLI_DTYPES    "f32|f16|bf16"                        /* ESA_DTYPE_* */
#define CLI_MODES     "fixed|compat|compat-round"           /* ESA_MODE_* */
#define CLI_DEVICES   "cpu|cuda"                            /* ESA_DEVICE_* */

/* The names of all selectors of the library, as "a|b|c". */
const char *cli_selectors(void);
/* Copies the i-th name of "a|b|c" into buffer and returns it; "?" if i is out of range. */
const char *cli_name(char buffer[32], const char *names, int i);

typedef struct cli_shape {
    char name[48];
    int64_t B, H, N, D;
    int32_t grid[3], text_front, text_back; /* zeros: no grid */
} cli_shape;
/* Reads a model name or "B,H,N,D". */
int cli_shape_parse(cli_shape *shape, const char *text);
/* Lists the known names for the help: "wan-1.3b-480p, ...". */
void cli_shape_list(char *buffer, size_t size);
/* 1 if a selector (ESA_SELECT_*) has a trait (ESA_TRAIT_*). */
int cli_selector_has(int64_t selector, int trait);
/* CLI_OK if a selector (ESA_SELECT_*) takes an order and a tail (ESA_ORDER_*, ESA_TAIL_*; negative:
 * not given), else CLI_USAGE after a message that begins with what. */
int cli_selector_takes(int selector, int order, int tail, const char *what);
/* Reads "128x64". */
int cli_block_parse(const char *text, int32_t *block_q, int32_t *block_k);
/* Reads the groups of the error selector, "8x4": each is 1, 2, 4, 8 or 16. The option is
 * CLI_SCORE_GROUPS. */
int cli_groups_parse(const char *text, int32_t *group_q, int32_t *group_k);
#define CLI_SCORE_GROUPS "--score-groups"
#define CLI_SCORE_GROUPS_HELP                                                                      \
    "error: query x key tokens of a mean that is scored, 1, 2, 4, 8 or 16 each; smaller is more "  \
    "exact and slower (8x4; from query blocks of 128 on: 16x4)"

#endif
