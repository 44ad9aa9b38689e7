/* blas.c - see blas.h.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* dladdr, dlinfo, secure_getenv */
#include "cuda/runtime/blas.h"

#include <dlfcn.h>
#include <glob.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define STEM "libcublasLt.so"
enum { OLDEST = 12 }; /* major version */

typedef struct search {
    blas_library *library;
    int32_t newest;
    char refused[512]; /* the first library that was found but cannot be used, and why */
} search;

/* ---------------------------------------------------------------- one library */

static void refuse(search *s, const char *path, const char *why)
{
    if (!s->refused[0]) snprintf(s->refused, sizeof s->refused, "%.300s %.150s", path, why);
}

/* Finds all functions. Returns the name of the first that is missing, or NULL. */
static const char *find_functions(void *handle, lt_functions *call)
{
#define FUNCTION(name) { "cublasLt" #name, (void **)(void *)&call->name }
    const struct {
        const char *name;
        void **at;
    } wanted[] = {
        FUNCTION(Create),
        FUNCTION(Destroy),
        FUNCTION(GetVersion),
        FUNCTION(GetStatusString),
        FUNCTION(MatmulDescCreate),
        FUNCTION(MatmulDescDestroy),
        FUNCTION(MatmulDescSetAttribute),
        FUNCTION(MatrixLayoutCreate),
        FUNCTION(MatrixLayoutDestroy),
        FUNCTION(MatrixLayoutSetAttribute),
        FUNCTION(MatmulPreferenceCreate),
        FUNCTION(MatmulPreferenceDestroy),
        FUNCTION(MatmulPreferenceSetAttribute),
        FUNCTION(MatmulAlgoGetHeuristic),
        FUNCTION(Matmul),
    };
#undef FUNCTION
    _Static_assert(sizeof wanted / sizeof wanted[0] == sizeof *call / sizeof(void *),
                   "every member of lt_functions is looked up");
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        *wanted[i].at = dlsym(handle, wanted[i].name);
        if (!*wanted[i].at) return wanted[i].name;
    }
    return NULL;
}

/* Tests an open library. 1: it is kept; 0: it was closed. */
static int32_t keep(search *s, void *handle, const char *name)
{
    blas_library *lib = s->library;
    struct link_map *map = NULL;
    char why[200] = "";
    const char *missing = find_functions(handle, &lib->call);
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map && map->l_name[0]) name = map->l_name;
    if (missing) {
        snprintf(why, sizeof why, "has no %s", missing);
    } else {
        lib->version = (int64_t)lib->call.GetVersion();
        if (lib->version < LT_VERSION_LEAST || lib->version / 10000 > s->newest)
            snprintf(why, sizeof why, "is version %lld.%lld, expected 12.0 to %d.x for this driver",
                     (long long)(lib->version / 10000), (long long)(lib->version / 100 % 100),
                     (int)s->newest);
    }
    if (!why[0]) {
        lib->handle = handle;
        snprintf(lib->path, sizeof lib->path, "%s", name);
        return 1;
    }
    refuse(s, name, why);
    dlclose(handle);
    memset(lib, 0, sizeof *lib);
    return 0;
}

/* Opens a file, or a name that the loader looks for. */
static int32_t try_open(search *s, const char *name, int32_t flags)
{
    void *handle = dlopen(name, RTLD_LAZY | RTLD_LOCAL | flags);
    return handle && keep(s, handle, name);
}

/* ---------------------------------------------------------------- places */

/* folder: a pattern of glob. Of several matches the last by name is tried first. */
static int32_t try_folder(search *s, const char *folder)
{
    for (int32_t major = s->newest; major >= OLDEST; major--) {
        char pattern[2048];
        glob_t found;
        int32_t good = 0;
        if ((size_t)snprintf(pattern, sizeof pattern, "%s/" STEM ".%d", folder, (int)major) >=
            sizeof pattern)
            return 0;
        if (glob(pattern, 0, NULL, &found)) continue;
        for (size_t i = found.gl_pathc; i-- > 0 && !good;) good = try_open(s, found.gl_pathv[i], 0);
        globfree(&found);
        if (good) return 1;
    }
    return 0;
}

/* The folders below root, which may be NULL. A relative root is left out: it would mean whatever
 * folder is the current one now. */
static int32_t try_below(search *s, const char *root, const char *const *below, int32_t count)
{
    if (!root || root[0] != '/') return 0;
    for (int32_t i = 0; i < count; i++) {
        char folder[1536];
        if ((size_t)snprintf(folder, sizeof folder, "%s%s", root, below[i]) < sizeof folder &&
            try_folder(s, folder))
            return 1;
    }
    return 0;
}

