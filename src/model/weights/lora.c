/* lora.c - reads the names of LoRA files and finds the tensors that they change.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/weights/lora.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/number.h"
#include "model/config/json_file.h"
#include "model/weights/weights_internal.h"

/* What a tensor of a LoRA file is. */
enum { DOWN, UP, ALPHA, WHOLE, BIAS, NONE };

static const struct {
    const char *end;
    int32_t kind;
} ends[] = {
    { ".lora_A.weight", DOWN },
    { ".lora_B.weight", UP },
    { ".lora_A.default.weight", DOWN },
    { ".lora_B.default.weight", UP },
    { ".lora_down.weight", DOWN },
    { ".lora_up.weight", UP },
    { ".lora.down.weight", DOWN },
    { ".lora.up.weight", UP },
    { ".alpha", ALPHA },
    { ".diff", WHOLE },
    { ".diff_b", BIAS },
    { ".lora_B.bias", BIAS },
};
static const char *const prefixes[] = {
    "model.diffusion_model.", "diffusion_model.", "base_model.model.",
    "transformer.",           "lora_unet_",       ""
};

typedef struct matcher {
    esa_weights *w;
    /* of the file at hand */
    esa_tensors *file;
    esa_delta **slot; /* [wanted] its change of each wanted tensor; NULL: none */
    double scale;
    esa_json_file about;         /* settings of PEFT; root NULL: none */
    char first[3][320];          /* names that do not fit: unknown, shapes, incomplete */
    int64_t found[3], rank_most; /* their numbers; the largest rank */
} matcher;

/* Splits a name; *module is its middle. */
static int32_t kind_of(const char *name, const char **module, size_t *length)
{
    const size_t all = strlen(name);
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        const size_t n = strlen(ends[i].end);
        if (all <= n || strcmp(name + all - n, ends[i].end) != 0) continue;
        size_t p = 0;
        while (strncmp(name, prefixes[p], strlen(prefixes[p])) != 0) p++;
        const size_t skip = strlen(prefixes[p]);
        if (all - n <= skip) return NONE;
        *module = name + skip;
        *length = all - n - skip;
        return ends[i].kind;
    }
    return NONE;
}

static void flat_key(char *key, size_t size, const char *name, size_t length, int32_t bias)
{
    snprintf(key, size, "%.*s%s", (int)length, name, bias ? "#" : "");
    for (char *c = key; *c; c++)
        if (*c == '.') *c = '_';
}

/* A module with a wanted tensor, called by the name with underscores for dots, without ".weight" or
 * ".bias"; behind it is '#' for a bias. */
static void add_place(esa_loras *l, esa_wanted *e, const char *name, const char *runs)
{
    size_t length = strlen(name);
    const int32_t bias = length > 5 && strcmp(name + length - 5, ".bias") == 0;
    if (bias)
        length -= 5;
    else if (length > 7 && strcmp(name + length - 7, ".weight") == 0)
        length -= 7;
    char *key = l->key[l->places];
    flat_key(key, sizeof *l->key, name, length, bias);
    for (int64_t i = l->places - 1; i >= 0 && l->place[i].e == e; i--)
        if (strcmp(l->key[i], key) == 0) return; /* two layouts have the same name for it */
    l->place[l->places++] = (esa_place){ .name = key, .e = e, .runs = runs };
}

static esa_status make_places(matcher *m)
{
    esa_weights *w = m->w;
    esa_loras *l = &w->loras;
    const esa_allocator *mem = &w->ctx->mem;
    l->wanted = w->count;
    l->room = w->count;
    for (const esa_naming *n = w->naming; n; n = n->next) l->room += w->count;
    l->delta = esa_mem_zalloc(mem, l->count * l->wanted * (int64_t)sizeof *l->delta);
    l->place = esa_mem_alloc(mem, l->room * (int64_t)sizeof *l->place);
    l->key = esa_mem_alloc(mem, l->room * (int64_t)sizeof *l->key);
    m->slot = esa_mem_zalloc(mem, w->count * (int64_t)sizeof *m->slot);
    if (!l->delta || !l->place || !l->key || !m->slot)
        return esa_fail(w->ctx, ESA_ERR_MEMORY, "out of memory for the names of LoRAs");
    for (int64_t i = 0; i < w->count; i++) {
        char theirs[192];
        const char *runs;
        add_place(l, &w->want[i], w->want[i].name, "");
        for (const esa_naming *n = w->naming; n; n = n->next)
            if (esa_naming_apply(theirs, sizeof theirs, n, w->want[i].name, &runs))
                add_place(l, &w->want[i], theirs, runs);
    }
    esa_places_sort(l->place, l->places);
    return ESA_OK;
}

/* Notes a name that does not fit. */
static void misfit(matcher *m, int32_t why, const char *name, const char *detail)
{
    char *text = m->first[why], entry[200];
    const size_t used = strlen(text);
    if (m->found[why]++ >= 3) return;
    const int n = snprintf(entry, sizeof entry, "%s%s%s%s", used ? ", " : "", esa_quote(name).text,
                           *detail ? " " : "", detail);
    if (n > 0 && used + (size_t)n < sizeof m->first[why]) memcpy(text + used, entry, (size_t)n + 1);
}

