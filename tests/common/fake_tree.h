/* fake_tree.h - a made-up /proc and /sys in a folder of their own, for base/host_limits.h.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Define _XOPEN_SOURCE as 700 before the first include: nftw needs it. */
#ifndef ESA_TESTS_COMMON_FAKE_TREE_H
#define ESA_TESTS_COMMON_FAKE_TREE_H

#include <ftw.h>
#include "io/scratch.h"

/* Writes dir/folder/name and makes the folders on the way. folder begins with a slash. */
static inline void fake_put(const scratch *dir, const char *folder, const char *name,
                            const char *text)
{
    char path[700];
    for (const char *at = folder; at; at = strchr(at + 1, '/')) {
        const char *next = strchr(at + 1, '/');
        snprintf(path, sizeof path, "%s%.*s", dir->dir, (int)(next ? next - folder : 400), folder);
        mkdir(path, 0700);
    }
    snprintf(path, sizeof path, "%s%s/%s", dir->dir, folder, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static inline int fake_remove_one(const char *path, const struct stat *info, int kind,
                                  struct FTW *where)
{
    (void)info;
    (void)kind;
    (void)where;
    return remove(path);
}

static inline void fake_remove(const scratch *dir)
{
    nftw(dir->dir, fake_remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

#endif