static int32_t try_names(search *s, int32_t flags)
{
    for (int32_t major = s->newest; major >= OLDEST; major--) {
        char name[64];
        snprintf(name, sizeof name, STEM ".%d", (int)major);
        if (try_open(s, name, flags)) return 1;
    }
    return 0;
}

static int32_t try_toolkit(search *s)
{
    static const char *const below[] = { "/lib64", "/lib", "/targets/x86_64-linux/lib",
                                         "/targets/sbsa-linux/lib" };
    const char *const root[] = { secure_getenv("CUDA_HOME"), secure_getenv("CUDA_PATH"),
                                 "/usr/local/cuda" };
    for (int32_t i = 0; i < 3; i++)
        if (try_below(s, root[i], below, 4)) return 1;
    return 0;
}

static int32_t try_python(search *s)
{
    static const char *const packages[] = { "/nvidia/cu13/lib", "/nvidia/cublas/lib" };
    static const char *const inside[] = { "/lib/python3*/site-packages/nvidia/cu13/lib",
                                          "/lib/python3*/site-packages/nvidia/cublas/lib",
                                          "/lib/python3*/dist-packages/nvidia/cu13/lib",
                                          "/lib/python3*/dist-packages/nvidia/cublas/lib" };
    static const char here = 0; /* its address shows which file this code was loaded from */
    const char *const root[] = { secure_getenv("VIRTUAL_ENV"), secure_getenv("CONDA_PREFIX"),
                                 "/usr/local", "/usr" };
    Dl_info info;
    char own[1024];
    if (dladdr(&here, &info) && info.dli_fname &&
        (size_t)snprintf(own, sizeof own, "%s", info.dli_fname) < sizeof own) {
        char *end = strstr(own, "-packages/"); /* site-packages or dist-packages */
        if (end) {
            end[strlen("-packages")] = 0;
            if (try_below(s, own, packages, 2)) return 1;
        }
    }
    for (int32_t i = 0; i < 4; i++)
        if (try_below(s, root[i], inside, 4)) return 1;
    return 0;
}

/* ---------------------------------------------------------------- the calls */

/* The file or folder of $ESA_CUBLAS_LIB. */
static esa_status open_given(search *s, const char *given, char *error, int32_t error_bytes)
{
    struct stat info;
    if (given[0] != '/') {
        snprintf(error, (size_t)error_bytes,
                 "ESA_CUBLAS_LIB is %.200s, expected an absolute path (one that begins with /)",
                 given);
        return ESA_ERR_DEVICE;
    }
    const int32_t there = stat(given, &info) == 0;
    if (there && S_ISDIR(info.st_mode)) {
        if (try_folder(s, given)) return ESA_OK;
    } else if (there) {
        if (try_open(s, given, 0)) return ESA_OK;
        const char *why = s->refused[0] ? NULL : dlerror();
        if (why) refuse(s, given, why);
    }
    snprintf(error, (size_t)error_bytes, "ESA_CUBLAS_LIB is %.200s, expected " STEM ".%d: %.240s",
             given, (int)s->newest,
             s->refused[0] ? s->refused
             : there       ? "the folder holds no such file"
                           : "there is no such file or folder");
    return ESA_ERR_DEVICE;
}

esa_status blas_open(blas_library *library, int32_t newest, char *error, int32_t error_bytes)
{
    search s = { .library = library, .newest = newest };
    const char *given = secure_getenv("ESA_CUBLAS_LIB");
    memset(library, 0, sizeof *library);
    if (given && *given) return open_given(&s, given, error, error_bytes);
    if (try_names(&s, RTLD_NOLOAD) || try_toolkit(&s) || try_names(&s, 0) || try_python(&s))
        return ESA_OK;
    snprintf(error, (size_t)error_bytes,
             "the engine needs cuBLASLt on a GPU, and " STEM ".%d was not found%s%.200s%s: install "
             "the CUDA toolkit, or run `pip install %s`, or set ESA_CUBLAS_LIB to the file",
             (int)newest, s.refused[0] ? " (" : "", s.refused, s.refused[0] ? ")" : "",
             newest > 12 ? "nvidia-cublas" : "nvidia-cublas-cu12");
    return ESA_ERR_DEVICE;
}

void blas_close(blas_library *library)
{
    if (library->handle) dlclose(library->handle);
    memset(library, 0, sizeof *library);
}