static int32_t is_float(const esa_st_entry *e)
{
    return e->dtype == ESA_FILE_F32 || e->dtype == ESA_FILE_F16 || e->dtype == ESA_FILE_BF16;
}

static int64_t elements(const esa_st_entry *e, int32_t from)
{
    int64_t n = 1;
    for (int32_t i = from; i < e->rank; i++) n = esa_size_mul(n, e->dim[i]);
    return n;
}

/* One tensor of the file, to the change of a wanted tensor. */
static void give(matcher *m, const esa_place *p, const esa_st_entry *entry, int32_t kind)
{
    esa_loras *l = &m->w->loras;
    esa_delta **slot = &m->slot[p->e - m->w->want], *d = *slot;
    if (!d) {
        d = *slot = &l->delta[l->deltas++];
        *d = (esa_delta){ .file = m->file, .place = p };
    }
    const esa_st_entry **const part = kind == UP ? &d->up : kind == ALPHA ? &d->alpha : &d->down;
    if (*part || d->place != p)
        misfit(m, 2, entry->name, "(twice)");
    else
        *part = entry;
    d->whole |= kind == WHOLE || kind == BIAS;
}

/* One tensor of the file, to the changes that it belongs to. */
static void take(matcher *m, const esa_st_entry *entry)
{
    esa_loras *l = &m->w->loras;
    const char *module = NULL;
    size_t length = 0;
    char key[sizeof *l->key];
    const int32_t kind = kind_of(entry->name, &module, &length);
    if (kind != NONE && length < sizeof key - 2) {
        flat_key(key, sizeof key, module, length, kind == BIAS);
        esa_place *p = esa_places_find(l->place, l->places, key);
        for (esa_place *one = p; one; one = esa_places_next(l->place, l->places, one))
            give(m, one, entry, kind);
        if (p) return;
    }
    misfit(m, 0, entry->name, "");
}

/* 1 if the shapes of a change are those of its tensor, or of the one that holds it. up may have
 * sides of 1 behind its two. */
static int32_t fits(const esa_wanted *e, const esa_delta *d)
{
    const esa_share *s = &d->place->share;
    const int64_t side = s->runs   ? s->side
                         : e->rank ? e->dim[0]
                                   : 1,
                  cols = esa_wanted_count(e) / (e->rank ? e->dim[0] : 1);
    if (!is_float(d->down) || (d->up && !is_float(d->up))) return 0;
    if (!d->up) return elements(d->down, 0) == esa_size_mul(side, cols);
    return e->rank > 1 && d->down->rank >= 2 && d->up->rank >= 2 && d->down->dim[0] > 0 &&
           elements(d->down, 1) == cols && d->up->dim[0] == side &&
           elements(d->up, 1) == d->down->dim[0];
}

/* alpha of a module in PEFT's settings, which diffusers stores in the file; NaN: none. */
static double alpha_of(const matcher *m, const char *name)
{
    if (!m->about.root) return (double)NAN;
    const char *key;
    json_t *value, *one = json_object_get(m->about.root, "transformer.lora_alpha");
    const size_t end = strlen(name) - strlen(".weight");
    json_object_foreach(json_object_get(m->about.root, "transformer.alpha_pattern"), key, value)
    {
        const size_t n = strlen(key);
        if (n <= end && strncmp(name + end - n, key, n) == 0 &&
            (n == end || name[end - n - 1] == '.'))
            one = value;
    }
    return json_is_number(one) ? json_number_value(one) : (double)NAN;
}

/* Checks the change of a wanted tensor and puts it behind those of the files before. */
static void settle(matcher *m, esa_wanted *e, esa_delta *d)
{
    const esa_loras *l = &m->w->loras;
    const char *name = d->down ? d->down->name : d->up ? d->up->name : d->alpha->name;
    const int32_t half = !d->down || (d->whole ? d->up || d->alpha : !d->up);
    if (half || !fits(e, d) || (d->alpha && (!is_float(d->alpha) || elements(d->alpha, 0) != 1))) {
        /* told for the first of the tensors that lie in it */
        if (esa_places_find(l->place, l->places, d->place->name) == d->place)
            misfit(m, half ? 2 : 1, name, "");
        return;
    }
    double factor = m->scale;
    if (d->up) {
        const double given = d->alpha ? (double)esa_load_f32(esa_st_data(d->file, d->alpha), 0,
                                                             d->alpha->dtype)
                                      : alpha_of(m, e->name);
        if (isfinite(given)) factor *= given / (double)d->down->dim[0];
        if (d->down->dim[0] > m->rank_most) m->rank_most = d->down->dim[0];
    }
    d->factor = (float)factor;
    esa_delta **at = &e->delta;
    while (*at) at = &(*at)->next;
    *at = d;
}

