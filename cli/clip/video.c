/* video.c - opens libesa_video when a command needs it.
 * SPDX-License-Identifier: Apache-2.0 */
#include "clip/video.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "esa_build.h" /* written by the build: ESA_BUILD_ID */

#ifndef ESA_VIDEO_LIBRARY /* set by the build where it builds the engine: libesa_video.so.N */
#define ESA_VIDEO_LIBRARY ""
#endif
/* where an installation has it, seen from the command's folder, or absolute */
#ifndef ESA_VIDEO_FOLDER
#define ESA_VIDEO_FOLDER "../lib"
#endif
#ifndef ESA_VIDEO_MISSING /* set by the build where it could not */
#define ESA_VIDEO_MISSING                                                                          \
    "it was switched off (ESA_VIDEO=OFF), as in wheels; build esa from its source"
#endif

int cli_video_built(void) { return ESA_VIDEO_LIBRARY[0] != 0; }

int cli_video_mp4(void)
{
#ifdef ESA_VIDEO_FFMPEG
    return 1;
#else
    return 0;
#endif
}

static int symbol(void *function, void *handle, const char *name)
{
    void *address = dlsym(handle, name);
    memcpy(function, &address, sizeof address);
    return address != NULL;
}

/* The engine calls OpenBLAS from its own threads. Those of OpenBLAS would only sleep, and each
 * takes 128 MiB of address space; where that is limited (ulimit -v), loading would never end. */
static void keep_blas_small(void) { setenv("OPENBLAS_NUM_THREADS", "1", 0); }

/* Looks beside the command, as in a build folder, and where an installation puts it. The run path
 * would find it too, but a sanitizer's dlopen ignores it. */
static void *open_library(void)
{
    static const char *const places[] = { "", ESA_VIDEO_FOLDER };
    char own[2048], path[4400];
    const int known = cli_own_folder(own, sizeof own);
    for (int i = 0; i < 2 && known; i++) {
        if (places[i][0] == '/')
            snprintf(path, sizeof path, "%s/%s", places[i], ESA_VIDEO_LIBRARY);
        else
            snprintf(path, sizeof path, "%s/%s/%s", own, places[i], ESA_VIDEO_LIBRARY);
        if (access(path, F_OK) == 0) return dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    return dlopen(ESA_VIDEO_LIBRARY, RTLD_NOW | RTLD_LOCAL);
}

int cli_video_open(cli_video *v, const char *what)
{
    memset(v, 0, sizeof *v);
    if (!ESA_VIDEO_LIBRARY[0])
        return cli_fail("%s: this esa was built without the video engine: %s", what,
                        ESA_VIDEO_MISSING);
    keep_blas_small();
    v->handle = open_library();
    if (!v->handle) return cli_fail("%s: the video engine cannot be opened: %s", what, dlerror());
    int whole = 1;
#define FIND(name) whole &= symbol(&v->name, v->handle, "esa_" #name);
    CLI_VIDEO_CALLS(FIND)
#undef FIND
    const char *video = v->video_build_id ? v->video_build_id() : "unknown";
    const char *libesa = esa_build_id();
    if (whole && !strcmp(video, ESA_BUILD_ID) && !strcmp(libesa, ESA_BUILD_ID)) return CLI_OK;
    cli_video_close(v);
    return cli_fail(
        "%s: libesa_video is build %s, libesa is build %s and this command is build %s: "
        "install them from one build",
        what, video, libesa, ESA_BUILD_ID);
}

/* The library stays mapped: a BLAS with its own threads does not survive unloading. */
void cli_video_close(cli_video *v) { memset(v, 0, sizeof *v); }
