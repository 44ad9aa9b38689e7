/* settings.c - what a wish means: its fields as options of `esa generate`, with the same checks.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each field becomes the text of an option and is read from the option table that the command reads
 * (clip_options), so names, ranges and messages are written once. In messages an option has the
 * name of the field. */
#include "serve/fields.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char what[] = "request";

/* clip_options keeps its help texts in static memory. */
static pthread_mutex_t tables = PTHREAD_MUTEX_INITIALIZER;

void serve_settings_free(serve_settings *s)
{
    for (int i = 0; i < s->text_count; i++) free(s->texts[i]);
    memset(s, 0, sizeof *s);
}

void serve_options_drop(cli_option *table, const char *name, int from)
{
    for (int i = from; table[i].name; i++) {
        if (strcmp(table[i].name, name) != 0) continue;
        int j = i;
        do table[j] = table[j + 1];
        while (table[j++].name);
        i--;
    }
}

/* The options that a request may have under "esa". */
static void make_table(cli_option table[CLIP_MAX_OPTIONS], serve_settings *s)
{
    const cli_option own[] = {
        { "--method", CLI_CHOICE, &s->clip.method, METHODS, 0, 0, 0,
          "how self-attention runs (error; with a budget: entropy; with masks: cached)" },
        { "--budget", CLI_REAL, &s->clip.p.session.select.budget, "X", 0, 1, 0,
          "fraction of key blocks to keep in every sparse call (0.5; error has preset balanced "
          "instead)" },
        { "--seed", CLI_INT, &s->seed, "N", 0, 9e15, 0,
          "seed of the noise, as in diffusers with a CPU generator (0)" },
        { "--fps", CLI_REAL, &s->fps, "X", 0.01, 1000, 0,
          "frames per second of the file (the model's own)" },
        { "--mp4-quality", CLI_INT, &s->quality, "N", 1, 100, 0,
          "quality of MP4; higher is better (75)" },
        { "--vae-tile", CLI_INT32, &s->clip.p.vae_tile, "N", 0, 16384, 0,
          "decode in tiles of N pixels, to save memory; 0: whole frames if they fit (0)" },
        { "--lora", CLI_TEXTS, &s->lora, "NAME[:SCALE]", 0, 0, 0,
          "LoRAs of this server by name, each times SCALE (none)" },
        { "--lora-2", CLI_TEXTS, &s->lora_2, "NAME[:SCALE]", 0, 0, 0,
          "Wan 2.2: LoRAs for the second transformer (none)" },
        { "--masks", CLI_TEXT, &s->clip.p.masks, "NAME", 0, 0, 0,
          "cached: masks of this server by name (none)" },
        { "--plan", CLI_TEXT, &s->clip.p.plan, "NAME", 0, 0, 0,
          "a work plan of this server by name (the uniform rule)" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    const int count = (int)(sizeof own / sizeof own[0]) - 1;
    pthread_mutex_lock(&tables);
    clip_options(table, own, CLIP_OPTIONS_ALL & ~CLIP_OPTIONS_MODEL, &s->clip);
    pthread_mutex_unlock(&tables);
    static const char *const others[] = { "--masks", "--plan", "--image" };
    for (int i = 0; i < 3; i++) serve_options_drop(table, others[i], count);
}

typedef struct reader {
    serve_settings *s;
    serve_refusal *refusal;
    const serve_rules *rules;
    cli_option table[CLIP_MAX_OPTIONS];
    const char *given[CLIP_MAX_OPTIONS]; /* the field that gave an option; NULL: none */
    char said[SERVE_LONGEST];            /* a message of the option's reader */
} reader;

static int no_memory(reader *r)
{
    return serve_refuse(r->refusal, 500, "", "The server is out of memory.");
}

/* Refuses with what a check said, as a sentence without "request: ". */
static int refuse_said(reader *r, const char *param)
{
    const char *text = r->said;
    if (strncmp(text, what, sizeof what - 1) == 0 && text[sizeof what - 1] == ':')
        text += sizeof what + 1;
    return serve_refuse(r->refusal, 400, param, "%.380s.", *text ? text : "it is not possible");
}

/* ---------------------------------------------------------------- values */

static int entry(char *out, size_t size, const json_t *value)
{
    if (json_is_integer(value))
        return snprintf(out, size, "%lld", (long long)json_integer_value(value));
    if (json_is_real(value)) return snprintf(out, size, "%.17g", json_real_value(value));
    if (json_is_boolean(value)) return snprintf(out, size, "%d", json_is_true(value));
    const char *text = json_string_value(value);
    if (!text || strlen(text) != json_string_length(value)) return -1;
    return snprintf(out, size, "%s", text);
}

/* The text of an option, owned by the settings; NULL: the value is none that an option can have, or
 * there is no memory. */
static const char *text_of(serve_settings *s, const json_t *value)
{
    enum { LONGEST = 1 << 16 };
    const int list = json_is_array(value);
    const size_t most = (size_t)(list ? 64 * (json_array_size(value) + 1) : 64) +
                        (json_is_string(value) ? json_string_length(value) : 0);
    if (s->text_count == (int)(sizeof s->texts / sizeof s->texts[0]) || most > LONGEST) return NULL;
    char *text = malloc(most);
    size_t used = 0;
    if (!text) return NULL;
    text[0] = 0;
    s->texts[s->text_count++] = text;
    if (!list) return entry(text, most, value) < 0 ? NULL : text;
    for (size_t i = 0; i < json_array_size(value); i++) {
        if (i) text[used++] = ',';
        const int n = entry(text + used, 62, json_array_get(value, i));
        if (n < 0 || n > 61) return NULL;
        used += (size_t)n;
    }
    return text;
}

/* Reads option i from a value that the client gave as `name`. */
static int set_option(reader *r, int i, const char *name, const json_t *value)
{
    cli_option row = r->table[i];
    if (r->given[i])
        return serve_refuse(r->refusal, 400, name, "'%s' and '%s' say the same thing; give one.",
                            r->given[i], name);
    r->given[i] = name;
    row.name = name;
    const size_t count = row.type == CLI_TEXTS && json_is_array(value) ? json_array_size(value) : 1;
    for (size_t k = 0; k < count; k++) {
        const int inner = row.type == CLI_TEXTS && json_is_array(value);
        const char *text = text_of(r->s, inner ? json_array_get(value, k) : value);
        if (!text)
            return serve_refuse(r->refusal, 400, name,
                                "'%s' must be a number, a text, true or false, or a short list of "
                                "them.",
                                name);
        r->said[0] = 0;
        const cli_hearing before = cli_hear(r->said, sizeof r->said);
        const int wrong = cli_option_read(what, &row, text);
        cli_hear(before.text, before.size);
        if (wrong) return refuse_said(r, name);
    }
    return 0;
}

static int row_of(const reader *r, const char *option)
{
    for (int i = 0; r->table[i].name; i++)
        if (strcmp(r->table[i].name, option) == 0) return i;
    return -1;
}

static int is_given(const reader *r, const char *option)
{
    const int i = row_of(r, option);
    return i >= 0 && r->given[i];
}

/* ---------------------------------------------------------------- the object "esa" */

static int unknown(reader *r, const char *key)
{
    const char *names[CLIP_MAX_OPTIONS + 1];
    int count = 0;
    for (int i = 0; r->table[i].name; i++) names[count++] = r->table[i].name + 2;
    names[count++] = "compare";
    const char *near = cli_nearest(key, names, count);
    char param[64];
    snprintf(param, sizeof param, "esa.%.59s", key);
    return serve_refuse(r->refusal, 400, param, "There is no option '%.60s' under \"esa\"%s%s%s.",
                        key, near ? ", did you mean " : "", near ? near : "", near ? "?" : "");
}

static int set_compare(reader *r, const json_t *value)
{
    char text[16];
    const int n = entry(text, sizeof text, value);
    const int i = n > 0 && n < 16 ? cli_choice("0|1|false|true|off|dense", text, n) : -1;
    if (i < 0)
        return serve_refuse(r->refusal, 400, "esa.compare", "'esa.compare' must be true or false.");
    r->s->compare = i & 1;
    return 0;
}

/* Keeps a name that messages use. */
static const char *keep(serve_settings *s, const char *first, const char *second)
{
    if (s->text_count == (int)(sizeof s->texts / sizeof s->texts[0])) return NULL;
    const size_t size = strlen(first) + strlen(second) + 1;
    char *text = malloc(size);
    if (!text) return NULL;
    snprintf(text, size, "%s%s", first, second);
    return s->texts[s->text_count++] = text;
}

static int read_esa(reader *r, const json_t *esa)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)esa, key, value)
    {
        char option[64];
        if (json_is_null(value)) continue;
        snprintf(option, sizeof option, "--%.60s", key);
        int code = 0;
        const int i = row_of(r, option);
        if (strcmp(key, "compare") == 0)
            code = set_compare(r, value);
        else if (i < 0)
            code = unknown(r, key);
        else {
            const char *name = keep(r->s, "esa.", key);
            code = name ? set_option(r, i, name, value) : no_memory(r);
        }
        if (code) return code;
    }
    return 0;
}

