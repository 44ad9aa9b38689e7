/* files.h - whole files in and out. Every text file the command writes goes through cli_write_file.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CLI_FILES_H
#define ESA_CLI_FILES_H

#include <stddef.h>

/* A whole file in memory, followed by a zero; the caller frees it. NULL and errno after a failure
 * (EISDIR for a folder). */
char *cli_read_file(const char *path, size_t *bytes);
/* Writes to a temporary name beside path and renames: readers see the old file or the new one.
 * Symbolic links are followed; pipes, devices and files that are open already are written in place.
 * CLI_FAILED after a message; then a regular file is as it was before. */
int cli_write_file(const char *path, const char *text, size_t bytes);

#endif
