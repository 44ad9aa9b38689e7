/* files.h - whole files in and out. Every text file the command writes goes through cli_write_file,
 * and what it reads itself through cli_open_file.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CLI_FILES_H
#define ESA_CLI_FILES_H

#include <stddef.h>

/* errno of a path that is neither a file nor a folder: a pipe, a device. No errno is negative. */
#define CLI_NOT_A_FILE (-1)

/* Opens a file to read and returns its descriptor, or -1 with errno (EISDIR for a folder). A pipe
 * and a device are refused without waiting for them. */
int cli_open_file(const char *path);
/* 1 if there is nothing at path. 0 also if that cannot be told: opening it then says why. */
int cli_is_missing(const char *path);
/* A whole file in memory, followed by a zero; the caller frees it. NULL and errno after a failure
 * (of cli_open_file too), EFBIG for more than 1 GiB. */
char *cli_read_file(const char *path, size_t *bytes);
/* The same, also for a pipe (`<(...)`, /dev/stdin) and a terminal; EFBIG for more than most bytes.
 */
char *cli_read_stream(const char *path, size_t *bytes, size_t most);
/* What an errno of these functions means. */
const char *cli_error_text(int error);

/* Writes to a temporary name beside path and renames: readers see the old file or the new one
 * (esa_file_write in esa_tensors.h). Standard output, also by its file's name, is printed to.
 * CLI_FAILED after a message; then a regular file is as it was before. */
int cli_write_file(const char *path, const char *text, size_t bytes);
/* Renames a file and makes that durable. CLI_FAILED after a message that begins with what. */
int cli_move_file(const char *from, const char *to, const char *what);
/* The file that a write to path replaces, its links followed, in end; *in_place = 1 for a pipe, a
 * device or an open file. CLI_FAILED after a message that begins with what. */
int cli_target(char *end, size_t size, int *in_place, const char *path, const char *what);

#endif