static int read_fields(reader *r, const json_t *all)
{
    int count;
    const serve_field *f = serve_fields(&count);
    for (int i = 0; i < count; i++) {
        const json_t *value = json_object_get(all, f[i].name);
        if (!value || !f[i].option) continue;
        const int code = set_option(r, row_of(r, f[i].option), f[i].name, value);
        if (code) return code;
    }
    return 0;
}

/* What a request says about method or amount of work takes the place of the server's defaults for
 * both, which may not go with it. */
static void clear_usual(reader *r, const json_t *esa)
{
    static const char *const keys[] = { "method", "budget", "work",  "quality",
                                        "preset", "plan",   "masks", "carry" };
    clip_request *c = &r->s->clip;
    int given = 0;
    for (int i = 0; i < 8; i++) given |= json_object_get(esa, keys[i]) != NULL;
    r->s->method = r->rules->method;
    r->s->budget = r->rules->budget;
    if (!given) return;
    const clip_request fresh = clip_request_default();
    c->method = METHOD_ERROR;
    c->preset = -1;
    c->p.session.work = fresh.p.session.work;
    c->p.quality = 0;
    c->p.plan = c->p.masks = c->carry = NULL;
    c->carry_format = fresh.carry_format;
    c->p.session.select.budget = fresh.p.session.select.budget;
    r->s->method = r->s->budget = 0;
}

