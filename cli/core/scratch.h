/* scratch.h - folders of unfinished work: one run at a time works in them, and nobody else's files
 * are removed from them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A command lists the names that it writes. Everything else in the folder is foreign: it is refused
 * by name before the work begins, and it is never removed. Links inside the folder are foreign,
 * too; the folder itself may be a link. */
#ifndef ESA_CLI_SCRATCH_H
#define ESA_CLI_SCRATCH_H

/* What a command writes in its folder. Names are patterns for paths below the folder: # stands for
 * digits, * for a part of a name, and a / at the end for a folder. A file that is being written has
 * a temporary ending behind its name (cli_write_file, esa_outfile), which need not be listed. */
typedef struct cli_own {
    /* The file that is written first and removed last: JSON with this "format". Without it no file
     * of the folder is the command's own. NULL: there is none. */
    const char *marker, *format;
    const char *const *names; /* the rest, NULL at the end */
} cli_own;

/* CLI_FAILED after a message if folder holds foreign entries. A missing folder passes. what names
 * the command. */
int cli_scratch_check(const char *folder, const cli_own *own, const char *what);
/* Makes the folder and its parents, locks it against other runs with a file of the name "lock",
 * checks it, and removes what killed runs were writing. *lock receives a descriptor. The lock ends
 * with the process, however it ends. CLI_FAILED after a message: then nothing has changed in a
 * folder that was there, but an empty lock that a killed run left is gone. */
int cli_scratch_open(int *lock, const char *folder, const cli_own *own, const char *what);
/* Removes the command's own files and folders, but not the lock; the caller holds it, or no run can
 * be working there. cli_scratch_check has passed before: a file with a name of the command's is its
 * own, whether the marker is there or not. */
void cli_scratch_clear(const char *folder, const cli_own *own);
/* Releases the lock, and removes the folder if nothing else is in it. *lock becomes -1; if it is -1
 * already, only the folder is looked at. 1 if the folder is gone. */
int cli_scratch_close(int *lock, const char *folder);
/* Both, when the work is done. A note says so if the folder stays. */
void cli_scratch_remove(int *lock, const char *folder, const cli_own *own);

#endif
