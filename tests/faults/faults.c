/* faults.c - a library for LD_PRELOAD that lets the n-th allocation or file operation of `esa`
 * fail.
 *
 *     ESA_FAULT="write 3 28 1"   the third write fails with errno 28; later ones work. The last
 *                                number is how many fail in a row; 0: all from there on
 *     ESA_FAULT_COUNTS=file      receives a line `kind calls failed` per kind at exit
 *
 * Only calls from the command and the libraries of this project count, and allocations of jansson
 * and libpng: the loader and the C library have files and memory of their own. So has the CUDA
 * runtime inside the plugin, which dies where memory is missing while it is loaded. Standard input,
 * output and error do not count, so a message still arrives.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#undef _FORTIFY_SOURCE /* it makes some of these functions inline, which clang refuses */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { ALLOC, OPEN, READ, WRITE, SYNC, RENAME, TRUNCATE, CLOSE, MAP, MKDIR, STAT, KINDS };
static const char *const kinds[KINDS] = { "alloc",    "open",  "read", "write", "sync", "rename",
                                          "truncate", "close", "mmap", "mkdir", "stat" };

static struct {
    int kind, error; /* kind -1: nothing fails */
    long at, number;
} fault = { .kind = -1 };
static atomic_long calls[KINDS], failed[KINDS];

static __attribute__((constructor)) void begin(void)
{
    char kind[16] = "";
    const char *text = getenv("ESA_FAULT");
    if (!text) return;
    if (sscanf(text, "%15s %ld %d %ld", kind, &fault.at, &fault.error, &fault.number) == 4)
        for (int i = 0; i < KINDS; i++)
            if (strcmp(kind, kinds[i]) == 0) fault.kind = i;
    if (fault.kind >= 0) return;
    fprintf(stderr, "faults: ESA_FAULT is '%s'\n", text);
    _exit(99);
}

static __attribute__((destructor)) void end(void)
{
    const char *path = getenv("ESA_FAULT_COUNTS");
    fault.kind = -1;
    const int file = path ? creat(path, 0666) : -1;
    if (file < 0) return;
    for (int i = 0; i < KINDS; i++)
        dprintf(file, "%s %ld %ld\n", kinds[i], atomic_load(&calls[i]), atomic_load(&failed[i]));
    close(file);
}

/* Whose code this is: 1 ours, 2 a library that allocates for us, 0 another. The answers for 4096
 * pages are kept, as page * 4 + 2 bits. */
static int whose(const void *from)
{
    static _Atomic uintptr_t known[4096];
    const uintptr_t page = (uintptr_t)from >> 12;
    const uintptr_t seen = atomic_load(&known[page % 4096]);
    if (seen >> 2 == page) return (int)(seen & 3);
    Dl_info info;
    int answer = 0;
    if (dladdr(from, &info) && info.dli_fname) {
        const char *slash = strrchr(info.dli_fname, '/');
        const char *name = slash ? slash + 1 : info.dli_fname;
        if (strcmp(name, "esa") == 0 || strncmp(name, "libesa", 6) == 0) answer = 1;
        if (strncmp(name, "libesa_cuda", 11) == 0) answer = 0;
        if (strncmp(name, "libjansson", 10) == 0 || strncmp(name, "libpng", 6) == 0) answer = 2;
    }
    atomic_store(&known[page % 4096], page << 2 | (uintptr_t)answer);
    return answer;
}

/* Counts a call; 1: it must fail, and errno is set. */
static int fails(int kind, const void *from)
{
    const int owner = whose(from);
    if (owner == 0 || (owner == 2 && kind != ALLOC)) return 0;
    const long n = atomic_fetch_add(&calls[kind], 1) + 1;
    if (kind != fault.kind || n < fault.at) return 0;
    if (fault.number && n >= fault.at + fault.number) return 0;
    atomic_fetch_add(&failed[kind], 1);
    errno = fault.error;
    return 1;
}
#define FAILS(kind)       fails(kind, __builtin_return_address(0))
#define FAILS_FD(f, kind) ((f) > 2 && FAILS(kind))

/* ---------------------------------------------------------------- memory */

/* The allocator under its other names: dlsym allocates, so it cannot be asked for it. */
extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t number, size_t bytes);
extern void *__libc_realloc(void *old, size_t bytes);
extern void *__libc_memalign(size_t align, size_t bytes);

void *malloc(size_t bytes) { return FAILS(ALLOC) ? NULL : __libc_malloc(bytes); }
void *calloc(size_t n, size_t bytes) { return FAILS(ALLOC) ? NULL : __libc_calloc(n, bytes); }
void *realloc(void *old, size_t bytes) { return FAILS(ALLOC) ? NULL : __libc_realloc(old, bytes); }
void *aligned_alloc(size_t align, size_t bytes)
{
    return FAILS(ALLOC) ? NULL : __libc_memalign(align, bytes);
}
int posix_memalign(void **out, size_t align, size_t bytes)
{
    void *p = FAILS(ALLOC) ? NULL : __libc_memalign(align, bytes);
    if (!p) return ENOMEM;
    *out = p;
    return 0;
}

/* A copy of the first bytes of text. */
static char *copy(const char *text, size_t bytes)
{
    char *p = __libc_malloc(bytes + 1);
    if (!p) return NULL;
    memcpy(p, text, bytes);
    p[bytes] = 0;
    return p;
}
char *strdup(const char *text) { return FAILS(ALLOC) ? NULL : copy(text, strlen(text)); }
char *strndup(const char *text, size_t most)
{
    return FAILS(ALLOC) ? NULL : copy(text, strnlen(text, most));
}