/* ---------------------------------------------------------------- names of this server */

static const serve_name *find_name(const reader *r, int kind, const char *name, size_t length)
{
    for (int i = 0; i < r->rules->names; i++) {
        const serve_name *n = &r->rules->name[i];
        if (n->kind == kind && strlen(n->name) == length && memcmp(n->name, name, length) == 0)
            return n;
    }
    return NULL;
}

static int unknown_name(reader *r, int kind, const char *param, const char *name)
{
    static const char *const kinds[] = { "LoRA", "mask file", "work plan" };
    char list[200] = "";
    for (int i = 0; i < r->rules->names; i++)
        if (r->rules->name[i].kind == kind && strlen(list) + 70 < sizeof list)
            snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", *list ? ", " : "",
                     r->rules->name[i].name);
    return serve_refuse(r->refusal, 400, param, "This server has no %s '%.60s'; it has %s.",
                        kinds[kind], name, *list ? list : "none");
}

static int resolve_file(reader *r, const char **file, int kind, const char *param)
{
    if (!*file) return 0;
    const serve_name *n = find_name(r, kind, *file, strlen(*file));
    if (!n) return unknown_name(r, kind, param, *file);
    *file = n->file;
    return 0;
}

/* NAME[:SCALE] -> FILE:SCALE, as clip_open takes them. */
static int resolve_loras(reader *r, cli_texts *out, const cli_texts *given, const char *param)
{
    for (int i = 0; i < given->count; i++) {
        const char *text = given->text[i], *colon = strrchr(text, ':');
        char *end = NULL, scale[40];
        double times = colon ? strtod(colon + 1, &end) : 1;
        const size_t length = colon ? (size_t)(colon - text) : strlen(text);
        if (colon && (end == colon + 1 || *end || !isfinite(times) || fabs(times) > 1000))
            return serve_refuse(r->refusal, 400, param,
                                "'%.60s' must be NAME or NAME:SCALE with a scale from -1000 to "
                                "1000.",
                                text);
        const serve_name *n = find_name(r, SERVE_LORA, text, length);
        if (!n) return unknown_name(r, SERVE_LORA, param, text);
        snprintf(scale, sizeof scale, ":%.9g", times * n->scale);
        out->text[out->count] = keep(r->s, n->file, scale);
        if (!out->text[out->count++]) return no_memory(r);
    }
    return 0;
}

static int resolve_names(reader *r)
{
    serve_settings *s = r->s;
    int code = resolve_file(r, &s->clip.p.masks, SERVE_MASKS, "esa.masks");
    if (!code) code = resolve_file(r, &s->clip.p.plan, SERVE_PLAN, "esa.plan");
    if (!code) code = resolve_loras(r, &s->clip.open.lora, &s->lora, "esa.lora");
    if (!code) code = resolve_loras(r, &s->clip.open.lora_2, &s->lora_2, "esa.lora-2");
    return code;
}

