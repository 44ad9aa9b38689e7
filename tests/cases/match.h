/* match.h - which cases of a list are meant.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_CASES_MATCH_H
#define ESA_TESTS_CASES_MATCH_H

#include <fnmatch.h>
#include <string.h>

/* 1 if the name matches one of the shell patterns in `globs`, which commas separate. * also matches
 * slashes. */
static inline int case_matches(const char *name, const char *globs)
{
    while (*globs) {
        char glob[160];
        const size_t length = strcspn(globs, ",");
        if (length < sizeof glob) {
            memcpy(glob, globs, length);
            glob[length] = 0;
            if (!fnmatch(glob, name, 0)) return 1;
        }
        globs += length + (globs[length] == ',');
    }
    return 0;
}

#endif
