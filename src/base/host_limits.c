/* host_limits.c - see host_limits.h.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A group is bound by the limits of all groups above it too, so the least counts. Version 2 has one
 * tree, version 1 has one for each controller or pair of controllers.
 *
 * A group counts the pages of files that were read as its own. It gets pages back when memory is
 * short: those not used lately at once, the others (weights of a network that has run) if need be.
 * Of these half count as free. */
#include "base/host_limits.h"

#include <stdio.h>
#include <string.h>
#include "base/inline.h"

enum { GROUP = 4096, FOLDER = GROUP + 400 };

/* What one folder of a group leaves; INT64_MAX without a limit. second: of version 2. */
typedef int64_t (*look_fn)(const char *folder, int32_t second);

/* ---------------------------------------------------------------- files */

/* Reads up to two numbers after `name` at the start of a line (name "": of any line). Returns how
 * many there are, which may be below 0. "max" is no number. */
static int32_t read_numbers(int64_t out[2], const char *folder, const char *file, const char *name)
{
    char path[FOLDER + 64], line[256];
    long long number[2];
    int32_t found = 0;
    const size_t length = strlen(name);
    snprintf(path, sizeof path, "%s/%s", folder, file);
    FILE *stream = fopen(path, "r");
    while (stream && found < 1 && fgets(line, sizeof line, stream))
        if (strncmp(line, name, length) == 0)
            found = sscanf(line + length, "%lld %lld", &number[0], &number[1]);
    if (stream) fclose(stream);
    for (int32_t i = 0; i < found; i++) out[i] = number[i];
    return found;
}

/* One number, or `missing`. */
static int64_t read_number(const char *folder, const char *file, const char *name, int64_t missing)
{
    int64_t number[2];
    return read_numbers(number, folder, file, name) > 0 ? number[0] : missing;
}

/* ---------------------------------------------------------------- one group */

static int64_t look_at_memory(const char *folder, int32_t second)
{
    int64_t most = read_number(folder, second ? "memory.max" : "memory.limit_in_bytes", "",
                               INT64_MAX);
    /* above memory.high a group is slowed down until it hardly runs */
    if (second) most = esa_min64(most, read_number(folder, "memory.high", "", INT64_MAX));
    const int64_t used = read_number(folder, second ? "memory.current" : "memory.usage_in_bytes",
                                     "", INT64_MAX);
    if (most == INT64_MAX || used == INT64_MAX) return INT64_MAX;
    /* version 1 counts the groups below in numbers of their own */
    int64_t idle = read_number(folder, "memory.stat", "total_inactive_file ", -1);
    int64_t busy = read_number(folder, "memory.stat", "total_active_file ", -1);
    if (idle < 0) idle = read_number(folder, "memory.stat", "inactive_file ", 0);
    if (busy < 0) busy = read_number(folder, "memory.stat", "active_file ", 0);
    const int64_t really = used - esa_min64(idle + busy / 2, used);
    return most > really ? most - really : 0;
}

static int64_t look_at_cpus(const char *folder, int32_t second)
{
    int64_t number[2] = { 0, 0 };
    if (second) {
        if (read_numbers(number, folder, "cpu.max", "") < 2) return INT64_MAX;
    } else {
        number[0] = read_number(folder, "cpu.cfs_quota_us", "", -1); /* -1: none */
        number[1] = read_number(folder, "cpu.cfs_period_us", "", 0);
    }
    if (number[0] < 1 || number[1] < 1 || number[0] > INT64_MAX / 1000) return INT64_MAX;
    return esa_max64(1, number[0] * 1000 / number[1]);
}

/* ---------------------------------------------------------------- all groups of the process */

/* The least over the group's folder and all above it. In a container the folder of the group is
 * often not there; then that of the top is the container's own. */
static int64_t look_above(const char *top, const char *group, int32_t second, look_fn look)
{
    char folder[FOLDER];
    int64_t least = look(top, second);
    const int n = snprintf(folder, sizeof folder, "%s%s", top, group);
    if (n < 0 || n >= (int)sizeof folder) return least;
    for (size_t end = strlen(folder); end > strlen(top); folder[end] = 0) {
        least = esa_min64(least, look(folder, second));
        while (end > strlen(top) && folder[--end] != '/') continue;
    }
    return least;
}

/* 1 if a list "a,b,c" holds the name. */
static int32_t lists(const char *list, const char *name)
{
    const size_t length = strlen(name);
    for (;; list++) {
        const size_t n = strcspn(list, ",");
        if (n == length && strncmp(list, name, n) == 0) return 1;
        list += n;
        if (!*list) return 0;
    }
}

/* Looks at all groups that have this controller. A tree of version 1 is mounted under the name of
 * the controller or of the whole list, that of version 2 at the top or, beside version 1, in
 * "unified". */
static int64_t look_at_groups(const char *root, const char *controller, look_fn look)
{
    char line[GROUP + 200], path[300], top[600];
    int64_t least = INT64_MAX;
    snprintf(path, sizeof path, "%.250s/proc/self/cgroup", root);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) { /* number:controllers:group */
        line[strcspn(line, "\n")] = 0;
        char *names = strchr(line, ':'), *group = names ? strchr(names + 1, ':') : NULL;
        if (!group) continue;
        *names++ = *group++ = 0;
        const int32_t second = !*names; /* version 2 names no controllers */
        if (!second && !lists(names, controller)) continue;
        const char *const mount[2] = { second ? "" : controller, second ? "unified" : names };
        for (int32_t i = 0; i < 2; i++) {
            snprintf(top, sizeof top, "%.250s/sys/fs/cgroup%s%.250s", root, *mount[i] ? "/" : "",
                     mount[i]);
            least = esa_min64(least, look_above(top, group, second, look));
        }
    }
    if (file) fclose(file);
    return least;
}

int64_t esa_host_available(const char *root)
{
    char folder[300];
    snprintf(folder, sizeof folder, "%.250s/proc", root);
    const int64_t kilobytes = read_number(folder, "meminfo", "MemAvailable:", INT64_MAX);
    const int64_t machine = kilobytes == INT64_MAX ? INT64_MAX : kilobytes * 1024;
    return esa_min64(machine, look_at_groups(root, "memory", look_at_memory));
}

int64_t esa_host_quota(const char *root) { return look_at_groups(root, "cpu", look_at_cpus); }