static int resolve_model(reader *r, const json_t *all)
{
    const serve_rules *rules = r->rules;
    const char *name = json_string_value(json_object_get(all, "model"));
    serve_settings *s = r->s;
    s->model = -1;
    for (int i = 0; i < rules->models && s->model < 0; i++)
        if (!name || strcmp(name, rules->model[i].name) == 0) s->model = i;
    if (s->model < 0)
        return serve_refuse(r->refusal, 404, "model",
                            "This server has no model '%.80s'; /v1/models lists those it has.",
                            name);
    s->clip.open.model = rules->model[s->model].folder;
    return 0;
}

/* ---------------------------------------------------------------- sizes */

/* "832x480": width and height. */
static int read_size(reader *r, const json_t *all)
{
    const char *size = json_string_value(json_object_get(all, "size"));
    char *end = NULL;
    if (!size) return 0;
    for (int i = 0; i < 2; i++) {
        const char *option = i ? "--height" : "--width";
        const long n = size[0] >= '0' && size[0] <= '9' ? strtol(size, &end, 10) : -1;
        const int separated = n >= 0 && (i ? *end == 0 : *end == 'x' || *end == '*');
        if (!separated || n > 16384 || n < 1)
            return serve_refuse(r->refusal, 400, "size",
                                "'size' must be WIDTHxHEIGHT in pixels, such as 832x480.");
        size = end + 1;
        const int at = row_of(r, option);
        if (r->given[at] && n == (i ? r->s->clip.p.height : r->s->clip.p.width))
            continue; /* clients of vLLM-Omni send both */
        json_t *value = json_integer(n);
        const int code = value ? set_option(r, at, "size", value) : no_memory(r);
        json_decref(value);
        if (code) return code;
    }
    return 0;
}

/* seconds: that many at the frames per second of the file, and the first frame. A number of frames
 * says it better; SGLang's client sends seconds beside it. */
static int read_seconds(reader *r, const json_t *all)
{
    const json_t *value = json_object_get(all, "seconds");
    const serve_model *m = &r->rules->model[r->s->model];
    const double fps = r->s->fps > 0 ? r->s->fps : m->known && m->info.fps > 0 ? m->info.fps : 16;
    const double seconds = json_number_value(value), frames = rint(seconds * fps) + 1;
    if (!value) return 0;
    if (!(seconds > 0) || !(frames <= 100000))
        return serve_refuse(r->refusal, 400, "seconds",
                            "'seconds' must be above 0 and give at most 100000 frames.");
    if (is_given(r, "--frames")) return 0;
    json_t *count = json_integer((json_int_t)frames);
    const int code = count ? set_option(r, row_of(r, "--frames"), "seconds", count) : no_memory(r);
    json_decref(count);
    return code;
}

/* What is known of the model without opening it. */
static int check_model(reader *r, const char *image)
{
    const serve_settings *s = r->s;
    const serve_model *m = &r->rules->model[s->model];
    const esa_generate_params *p = &s->clip.p;
    const esa_model_info *i = &m->info;
    if (image && !m->known) return 0;
    if (m->known && image && !m->image)
        return serve_refuse(r->refusal, 400, "input_reference", "The model %.80s takes no picture.",
                            m->name);
    if (m->known && !image && m->image)
        return serve_refuse(r->refusal, 400, "input_reference",
                            "The model %.80s makes videos from a picture, and needs one.", m->name);
    const int second = row_of(r, "--guidance-2");
    if (m->known && !(i->boundary > 0) && r->given[second])
        return serve_refuse(r->refusal, 400, r->given[second],
                            "The model %.80s has one transformer, so '%s' means nothing to it.",
                            m->name, r->given[second]);
    const int32_t sides[2] = { p->width, p->height };
    for (int k = 0; k < 2 && m->known; k++) {
        const int32_t unit = i->factor[2 - k] * i->patch[2 - k];
        const int at = row_of(r, k ? "--height" : "--width");
        if (sides[k] && unit > 0 && sides[k] % unit)
            return serve_refuse(r->refusal, 400, r->given[at],
                                "The %s of a video must be a multiple of %d, not %d.",
                                k ? "height" : "width", unit, sides[k]);
    }
    const double width = p->width ? p->width : i->width, height = p->height ? p->height : i->height,
                 frames = p->frames ? p->frames : i->frames;
    if (width * height * frames > (double)r->rules->max_pixels)
        return serve_refuse(r->refusal, 400, "size",
                            "The video has %.0f pixels in all frames, this server makes at most "
                            "%lld.",
                            width * height * frames, (long long)r->rules->max_pixels);
    return 0;
}

