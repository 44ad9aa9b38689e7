/* model_weights.c - a hash of a model's weights, from a small part of their bytes.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A continued run must not mix two states of a model. File times cannot tell: a copy on another
 * machine has new times and the same weights, and `cp -p` keeps times over other weights. Reading
 * all of 30 GB takes too long. So the hash covers names, sizes, all bytes of files up to SMALL, and
 * PIECE bytes out of every STRIDE of larger ones (more sparsely above STRIDES pieces). Training,
 * merging an adapter or converting changes nearly every byte of a tensor, and tensors are larger
 * than a stride. A few changed numbers in a large file can go unnoticed. */
#define _XOPEN_SOURCE 700 /* pread */
#include "clip/video.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SMALL   (16 << 20)
#define PIECE   4096
#define STRIDE  (1 << 20)
#define STRIDES 4096
#define BASIS   UINT64_C(0xcbf29ce484222325) /* of FNV-1a */

static uint64_t mix(uint64_t hash, const void *data, size_t bytes) /* FNV-1a */
{
    const unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ p[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* 0, or an errno (cli_error_text). */
static int mix_file(uint64_t *hash, const char *path)
{
    struct stat about;
    unsigned char piece[PIECE];
    const int fd = cli_open_file(path);
    if (fd < 0) return errno;
    int error = fstat(fd, &about) == 0 ? 0 : errno;
    const int64_t size = error ? 0 : (int64_t)about.st_size;
    int64_t stride = size <= SMALL ? PIECE : size / STRIDES;
    if (size > SMALL && stride < STRIDE) stride = STRIDE;
    *hash = mix(*hash, &size, sizeof size);
    for (int64_t at = 0; at < size && !error; at += stride) {
        const ssize_t n = pread(fd, piece, PIECE, (off_t)at);
        if (n < 0)
            error = errno;
        else
            *hash = mix(*hash, piece, (size_t)n);
    }
    close(fd);
    return error;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static int is_weights(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot && (strcmp(dot, ".safetensors") == 0 || strcmp(dot, ".model") == 0);
}

/* The weight files of one folder, by name; 0 or an errno. */
static int mix_folder(uint64_t *hash, const char *folder)
{
    char **names = NULL, path[4600];
    int count = 0, error = 0;
    DIR *list = opendir(folder);
    if (!list) return errno;
    for (struct dirent *d; !error && (d = readdir(list)) != NULL;) {
        if (!is_weights(d->d_name)) continue;
        char **grown = realloc(names, (size_t)(count + 1) * sizeof *names),
             *copy = grown ? malloc(strlen(d->d_name) + 1) : NULL;
        if (grown) names = grown;
        if (copy)
            names[count++] = strcpy(copy, d->d_name);
        else
            error = ENOMEM;
    }
    closedir(list);
    if (count) qsort(names, (size_t)count, sizeof *names, by_name);
    for (int i = 0; i < count; i++) {
        *hash = mix(*hash, names[i], strlen(names[i]) + 1);
        if (!error && snprintf(path, sizeof path, "%s/%s", folder, names[i]) >= (int)sizeof path)
            error = ENAMETOOLONG;
        if (!error) error = mix_file(hash, path);
        free(names[i]);
    }
    free(names);
    return error;
}

static void show(char out[32], uint64_t hash)
{
    snprintf(out, 32, "fnv1a64:%016llx", (unsigned long long)hash);
}

int cli_file_hash(char out[32], const char *path)
{
    uint64_t hash = BASIS;
    const int error = mix_file(&hash, path);
    show(out, hash);
    return error;
}

int cli_model_weights(char out[32], const char *folder, int parts, const char *what)
{
    static const struct {
        int part;
        const char *name;
    } rooms[] = {
        { ESA_PART_TEXT, "text_encoder" },         { ESA_PART_TEXT, "tokenizer" },
        { ESA_PART_TRANSFORMER, "transformer" },   { ESA_PART_VAE, "vae" },
        { ESA_PART_TRANSFORMER, "transformer_2" }, /* Wan 2.2 */
        { ESA_PART_TEXT, "text_encoder_2" },       /* HunyuanVideo */
        { ESA_PART_VAE, "image_encoder" },         /* image to video: read where the VAE is */
    };
    uint64_t hash = BASIS;
    char path[4300];
    for (size_t i = 0; i < sizeof rooms / sizeof rooms[0]; i++) {
        if (!(parts & rooms[i].part)) continue;
        snprintf(path, sizeof path, "%.4200s/%s", folder, rooms[i].name);
        if (access(path, F_OK) != 0) continue;
        hash = mix(hash, rooms[i].name, strlen(rooms[i].name) + 1);
        const int error = mix_folder(&hash, path);
        if (error)
            return cli_fail("%s: the weights in '%s' cannot be read: %s", what, path,
                            cli_error_text(error));
    }
    show(out, hash);
    return CLI_OK;
}
