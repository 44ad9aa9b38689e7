/* machine.c - describes the machine and the build; contexts; the clock.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* sched_getaffinity */
#include "core/cli.h"
#include "esa_commit.h" /* written by the build: ESA_COMMIT */

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

/* Copies the value of the first line "key : value" of a file. */
static void field(char *out, size_t size, const char *path, const char *key, char separator)
{
    char line[512];
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) {
        if (strncmp(line, key, strlen(key)) != 0) continue;
        char *value = strchr(line, separator);
        if (!value) continue;
        value++;
        value += strspn(value, " \t\"");
        value[strcspn(value, "\"\n")] = 0;
        snprintf(out, size, "%s", value);
        break;
    }
    if (file) fclose(file);
}

void cli_machine_get(cli_machine *m)
{
    struct utsname names;
    cpu_set_t set[8]; /* as src/ctx/ctx.c */
    char release[96] = "";
    memset(m, 0, sizeof *m);
    field(m->cpu, sizeof m->cpu, "/proc/cpuinfo", "model name", ':');
    if (uname(&names) != 0) memset(&names, 0, sizeof names);
    if (!m->cpu[0])
        snprintf(m->cpu, sizeof m->cpu, "%s",
                 names.machine); /* ARM kernels do not name the model */
    field(release, sizeof release, "/etc/os-release", "PRETTY_NAME", '=');
    snprintf(m->os, sizeof m->os, "%s%s%.32s %.24s", release, release[0] ? ", " : "", names.sysname,
             names.machine);
    m->cores = sched_getaffinity(0, sizeof set, set) == 0 ? CPU_COUNT_S(sizeof set, set)
                                                          : (int)sysconf(_SC_NPROCESSORS_ONLN);
    m->memory_bytes = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
}

int cli_machine_has(const char *feature)
{
    FILE *file = fopen("/proc/cpuinfo", "r");
    char *line = NULL;
    size_t room = 0;
    int has = 0;
    while (file && !has && getline(&line, &room, file) > 0) {
        if (strncmp(line, "flags", 5) != 0) continue;
        char *rest;
        for (const char *word = strtok_r(line, " \t\n", &rest); word && !has;
             word = strtok_r(NULL, " \t\n", &rest))
            has = strcmp(word, feature) == 0;
        break; /* all processors are alike */
    }
    free(line);
    if (file) fclose(file);
    return has;
}

int cli_ctx_new(esa_ctx **ctx, int64_t threads) { return cli_ctx_on(ctx, threads, 0); }

/* Says that threads could not be started. user: whether a context is being made; what it logs later
 * is not for users. */
static void say_warning(void *user, int32_t level, const char *text)
{
    if (*(const atomic_int *)user && level == ESA_LOG_WARNING) fprintf(stderr, "esa: %s\n", text);
}

int cli_ctx_on(esa_ctx **ctx, int64_t threads, int32_t ordinal)
{
    esa_ctx_params params = esa_ctx_params_default();
    static atomic_int making; /* several threads may make one */
    params.threads = (int32_t)threads;
    params.cuda_device = ordinal;
    params.log = say_warning;
    params.log_user = &making;
    making++;
    const esa_status status = esa_ctx_create(ctx, &params);
    making--;
    if (!status) return CLI_OK;
    const char *asked = getenv("ESA_CPU"); /* no ctx holds the message yet */
    if (status == ESA_ERR_UNSUPPORTED && asked)
        return cli_fail("ESA_CPU is '%s', expected a kernel set of this machine (ref, avx2, "
                        "avx512, avx512bf16, amx, neon, neonbf16)",
                        asked);
    return cli_fail("creating a context failed: %s", esa_status_name(status));
}

int cli_ctx_gpu(esa_ctx **ctx, esa_device_info *gpu, int32_t ordinal, const char *what)
{
    esa_ctx_params params = esa_ctx_params_default();
    params.threads = 1;
    params.cuda_device = ordinal;
    esa_status status = esa_ctx_create(ctx, &params);
    if (status) return cli_fail("creating a context failed: %s", esa_status_name(status));
    memset(gpu, 0, sizeof *gpu);
    gpu->struct_size = sizeof *gpu;
    status = esa_device_get_info(*ctx, gpu);
    if (!status) return CLI_OK;
    cli_fail_esa(*ctx, status, what);
    esa_ctx_free(*ctx);
    *ctx = NULL;
    return CLI_FAILED;
}

const char *cli_commit(void) { return ESA_COMMIT; }

void cli_gpu_json(cli_json *json, const char *key, const esa_device_info *gpu)
{
    cli_json_open(json, key, '{');
    cli_json_fields(json,
                    "ordinal %d name %s compute_major %d compute_minor %d multiprocessors %d "
                    "memory_bytes %ld free_bytes %ld driver %d runtime %d kernels %s plugin %s",
                    gpu->ordinal, gpu->name, gpu->major, gpu->minor, gpu->multiprocessors,
                    gpu->memory, gpu->free_memory, gpu->driver, gpu->runtime, gpu->kernels,
                    gpu->plugin);
    cli_json_close(json);
}

void cli_gpu_print(FILE *out, const esa_device_info *gpu)
{
    const char *lowered = getenv("ESA_CUDA");
    const int shown = lowered && *lowered;
    fprintf(out,
            "%s, compute capability %d.%d, %d multiprocessors, %.1f of %.1f GiB free, driver for "
            "CUDA %d.%d; plugin %s, %s kernels%s%s%s\n",
            gpu->name, (int)gpu->major, (int)gpu->minor, (int)gpu->multiprocessors,
            (double)gpu->free_memory / 1073741824.0, (double)gpu->memory / 1073741824.0,
            (int)gpu->driver / 1000, (int)gpu->driver % 1000 / 10, gpu->plugin, gpu->kernels,
            shown ? " (ESA_CUDA=" : "", shown ? lowered : "", shown ? ")" : "");
}

void cli_machine_json(cli_json *json, const esa_ctx *ctx, const char *blas)
{
    cli_machine m;
    cli_machine_get(&m);
    cli_json_open(json, "machine", '{');
    cli_json_fields(json, "cpu %s cores %d memory_bytes %ld os %s", m.cpu, m.cores, m.memory_bytes,
                    m.os);
    if (ctx) cli_json_fields(json, "threads %d kernels %s", esa_ctx_threads(ctx), esa_ctx_cpu(ctx));
    cli_json_fields(json, "blas %s version %s", blas, esa_version());
    cli_json_close(json);
    cli_json_text(json, "commit", cli_commit());
}

void cli_machine_print(FILE *out, const esa_ctx *ctx)
{
    cli_machine m;
    cli_machine_get(&m);
    fprintf(out, "%s, %d cores, %.1f GiB; esa %s (%s), %d threads, %s kernels\n", m.cpu, m.cores,
            (double)m.memory_bytes / 1073741824.0, esa_version(), cli_commit(),
            (int)esa_ctx_threads(ctx), esa_ctx_cpu(ctx));
}

double cli_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