/* ---------------------------------------------------------------- all of it */

static int check_clip(reader *r)
{
    clip_request *c = &r->s->clip;
    r->said[0] = 0;
    const cli_hearing before = cli_hear(r->said, sizeof r->said);
    int wrong = clip_choose_method(c, r->s->method, r->s->budget, what);
    if (!wrong) wrong = clip_request_agrees(c, r->s->compare, what);
    if (!wrong) wrong = clip_request_check(c, what);
    cli_hear(before.text, before.size);
    return wrong ? refuse_said(r, "esa") : 0;
}

static int read_all(reader *r, const json_t *all, const char *image)
{
    serve_settings *s = r->s;
    const json_t *esa = json_object_get(all, "esa");
    clear_usual(r, esa);
    make_table(r->table, s);
    int code = resolve_model(r, all);
    if (!code) code = read_esa(r, esa);
    if (!code) code = read_fields(r, all);
    if (!code) code = read_size(r, all);
    if (!code) code = read_seconds(r, all);
    if (is_given(r, "--method")) s->method = 1;
    if (is_given(r, "--budget")) s->budget = 1;
    if (!code) code = resolve_names(r);
    if (!code) code = check_clip(r);
    if (!code) code = check_model(r, image);
    s->clip.p.prompt = keep(s, json_string_value(json_object_get(all, "prompt")), "");
    if (!code && !s->clip.p.prompt) code = no_memory(r);
    s->clip.p.image = image;
    s->clip.p.seed = (uint64_t)s->seed;
    return code;
}

int serve_settings_read(serve_settings *s, serve_refusal *refusal, const serve_rules *rules,
                        const json_t *fields, const char *image)
{
    reader r = { .s = s, .refusal = refusal, .rules = rules };
    memset(s, 0, sizeof *s);
    memset(refusal, 0, sizeof *refusal);
    s->clip = rules->usual;
    s->quality = rules->quality;
    const int code = read_all(&r, fields, image);
    if (code) serve_settings_free(s);
    return code;
}

/* ---------------------------------------------------------------- the schema */

static json_t *schema_of(const cli_option *o)
{
    json_t *schema = json_pack("{s:s}", "description", o->help);
    const int whole = o->type == CLI_INT || o->type == CLI_INT32,
              number = whole || o->type == CLI_REAL;
    if (o->type == CLI_CHOICE) {
        json_t *names = json_array();
        char name[32];
        const int count = 1 + (int)strlen(o->argument); /* more than there are */
        for (int i = 0; i < count && strcmp(cli_name(name, o->argument, i), "?") != 0; i++)
            json_array_append_new(names, json_string(name));
        json_object_set_new(schema, "enum", names);
    } else if (number) {
        json_object_set_new(schema, "type", json_string(whole ? "integer" : "number"));
        if (o->lo < o->hi) {
            json_object_set_new(schema, "minimum", json_real(o->lo));
            json_object_set_new(schema, "maximum", json_real(o->hi));
        }
    } else if (o->type == CLI_TEXTS)
        json_object_set_new(schema, "type", json_pack("[s,s]", "array", "string"));
    else if (o->type == CLI_TEXT)
        json_object_set_new(schema, "type", json_pack("[s,s]", "string", "number"));
    else /* lists and schedules */
        json_object_set_new(schema, "type", json_pack("[s,s,s]", "array", "string", "integer"));
    return schema;
}

json_t *serve_esa_schema(void)
{
    static serve_settings s;
    cli_option table[CLIP_MAX_OPTIONS];
    json_t *properties = json_object();
    make_table(table, &s);
    for (const cli_option *o = table; o->name; o++)
        json_object_set_new(properties, o->name + 2, schema_of(o));
    json_object_set_new(properties, "compare",
                        json_pack("{s:s,s:s}", "type", "boolean", "description",
                                  "also make the dense video; report speedup, PSNR and SSIM "
                                  "(false)"));
    return json_pack("{s:s,s:s,s:o,s:b}", "type", "object", "description",
                     "Options of `esa generate`, by their names without --.", "properties",
                     properties, "additionalProperties", 0);
}
