/* host_memory.c - see host_memory.h.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A control group counts the pages of files that were read as its own. Those that were not used
 * lately are given back when memory is short, so they do not count here. A group is bound by the
 * limits of all groups above it too. */
#include "model/host_memory.h"

#include <stdio.h>
#include <string.h>
#include "base/inline.h"

/* The number after `name` at the start of a line (name "": the first number of the file); INT64_MAX
 * if there is none, or "max". */
static int64_t number_in(const char *path, const char *name)
{
    char line[256];
    long long number;
    int64_t found = INT64_MAX;
    const size_t length = strlen(name);
    FILE *file = fopen(path, "r");
    while (file && found == INT64_MAX && fgets(line, sizeof line, file))
        if (strncmp(line, name, length) == 0 && sscanf(line + length, "%lld", &number) == 1)
            found = number;
    if (file) fclose(file);
    return found;
}

/* What the limit in one folder leaves. */
static int64_t left_in(const char *folder, const char *limit, const char *usage)
{
    char path[1100];
    snprintf(path, sizeof path, "%s/%s", folder, limit);
    const int64_t most = number_in(path, "");
    snprintf(path, sizeof path, "%s/%s", folder, usage);
    const int64_t used = number_in(path, "");
    if (most == INT64_MAX || used == INT64_MAX) return INT64_MAX;
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    const int64_t files = number_in(path, "inactive_file ");
    const int64_t really = used - (files == INT64_MAX ? 0 : esa_min64(files, used));
    return most > really ? most - really : 0;
}

/* The least over the group's folder and all above it. In a container the folder of the group is
 * often not there; then that of the top is the container's own. */
static int64_t left_above(const char *top, const char *group, const char *limit, const char *usage)
{
    char folder[900];
    int64_t least = left_in(top, limit, usage);
    const int n = snprintf(folder, sizeof folder, "%s%s", top, group);
    if (n < 0 || n >= (int)sizeof folder) return least;
    for (size_t end = strlen(folder); end > strlen(top); folder[end] = 0) {
        least = esa_min64(least, left_in(folder, limit, usage));
        while (end > strlen(top) && folder[--end] != '/') continue;
    }
    return least;
}

/* Lines are "number:controllers:group"; version 2 has no controllers. */
static int64_t left_by_groups(const char *root)
{
    char line[700], path[300], top[300];
    int64_t least = INT64_MAX;
    snprintf(path, sizeof path, "%.250s/proc/self/cgroup", root);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        char *names = strchr(line, ':'), *group = names ? strchr(names + 1, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        const int second = names[1] == 0;
        if (!second && !strstr(names, "memory")) continue;
        snprintf(top, sizeof top, "%.250s/sys/fs/cgroup%s", root, second ? "" : "/memory");
        least = esa_min64(least,
                          left_above(top, group, second ? "memory.max" : "memory.limit_in_bytes",
                                     second ? "memory.current" : "memory.usage_in_bytes"));
    }
    if (file) fclose(file);
    return least;
}

int64_t esa_host_available(const char *root)
{
    char path[300];
    snprintf(path, sizeof path, "%.250s/proc/meminfo", root);
    const int64_t kilobytes = number_in(path, "MemAvailable:");
    const int64_t machine = kilobytes == INT64_MAX ? INT64_MAX : kilobytes * 1024;
    return esa_min64(machine, left_by_groups(root));
}