/* ---------------------------------------------------------------- files */

/* `next`: the definition of a function behind the one here. */
#define NEXT(type, name, ...)                                                                      \
    static _Atomic(void *) next_##name;                                                            \
    type (*next)(__VA_ARGS__);                                                                     \
    void *const address_##name = find(&next_##name, #name);                                        \
    memcpy(&next, &address_##name, sizeof next)

static void *find(_Atomic(void *) *known, const char *name)
{
    void *address = atomic_load(known);
    if (!address) atomic_store(known, address = dlsym(RTLD_NEXT, name));
    return address;
}

int open(const char *path, int flags, ...)
{
    NEXT(int, open, const char *, int, ...);
    va_list rest;
    va_start(rest, flags);
    const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return FAILS(OPEN) ? -1 : next(path, flags, mode);
}
int openat(int folder, const char *path, int flags, ...)
{
    NEXT(int, openat, int, const char *, int, ...);
    va_list rest;
    va_start(rest, flags);
    const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return FAILS(OPEN) ? -1 : next(folder, path, flags, mode);
}
int __open_2(const char *path, int flags)
{
    NEXT(int, open, const char *, int, ...);
    return FAILS(OPEN) ? -1 : next(path, flags);
}
FILE *fopen(const char *path, const char *mode)
{
    NEXT(FILE *, fopen, const char *, const char *);
    return FAILS(OPEN) ? NULL : next(path, mode);
}
DIR *opendir(const char *path)
{
    NEXT(DIR *, opendir, const char *);
    return FAILS(OPEN) ? NULL : next(path);
}

ssize_t read(int fd, void *out, size_t bytes)
{
    NEXT(ssize_t, read, int, void *, size_t);
    return FAILS_FD(fd, READ) ? -1 : next(fd, out, bytes);
}
ssize_t __read_chk(int fd, void *out, size_t bytes, size_t room)
{
    NEXT(ssize_t, read, int, void *, size_t);
    if (bytes > room) abort();
    return FAILS_FD(fd, READ) ? -1 : next(fd, out, bytes);
}
ssize_t pread(int fd, void *out, size_t bytes, off_t at)
{
    NEXT(ssize_t, pread, int, void *, size_t, off_t);
    return FAILS_FD(fd, READ) ? -1 : next(fd, out, bytes, at);
}
ssize_t write(int fd, const void *data, size_t bytes)
{
    NEXT(ssize_t, write, int, const void *, size_t);
    return FAILS_FD(fd, WRITE) ? -1 : next(fd, data, bytes);
}
ssize_t pwrite(int fd, const void *data, size_t bytes, off_t at)
{
    NEXT(ssize_t, pwrite, int, const void *, size_t, off_t);
    return FAILS_FD(fd, WRITE) ? -1 : next(fd, data, bytes, at);
}
int fsync(int fd)
{
    NEXT(int, fsync, int);
    return FAILS(SYNC) ? -1 : next(fd);
}
int fdatasync(int fd)
{
    NEXT(int, fdatasync, int);
    return FAILS(SYNC) ? -1 : next(fd);
}
int ftruncate(int fd, off_t bytes)
{
    NEXT(int, ftruncate, int, off_t);
    return FAILS(TRUNCATE) ? -1 : next(fd, bytes);
}
int close(int fd) /* as on Linux: the descriptor is gone even if it fails */
{
    NEXT(int, close, int);
    const int bad = FAILS_FD(fd, CLOSE), error = errno, status = next(fd);
    if (bad) errno = error;
    return bad ? -1 : status;
}

int rename(const char *from, const char *to)
{
    NEXT(int, rename, const char *, const char *);
    return FAILS(RENAME) ? -1 : next(from, to);
}
int renameat(int a, const char *from, int b, const char *to)
{
    NEXT(int, renameat, int, const char *, int, const char *);
    return FAILS(RENAME) ? -1 : next(a, from, b, to);
}
int renameat2(int a, const char *from, int b, const char *to, unsigned flags)
{
    NEXT(int, renameat2, int, const char *, int, const char *, unsigned);
    return FAILS(RENAME) ? -1 : next(a, from, b, to, flags);
}
int mkdir(const char *path, mode_t mode)
{
    NEXT(int, mkdir, const char *, mode_t);
    return FAILS(MKDIR) ? -1 : next(path, mode);
}
int stat(const char *path, struct stat *out)
{
    NEXT(int, stat, const char *, struct stat *);
    return FAILS(STAT) ? -1 : next(path, out);
}
int lstat(const char *path, struct stat *out)
{
    NEXT(int, lstat, const char *, struct stat *);
    return FAILS(STAT) ? -1 : next(path, out);
}
int fstat(int fd, struct stat *out)
{
    NEXT(int, fstat, int, struct stat *);
    return FAILS_FD(fd, STAT) ? -1 : next(fd, out);
}
void *mmap(void *at, size_t bytes, int rights, int flags, int fd, off_t from)
{
    NEXT(void *, mmap, void *, size_t, int, int, int, off_t);
    return FAILS(MAP) ? MAP_FAILED : next(at, bytes, rights, flags, fd, from);
}
