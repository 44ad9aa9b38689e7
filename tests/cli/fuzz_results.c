/* fuzz_results.c - reads any files as a results folder of `esa experiment`, as `esa report` does. A
 * folder is refused with a message, or its figures make sense and make a page.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Input: 8 bytes length n, n bytes of speed.json, then quality.json and config.json, which end with
 * a byte 0 or with the input. A file without bytes is missing. The command is no library: the build
 * compiles its sources for this program, without main and without the videos of a page. */
#include "fuzz/fuzz_common.h"
#include "report/report.h"

#include <stdarg.h>
#include <sys/stat.h>

static char folder_path[] = "/tmp/esa-fuzz-results-XXXXXX";
static int folder_made;
static char message[4096]; /* the last one of the command; "": none */

/* In place of the command's own, which prints (-Wl,--wrap). */
int __wrap_cli_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
int __wrap_cli_fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    return CLI_FAILED;
}

static void path_of(char path[96], int file)
{
    snprintf(path, 96, "%s/%s", folder_path, report_file_names[file]);
}

static void remove_folder(void)
{
    char path[96];
    for (int i = 0; i < 3; i++) {
        path_of(path, i);
        unlink(path);
    }
    rmdir(folder_path);
}

static void write_file(int file, const uint8_t *bytes, size_t size)
{
    char path[96];
    path_of(path, file);
    if (!size) {
        unlink(path);
        return;
    }
    FILE *f = fopen(path, "wb");
    must(f && fwrite(bytes, 1, size, f) == size, "a file is written");
    must(fclose(f) == 0, "a file is closed");
}

/* What the page's code relies on. */
static void check_run(const report_run *r)
{
    must(r->tag && r->model && r->prompts && r->clip_count >= 0, "a run has its names");
    must(r->variant_count > 0, "a run has variants");
    must(r->frames >= 0 && r->height >= 0 && r->width >= 0 && r->step_count >= 0 && r->warmup >= 0,
         "sizes are not negative");
    for (int i = 0; i < r->variant_count; i++) {
        const report_variant *v = &r->variants[i];
        must(memchr(v->name, 0, sizeof v->name) && memchr(v->label, 0, sizeof v->label) &&
                 memchr(v->family, 0, sizeof v->family),
             "texts end");
        must(v->seen != 0 && (v->clips || !r->clip_count), "a variant is named by a file");
        must(v->step_count >= 0 && (v->steps || !v->step_count), "steps have seconds");
        must(!v->head_density || (v->layers > 0 && v->heads > 0), "densities have a shape");
        volatile double sum = 0;
        for (int64_t s = 0; s < v->step_count; s++) sum = sum + v->steps[s];
        for (int64_t h = 0; v->head_density && h < v->layers * v->heads; h++)
            sum = sum + v->head_density[h];
        for (int64_t c = 0; c < r->clip_count; c++) sum = sum + v->clips[c].psnr;
    }
}

/* The figures as JSON, and the whole page if asked for, which takes milliseconds. */
static void make_page(const report_run *r, int whole)
{
    size_t bytes;
    cli_json *json = cli_json_new();
    report_runs_json(json, r, 1);
    char *data = cli_json_take(json, &bytes);
    must(data != NULL, "the figures are written");
    json_t *again = json_loadb(data, bytes, JSON_REJECT_DUPLICATES, NULL);
    must(json_array_size(cli_json_at(again, "runs.0.variants")) == (size_t)r->variant_count,
         "and can be read again");
    json_decref(again);
    report_page page = {
        .title = r->tag, .runs = r, .run_count = 1, .data = data, .data_bytes = bytes
    };
    report_text text = { 0 };
    if (whole) report_page_write(&text, &page);
    must(!whole || (!text.failed && text.used > 0), "a page is written");
    report_text_free(&text);
    free(data);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t n = 0;
    if (size < 8) return 0;
    memcpy(&n, data, 8);
    if (n > size - 8) return 0;
    if (!folder_made) {
        must(mkdtemp(folder_path) != NULL, "a folder is made");
        folder_made = 1;
        atexit(remove_folder);
    }
    const uint8_t *quality = data + 8 + n, *end = data + size,
                  *zero = quality < end ? memchr(quality, 0, (size_t)(end - quality)) : NULL,
                  *config = zero ? zero + 1 : end;
    write_file(REPORT_SPEED, data + 8, (size_t)n);
    write_file(REPORT_QUALITY, quality, (size_t)((zero ? zero : end) - quality));
    zero = config < end ? memchr(config, 0, (size_t)(end - config)) : NULL;
    write_file(REPORT_CONFIG, config, (size_t)((zero ? zero : end) - config));
    message[0] = 0;
    report_run run;
    const int status = report_run_read(&run, folder_path);
    if (status) {
        must(status == CLI_FAILED && message[0] != 0, "a refusal has a message");
    } else {
        must(message[0] == 0, "a folder that is read has no message");
        check_run(&run);
        make_page(&run, size % 16 == 0);
    }
    report_run_free(&run);
    return 0;
}

