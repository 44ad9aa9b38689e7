/* outpath.h - where an output goes: links, the mode and owner of the file it replaces, and the
 * folder that has to be synced.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_IO_OUTPATH_H
#define ESA_IO_OUTPATH_H

#include <limits.h>
#include "base/engine.h"
#include "ctx/ctx.h"

#ifndef PATH_MAX
#define PATH_MAX 4096
#endif

/* Follows the links at path and writes the result to end; path itself if it is not a link. The last
 * link may lead to a name that does not exist yet. *open_file = 1 if a link in /proc (also
 * /dev/stdout, /dev/fd/3) leads to an open file, which a rename cannot replace; end is then path.
 *
 * ESA_ERR_IO if a link is in a sticky folder where everybody may write and belongs neither to this
 * user nor to the folder's owner: the rule of Linux' fs.protected_symlinks, also where that is off.
 */
esa_status esa_outpath_follow(esa_ctx *ctx, char end[PATH_MAX], int32_t *open_file,
                              const char *path);

/* Creates the new file temp, which will replace end; returns its descriptor, or -1 with errno. */
int esa_outpath_create(const char *temp, const char *end);

/* Renames from, a file or a folder, to `to` and syncs the folder. A file that replaces another gets
 * the owner, the group, the permissions and the POSIX ACL of that one. An owner that this process
 * may not give stays this user; for a group that it may not give, the group gets only what
 * everybody has. Returns 0 or an errno. */
int esa_outpath_move(const char *from, const char *to);

/* Syncs the folder that holds path, which makes a rename to path durable. Some file systems cannot;
 * the data is safe without it. */
ESA_ENGINE void esa_outpath_sync(const char *path);

#endif
