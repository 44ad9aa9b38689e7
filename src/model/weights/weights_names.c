/* weights_names.c - names of tensors in files of other layouts, and what a file is.
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "model/weights/weights_internal.h"

/* Kinds of types that a report names. */
enum { KINDS = 64 };

static int32_t is_digit(char c) { return c >= '0' && c <= '9'; }

/* Length of what the pattern matches at the beginning of the name, 0 if it does not; *digits and
 * *count say what # stood for. */
static size_t matched(const char *pattern, const char *name, const char **digits, int *count)
{
    const char *at = name;
    *digits = name;
    *count = 0;
    for (; *pattern; pattern++) {
        if (*pattern != '#') {
            if (*at++ != *pattern) return 0;
            continue;
        }
        for (*digits = at; is_digit(*at); at++) (*count)++;
        if (!*count) return 0;
    }
    return *at == 0 || *at == '.' ? (size_t)(at - name) : 0;
}

/* Writes the name in the other naming behind the prefix. 0 if it is too long. */
static int32_t rename_one(char *out, size_t size, const char *prefix, const esa_naming *naming,
                          const char *name, const char **runs)
{
    *runs = "";
    for (int32_t i = 0; naming && i < naming->rules; i++) {
        const char *digits, *theirs = naming->rule[i].theirs;
        int count;
        const size_t used = matched(naming->rule[i].ours, name, &digits, &count);
        if (!used) continue;
        const int before = (int)strcspn(theirs, "#@"), numbered = theirs[before] == '#';
        const char *after = theirs + before + numbered;
        const int rest = (int)strcspn(after, "@");
        *runs = after + rest + (after[rest] == '@');
        return snprintf(out, size, "%s%.*s%.*s%.*s%s", prefix, before, theirs, numbered ? count : 0,
                        digits, rest, after, name + used) < (int)size;
    }
    return snprintf(out, size, "%s%s", prefix, name) < (int)size;
}

int32_t esa_naming_apply(char *out, size_t size, const esa_naming *naming, const char *name,
                         const char **runs)
{
    return rename_one(out, size, "", naming, name, runs);
}

static const esa_st_entry *entry_of(const esa_weights *w, const char *prefix, const char *name)
{
    char full[192];
    const esa_st_entry *entry = NULL;
    snprintf(full, sizeof full, "%s%s", prefix, name);
    for (int32_t s = 0; s < w->shard_count && !entry; s++) entry = esa_st_find(w->shard[s], full);
    return entry;
}

void esa_weights_naming(esa_weights *w, const esa_naming *naming) { w->naming = naming; }

void esa_weights_layout(esa_weights *w)
{
    static const char *const prefixes[] = { "", "model.diffusion_model.", "diffusion_model." };
    w->prefix = "";
    w->theirs = NULL;
    for (const esa_naming *n = w->naming; n && !w->theirs; n = n->next)
        for (size_t i = 0; !w->theirs && i < sizeof prefixes / sizeof *prefixes; i++)
            if (entry_of(w, prefixes[i], n->marker)) {
                w->prefix = prefixes[i];
                w->theirs = n;
            }
}

const esa_st_entry *esa_weights_entry(const esa_weights *w, const char *name)
{
    char file[192];
    const char *runs;
    if (!rename_one(file, sizeof file, w->prefix, w->theirs, name, &runs)) return NULL;
    return entry_of(w, "", file);
}

int32_t esa_weights_side(const esa_weights *w, const char *name, int32_t rank, int32_t i,
                         int32_t otherwise)
{
    const esa_st_entry *e = esa_weights_entry(w, name);
    if (!e || e->rank != rank) return otherwise;
    return (int32_t)esa_max64(1, esa_min64(e->dim[i], 65536));
}

int32_t esa_weights_blocks(const esa_weights *w, const char *first)
{
    char file[192];
    const char *runs;
    int32_t most = 0;
    if (!rename_one(file, sizeof file, w->prefix, w->theirs, first, &runs)) return 0;
    const size_t before = strcspn(file, "0123456789");
    for (int32_t s = 0; s < w->shard_count; s++)
        for (int64_t i = 0; i < w->shard[s]->count; i++) {
            const char *name = w->shard[s]->entry[i].name;
            int number;
            char dot;
            if (strncmp(name, file, before) == 0 &&
                sscanf(name + before, "%4d%c", &number, &dot) == 2 && dot == '.' &&
                number >= most && number < 1024)
                most = number + 1;
        }
    return most;
}

esa_status esa_weights_rename(esa_weights *w)
{
    esa_weights_layout(w);
    for (int64_t i = 0; i < w->count; i++) {
        esa_wanted *e = &w->want[i];
        esa_place *p = &w->place[i];
        *p = (esa_place){ .name = e->file, .e = e };
        if (!rename_one(e->file, sizeof e->file, w->prefix, w->theirs, e->name, &p->runs))
            return esa_fail(w->ctx, ESA_ERR_INTERNAL, "%s: the name of tensor %s is too large",
                            w->part, e->name);
    }
    esa_places_sort(w->place, w->count);
    return ESA_OK;
}

int32_t esa_weights_foreign(const esa_weights *w, const char *name)
{
    return strncmp(name, w->prefix, strlen(w->prefix)) != 0;
}

void esa_weights_about(const esa_weights *w, void (*report)(void *user, const char *line),
                       void *user)
{
    const esa_tensors *f = w->shard[0];
    const char *architecture = f->blocks ? esa_st_metadata(f, "general.architecture") : NULL;
    int64_t count[KINDS] = { 0 };
    char line[640], kinds[240] = "";
    size_t at = 0;
    for (int64_t i = 0; i < f->count; i++) count[f->entry[i].dtype]++;
    for (int32_t k = 0; k < KINDS; k++)
        if (count[k] && at < sizeof kinds)
            at += (size_t)snprintf(kinds + at, sizeof kinds - at, "%s%lld %s", at ? ", " : "",
                                   (long long)count[k], esa_file_dtype_name(k));
    snprintf(line, sizeof line, "%s: %s is %s%s%s%s: %s; names of %s%s%s", w->part, f->label,
             f->blocks ? "GGUF" : "safetensors", architecture ? " (architecture " : "",
             architecture ? esa_quote(architecture).text : "", architecture ? ")" : "",
             at ? kinds : "no tensors", w->theirs ? w->theirs->name : "diffusers",
             *w->prefix ? " behind " : "", w->prefix);
    report(user, line);
}