static esa_status refuse(const matcher *m)
{
    static const char *const says[3] = { "of tensors that the model does not have",
                                         "with the wrong shape or type",
                                         "without their other half" };
    char text[900] = "";
    size_t at = 0;
    for (int32_t k = 0; k < 3; k++)
        if (m->found[k] && at < sizeof text)
            at += (size_t)snprintf(text + at, sizeof text - at, "%s%lld %s (%s%s)", at ? "; " : "",
                                   (long long)m->found[k], says[k], m->first[k],
                                   m->found[k] > 3 ? ", ..." : "");
    return esa_fail(m->w->ctx, ESA_ERR_MISMATCH, "the LoRA %.200s does not fit the %s: %s",
                    m->file->label, m->w->part, text);
}

static esa_status match_file(matcher *m, int64_t *changes)
{
    esa_weights *w = m->w;
    memset(m->slot, 0, (size_t)w->count * sizeof *m->slot);
    memset(m->first, 0, sizeof m->first);
    memset(m->found, 0, sizeof m->found);
    m->rank_most = 0;
    const int64_t before = w->loras.deltas;
    if (m->about.root && json_is_true(json_object_get(m->about.root, "transformer.use_rslora")))
        return esa_fail(w->ctx, ESA_ERR_UNSUPPORTED,
                        "the LoRA %.200s uses rslora, which the engine "
                        "does not",
                        m->file->label);
    for (int64_t i = 0; i < m->file->count; i++) take(m, &m->file->entry[i]);
    for (int64_t i = 0; i < w->count; i++)
        if (m->slot[i]) settle(m, &w->want[i], m->slot[i]);
    *changes = w->loras.deltas - before;
    if (m->found[0] || m->found[1] || m->found[2]) return refuse(m);
    if (*changes) return ESA_OK;
    return esa_fail(w->ctx, ESA_ERR_MISMATCH, "the LoRA %.200s changes nothing", m->file->label);
}

static esa_status match_all(matcher *m, void (*report)(void *user, const char *line), void *user)
{
    esa_loras *l = &m->w->loras;
    ESA_TRY(make_places(m));
    for (int32_t i = 0; i < l->count; i++) {
        char line[400];
        int64_t changes = 0;
        m->file = l->file[i];
        m->scale = l->list[i].scale;
        m->about = (esa_json_file){ 0 };
        const char *about = esa_st_metadata(m->file, "lora_adapter_metadata");
        esa_status status = about ? esa_json_file_parse(m->w->ctx, &m->about, about,
                                                        (int64_t)strlen(about), m->file->label)
                                  : ESA_OK;
        if (!status) status = match_file(m, &changes);
        esa_json_file_close(&m->about);
        if (status) return status;
        esa_text_format(line, sizeof line,
                        "%s: LoRA %.200s changes %lld tensors, rank %lld, scale %g", m->w->part,
                        m->file->label, (long long)changes, (long long)m->rank_most, m->scale);
        if (report) report(user, line);
    }
    return ESA_OK;
}

static void free_places(esa_weights *w)
{
    esa_loras *l = &w->loras;
    const esa_allocator *mem = &w->ctx->mem;
    esa_mem_free(mem, l->delta, l->count * l->wanted * (int64_t)sizeof *l->delta);
    esa_mem_free(mem, l->place, l->room * (int64_t)sizeof *l->place);
    esa_mem_free(mem, l->key, l->room * (int64_t)sizeof *l->key);
    l->delta = NULL;
    l->place = NULL;
    l->key = NULL;
    l->deltas = l->places = 0;
    for (int64_t i = 0; i < w->count; i++) w->want[i].delta = NULL;
}

esa_status esa_lora_match(esa_weights *w, void (*report)(void *user, const char *line), void *user)
{
    matcher m = { .w = w };
    if (!w->loras.count) return ESA_OK;
    free_places(w);
    const esa_status status = match_all(&m, report, user);
    esa_mem_free(&w->ctx->mem, m.slot, w->count * (int64_t)sizeof *m.slot);
    return status;
}

void esa_lora_close(esa_weights *w)
{
    esa_loras *l = &w->loras;
    free_places(w);
    for (int32_t i = 0; i < l->count; i++) esa_st_close(l->file[i]);
    *l = (esa_loras){ 0 };
}

esa_status esa_weights_lora(esa_weights *w, const esa_lora *list, int32_t count)
{
    esa_loras *l = &w->loras;
    if (!count) return ESA_OK;
    if (count < 0 || count > ESA_LORA_MOST || !list)
        return esa_fail(w->ctx, ESA_ERR_ARGUMENT, "%d LoRAs were given, expected up to %d", count,
                        ESA_LORA_MOST);
    l->list = list;
    for (int32_t i = 0; i < count; i++) {
        if (!list[i].file || !isfinite(list[i].scale))
            return esa_fail(w->ctx, ESA_ERR_ARGUMENT,
                            "LoRA %d has no file, or a scale that is not finite", i);
        ESA_TRY(esa_st_open(w->ctx, &l->file[i], list[i].file));
        l->count++;
    }
    return ESA_OK;
}
