/* model_find.c - finds a model's folder: $ESA_MODELS, beside the command, the local cache of the
 * hub.
 * SPDX-License-Identifier: Apache-2.0 */
#define _XOPEN_SOURCE 700
#include "clip/video.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct named {
    const char *name, *hub; /* hub NULL: comes with esa */
} named;
static const named models[] = {
    { "wan-tiny", NULL },
    { "wan-t2v-1.3b", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers" },
    { "wan-t2v-14b", "Wan-AI/Wan2.1-T2V-14B-Diffusers" },
    { "wan-i2v-14b", "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers" },
    { "wan2.2-t2v-a14b", "Wan-AI/Wan2.2-T2V-A14B-Diffusers" },
    { "cogvideox-2b", "THUDM/CogVideoX-2b" },
    { "cogvideox-5b", "THUDM/CogVideoX-5b" },
    { "hunyuan-video", "hunyuanvideo-community/HunyuanVideo" },
};
#define MODELS ((int)(sizeof models / sizeof models[0]))

static int is_model(const char *folder)
{
    char path[4400];
    struct stat about;
    return snprintf(path, sizeof path, "%s/model_index.json", folder) < (int)sizeof path &&
           stat(path, &about) == 0;
}

int cli_own_folder(char *out, size_t size)
{
    const ssize_t n = readlink("/proc/self/exe", out, size - 1);
    if (n <= 0) return 0;
    out[n] = 0;
    char *slash = strrchr(out, '/');
    if (slash) *slash = 0;
    return slash != NULL;
}

/* models--ORG--NAME/snapshots/<what refs/main says> under the hub's cache. */
static int in_hub(char *folder, size_t size, const char *hub)
{
    char root[2048], name[256], path[2600], revision[80] = "";
    const char *cache = getenv("HF_HUB_CACHE"), *home = getenv("HF_HOME"), *user = getenv("HOME");
    if (cache && *cache)
        snprintf(root, sizeof root, "%s", cache);
    else if (home && *home)
        snprintf(root, sizeof root, "%s/hub", home);
    else
        snprintf(root, sizeof root, "%s/.cache/huggingface/hub", user ? user : "");
    const char *slash = strchr(hub, '/');
    snprintf(name, sizeof name, "models--%.*s--%s", (int)(slash - hub), hub, slash + 1);
    snprintf(path, sizeof path, "%s/%s/refs/main", root, name);
    const int fd = cli_open_file(path);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "r");
    if (!file) return 0;
    const int read = fscanf(file, "%79[0-9a-zA-Z]", revision);
    fclose(file);
    if (read != 1) return 0;
    return snprintf(folder, size, "%s/%s/snapshots/%s", root, name, revision) < (int)size &&
           is_model(folder);
}

static int find_named(char *folder, size_t size, const named *m, const char *what)
{
    const char *root = getenv("ESA_MODELS");
    if (root && *root && snprintf(folder, size, "%s/%s", root, m->name) < (int)size &&
        is_model(folder))
        return CLI_OK;
    if (!m->hub) {
        static const char *const places[] = { "../models", "../share/esa/models",
                                              "models" }; /* build folder, installation, bundle */
        char own[2048];
        if (cli_own_folder(own, sizeof own))
            for (int i = 0; i < 3; i++)
                if (snprintf(folder, size, "%s/%s/%s", own, places[i], m->name) < (int)size &&
                    is_model(folder))
                    return CLI_OK;
        return cli_fail("%s: the model %s was neither found beside this command (../models, "
                        "../share/esa/models) nor under $ESA_MODELS%s%s",
                        what, m->name, root ? ", which is " : "",
                        root ? root : ", which is not set");
    }
    if (in_hub(folder, size, m->hub)) return CLI_OK;
    return cli_fail("%s: the model %s was found neither under $ESA_MODELS (%s) nor in the hub's "
                    "cache; `hf download %s` puts it there",
                    what, m->name, root && *root ? root : "not set", m->hub);
}

int cli_model_find(char *folder, size_t size, const char *model, const char *what)
{
    const char *names[MODELS];
    if (!model) return find_named(folder, size, &models[0], what);
    for (int i = 0; i < MODELS; i++) {
        names[i] = models[i].name;
        if (strcmp(model, models[i].name) != 0) continue;
        return find_named(folder, size, &models[i], what);
    }
    struct stat about;
    if (stat(model, &about) == 0) {
        if (!S_ISDIR(about.st_mode))
            return cli_fail("%s: '%s' is a file, --model takes a folder or a name", what, model);
        if (snprintf(folder, size, "%s", model) >= (int)size)
            return cli_fail("%s: the name of the model's folder is too long", what);
        return CLI_OK;
    }
    const char *near = strchr(model, '/') ? NULL : cli_nearest(model, names, MODELS);
    if (near) return cli_fail("%s: there is no model '%s', did you mean %s?", what, model, near);
    return cli_fail(
        "%s: there is no model folder '%s', and the names are wan-tiny, wan-t2v-1.3b, "
        "wan-t2v-14b, wan-i2v-14b, wan2.2-t2v-a14b, cogvideox-2b, cogvideox-5b and hunyuan-video",
        what, model);
}
