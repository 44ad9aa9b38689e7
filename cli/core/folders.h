/* folders.h - folders for results: made with their parents, and removed if the work fails.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CLI_FOLDERS_H
#define ESA_CLI_FOLDERS_H

#include <stddef.h>

/* Makes folder and its parents if they are missing. *kept (may be NULL) receives the length of the
 * part of folder that existed before. what names the command in messages. On failure, removes what
 * it made. */
int cli_make_folders(const char *folder, size_t *kept, const char *what);
/* The same for the folder of path, which must also take files. */
int cli_make_folder_of(const char *path, size_t *kept, const char *what);
/* Removes empty folders from folder upward, down to its first `kept` bytes. */
void cli_unmake_folders(const char *folder, size_t kept);
/* Checks, before any work, that a file can be created at path: makes one beside it and removes it.
 * CLI_FAILED after a message: the folder is missing, not a folder, or takes no files. */
int cli_folder_ready(const char *path, const char *what);
/* The same for a file that is created or replaced at the end; NULL passes. An existing path may be
 * a pipe or a device; a folder is refused. Options of type CLI_OUTPUT are checked this way. */
int cli_file_ready(const char *path, const char *what);
/* Copies the folder of path into out; "." if path names none. */
void cli_folder_of(char *out, size_t size, const char *path);

#endif