/* ---------------------------------------------------------------- seeds */

#define HEAD                                                                                       \
    "{\"format\":1,\"tag\":\"a <b> & c\",\"model\":\"wan-tiny\",\"frames\":9,\"height\":64,"
#define SIZE "\"width\":64,\"steps\":3,"
#define RECORD(first)                                                                              \
    "{\"seconds\":1.5,\"text_seconds\":0.2,\"denoise_seconds\":1,\"attention_seconds\":0.5,"       \
    "\"select_seconds\":0.01,\"decode_seconds\":0.3,\"warmup_steps\":1,"                           \
    "\"step_seconds\":[0.4,0.3,0.3],\"head_density\":[[" first ",0.5],[0.25,null]]}"
#define SPREAD(x) "{\"median\":" x ",\"lowest\":0.9,\"highest\":2}"
#define TIMED(name, method, budget, clips)                                                         \
    "{\"name\":\"" name "\",\"method\":\"" method "\",\"budget\":" budget ",\"density\":0.5,"      \
    "\"clip_seconds\":" SPREAD("1.5") ",\"step_seconds\":" SPREAD(                                 \
        "0.3") ","                                                                                 \
               "\"step_seconds_sparse\":" SPREAD(                                                  \
                   "0.25") ",\"speedup\":1.4,\"speedup_without_warmup\":1.6,"                      \
                           "\"videos\":[" clips "]}"
#define CLIP(index, first)                                                                         \
    "{\"index\":" index ",\"prompt\":\"ein W\xc3\xbcrfel\",\"file\":\"videos/0.mp4\","             \
    "\"record\":" RECORD(first) "}"
#define JUDGED(name, same)                                                                         \
    "{\"name\":\"" name "\",\"method\":\"cached\",\"budget\":0.5,\"density\":0.5,"                 \
    "\"kept_mass\":0.9,\"identical\":" same ",\"mean\":{\"psnr\":30,\"ssim\":0.9,\"lpips\":0.1,"   \
    "\"flicker\":null},\"videos\":[{\"index\":0,\"prompt\":\"x\",\"file\":\"videos/0.mp4\","       \
    "\"identical\":true,\"psnr\":30,\"ssim\":0.9}]}"

static const char speed_file[] = HEAD SIZE
    "\"machine\":{\"cpu\":\"Some CPU\",\"cores\":2,\"kernels\":\"avx2\"},\"tokens\":640,"
    "\"calibration\":{\"file\":\"masks.safetensors\"},\"variants\":[" TIMED(
        "b0.5", "cached", "0.5",
        CLIP("1", "0.5") "," CLIP("0", "null")) "," TIMED("dense", "dense", "1",
                                                          CLIP("0", "null")) "]}";
static const char quality_file[] = HEAD SIZE
    "\"lpips\":\"alex\",\"variants\":[" JUDGED("b0.5", "1") "," JUDGED("x", "0") "]}";
static const char config_file[] =
    "{\"format\":1,\"command\":\"esa experiment run --tag <t>\",\"machine\":{\"cpu\":\"Some CPU\"},"
    "\"commit\":\"0123abcd\",\"settings\":{\"model\":\"wan-tiny\",\"frames\":9,\"tail\":\"pooled\","
    "\"masks\":\"masks.safetensors\",\"steps\":3}}";

/* All files, each alone, and one of another format. */
static int make_seeds(const char *folder)
{
    static const char *const files[][3] = { { speed_file, quality_file, config_file },
                                            { speed_file, "", "" },
                                            { "", quality_file, "" },
                                            { "", "", config_file },
                                            { "{\"format\":2}", "", "" } };
    for (int i = 0; i < 5; i++) {
        char path[1024];
        snprintf(path, sizeof path, "%s/seed%d", folder, i);
        FILE *f = fopen(path, "wb");
        if (!f) return 1;
        const uint64_t n = strlen(files[i][0]);
        const size_t quality = strlen(files[i][1]) + 1, config = strlen(files[i][2]) + 1;
        const int bad = fwrite(&n, 1, 8, f) != 8 || fwrite(files[i][0], 1, n, f) != n ||
                        fwrite(files[i][1], 1, quality, f) != quality ||
                        fwrite(files[i][2], 1, config, f) != config;
        if (fclose(f) != 0 || bad) return 1;
    }
    return 0;
}
