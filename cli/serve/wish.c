/* wish.c - the body of a POST as a wish: JSON or a form, its fields, its picture.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The fields are those of OpenAI's videos, as vLLM-Omni and SGLang extend them; the options of `esa
 * generate` are under "esa" and are read later (settings.c). Only the shape is checked here. */
#include "serve/fields.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const serve_field fields[] = {
    { "prompt", SERVE_IS_TEXT, NULL },
    { "model", SERVE_IS_TEXT, NULL },
    { "negative_prompt", SERVE_IS_TEXT, "--negative-prompt" },
    { "size", SERVE_IS_TEXT, NULL },
    { "seconds", SERVE_IS_NUMBER, NULL },
    { "width", SERVE_IS_NUMBER, "--width" },
    { "height", SERVE_IS_NUMBER, "--height" },
    { "num_frames", SERVE_IS_NUMBER, "--frames" },
    { "fps", SERVE_IS_NUMBER, "--fps" },
    { "num_inference_steps", SERVE_IS_NUMBER, "--steps" },
    { "guidance_scale", SERVE_IS_NUMBER, "--guidance" },
    { "guidance_scale_2", SERVE_IS_NUMBER, "--guidance-2" },
    { "flow_shift", SERVE_IS_NUMBER, "--flow-shift" },
    { "seed", SERVE_IS_NUMBER, "--seed" },
    { "n", SERVE_IS_ONE, NULL },
    { "num_outputs_per_prompt", SERVE_IS_ONE, NULL },
    { "input_reference", SERVE_IS_PICTURE, NULL },
    { "image_reference", SERVE_IS_PICTURE, NULL },
    { "extra_body", SERVE_IS_MORE, NULL },
    { "extra_params", SERVE_IS_MORE, NULL },
    { "esa", SERVE_IS_ESA, NULL },
};
#define FIELDS ((int)(sizeof fields / sizeof fields[0]))

/* Fields that clients of vLLM-Omni and SGLang write out although they ask for nothing. They are
 * taken with these values only; NULL: any text. */
static const struct {
    const char *name, *values;
} idle[] = {
    { "user", NULL },
    { "generator_device", NULL },
    { "enhance_prompt", "false" },
    { "enable_teacache", "false" },
    { "enable_upscaling", "false" },
    { "enable_frame_interpolation", "false" },
    { "frame_interpolation_exp", "1" },
    { "frame_interpolation_scale", "1" },
    { "generate_sound", "false" },
    { "return_stage_metrics", "false" },
    { "profile", "false" },
    { "profile_all_stages", "false" },
};
#define IDLE ((int)(sizeof idle / sizeof idle[0]))

const serve_field *serve_fields(int *count)
{
    *count = FIELDS;
    return fields;
}

void serve_wish_free(serve_wish *w)
{
    json_decref(w->fields);
    free(w->image);
    memset(w, 0, sizeof *w);
}

typedef struct reader {
    serve_wish *wish;
    serve_refusal *refusal;
    const serve_rules *rules;
    int depth; /* of extra_body */
} reader;

static int take_field(reader *r, const char *name, json_t *value);

static int no_memory(reader *r)
{
    return serve_refuse(r->refusal, 500, "", "The server is out of memory.");
}

/* Adds a value under a name that is new; takes over the reference. */
static int add(reader *r, json_t *to, const char *name, json_t *value)
{
    if (!value) return no_memory(r);
    if (json_object_get(to, name)) {
        json_decref(value);
        return serve_refuse(r->refusal, 400, name, "'%s' was given twice.", name);
    }
    return json_object_set_new(to, name, value) ? no_memory(r) : 0;
}

/* ---------------------------------------------------------------- numbers and texts */

/* A number, also one that is written as text, as forms and some clients send it. */
static int take_number(reader *r, const char *name, const json_t *value)
{
    const char *text = json_string_value(value);
    char *end;
    if (json_is_integer(value))
        return add(r, r->wish->fields, name, json_integer(json_integer_value(value)));
    if (json_is_real(value))
        return add(r, r->wish->fields, name, json_real(json_real_value(value)));
    if (text && *text && strlen(text) < 40 && strlen(text) == json_string_length(value)) {
        errno = 0;
        const long long whole = strtoll(text, &end, 10);
        if (!*end && !errno) return add(r, r->wish->fields, name, json_integer(whole));
        const double real = strtod(text, &end);
        if (!*end && isfinite(real)) return add(r, r->wish->fields, name, json_real(real));
    }
    return serve_refuse(r->refusal, 400, name, "'%s' must be a number.", name);
}

static int take_text(reader *r, const char *name, const json_t *value)
{
    const char *text = json_string_value(value);
    const size_t bytes = text ? json_string_length(value) : 0;
    if (!text) return serve_refuse(r->refusal, 400, name, "'%s' must be a text.", name);
    if (strlen(text) != bytes)
        return serve_refuse(r->refusal, 400, name, "'%s' holds a character with the number 0.",
                            name);
    if ((int64_t)bytes > r->rules->max_prompt)
        return serve_refuse(r->refusal, 400, name, "'%s' has %zu bytes, at most %lld are taken.",
                            name, bytes, (long long)r->rules->max_prompt);
    return add(r, r->wish->fields, name, json_stringn(text, bytes));
}

/* ---------------------------------------------------------------- the picture */

/* Takes over image. */
static int set_picture(reader *r, const char *name, unsigned char *image, size_t bytes)
{
    if (!image) return no_memory(r);
    if (r->wish->image) {
        free(image);
        return serve_refuse(r->refusal, 400, name, "Two pictures were given, at most one is used.");
    }
    int32_t size[2] = { 0, 0 };
    const int known = serve_picture_size(size, image, bytes);
    if (!known || size[0] > SERVE_SIDE || size[1] > SERVE_SIDE) {
        free(image);
        if (!known)
            return serve_refuse(r->refusal, 400, name, "'%s' is no PNG, JPEG or WebP picture.",
                                name);
        return serve_refuse(r->refusal, 400, name,
                            "'%s' has %d x %d pixels, its sides may have %d.", name, size[1],
                            size[0], SERVE_SIDE);
    }
    r->wish->image = image;
    r->wish->image_bytes = bytes;
    return add(r, r->wish->fields, "image", json_true());
}

static int digit(int c)
{
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    if (c == '+' || c == '-') return 62;
    return c == '/' || c == '_' ? 63 : -1;
}

/* data:image/png;base64,... */
static int take_data(reader *r, const char *name, const char *url)
{
    const char *comma = strncmp(url, "data:image/", 11) == 0 ? strchr(url, ',') : NULL;
    if (!comma || comma - url < 7 || strncmp(comma - 7, ";base64", 7) != 0)
        return serve_refuse(r->refusal, 400, name,
                            "'%s' must be a data URL of a picture (data:image/png;base64,...): "
                            "this server fetches nothing.",
                            name);
    const char *p = comma + 1;
    unsigned char *out = malloc(strlen(p) / 4 * 3 + 3);
    size_t used = 0;
    unsigned bits = 0, have = 0;
    if (!out) return no_memory(r);
    for (; *p && *p != '='; p++) {
        const int six = digit((unsigned char)*p);
        if (six < 0) {
            free(out);
            return serve_refuse(r->refusal, 400, name, "The data URL of '%s' is no base64.", name);
        }
        bits = (bits << 6 | (unsigned)six) & 0xffffff;
        have += 6;
        if (have < 8) continue;
        have -= 8;
        out[used++] = (unsigned char)(bits >> have);
    }
    return set_picture(r, name, out, used);
}

/* A data URL, or an object with one as url or image_url, which may be such an object again. */
static int take_picture(reader *r, const char *name, const json_t *value)
{
    static const char *const keys[] = { "url", "image_url" };
    const json_t *inner = value;
    for (int k = 0; k < 2; k++)
        if (json_is_object(inner)) {
            const json_t *next = json_object_get(inner, keys[0]);
            if (!next) next = json_object_get(inner, keys[1]);
            inner = next;
        }
    const char *url = json_string_value(inner);
    if (!url)
        return serve_refuse(r->refusal, 400, name,
                            "'%s' must be a file of a form, or {\"url\": \"data:image/...\"}.",
                            name);
    return take_data(r, name, url);
}

/* ---------------------------------------------------------------- objects */

/* Parses a text as JSON; *out NULL after a refusal. */
static int parse_json(reader *r, json_t **out, const char *name, const char *text, size_t bytes)
{
    json_error_t error;
    int depth = 0, deepest = 0, inside = 0;
    *out = NULL;
    for (size_t i = 0; i < bytes; i++) { /* jansson's own limit is 2048 */
        if (inside && text[i] == '\\')
            i++;
        else if (text[i] == '"')
            inside = !inside;
        else if (!inside && (text[i] == '{' || text[i] == '['))
            depth++;
        else if (!inside && (text[i] == '}' || text[i] == ']'))
            depth--;
        if (depth > deepest) deepest = depth;
    }
    if (deepest > SERVE_DEPTH)
        return serve_refuse(r->refusal, 400, name, "The JSON is nested more than %d deep.",
                            SERVE_DEPTH);
    *out = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    if (*out) return 0;
    char *why = cli_utf8(error.text);
    const int code = serve_refuse(r->refusal, 400, name, "%s%s no JSON: line %d: %s.",
                                  *name ? "'" : "The body", *name ? "' is" : " is", error.line,
                                  why ? why : "");
    free(why);
    return code;
}

/* An object, also as text; to be released. */
static int object_of(reader *r, json_t **out, const char *name, json_t *value)
{
    *out = NULL;
    if (json_is_string(value)) {
        const int code = parse_json(r, out, name, json_string_value(value),
                                    json_string_length(value));
        if (code) return code;
    } else
        *out = json_incref(value);
    if (json_is_object(*out)) return 0;
    json_decref(*out);
    *out = NULL;
    return serve_refuse(r->refusal, 400, name, "'%s' must be an object.", name);
}

/* The object "esa" of the wish. */
static json_t *esa_of(reader *r)
{
    json_t *esa = json_object_get(r->wish->fields, "esa");
    if (esa) return esa;
    esa = json_object();
    return esa && !json_object_set_new(r->wish->fields, "esa", esa) ? esa : NULL;
}

/* esa.NAME of a form, or a member of "esa". Underscores are hyphens in names of options. */
static int take_esa(reader *r, const char *name, json_t *value)
{
    char key[64], param[64];
    json_t *esa = esa_of(r);
    if (strlen(name) > 40 || name[strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_-")])
        return serve_refuse(r->refusal, 400, "esa",
                            "There is no option of this name under \"esa\".");
    snprintf(key, sizeof key, "%s", name);
    for (char *p = key; *p; p++)
        if (*p == '_') *p = '-';
    snprintf(param, sizeof param, "esa.%.58s", key);
    if (!esa) return no_memory(r);
    if (json_object_get(esa, key))
        return serve_refuse(r->refusal, 400, param, "'%s' was given twice.", param);
    return json_object_set(esa, key, value) ? no_memory(r) : 0;
}

static int take_members(reader *r, const char *name, json_t *value, int esa)
{
    json_t *object, *member;
    const char *key;
    int code = object_of(r, &object, name, value);
    if (!code && !esa && r->depth++)
        code = serve_refuse(r->refusal, 400, name, "'%s' lies in an object of its kind.", name);
    if (!code && esa && !esa_of(r)) code = no_memory(r);
    json_object_foreach(object, key, member)
    {
        if (code) break;
        if (!json_is_null(member))
            code = esa ? take_esa(r, key, member) : take_field(r, key, member);
    }
    if (!esa) r->depth--;
    json_decref(object);
    return code;
}

/* ---------------------------------------------------------------- fields */

static int unknown(reader *r, const char *name)
{
    const char *names[FIELDS];
    for (int i = 0; i < FIELDS; i++) names[i] = fields[i].name;
    const char *near = cli_nearest(name, names, FIELDS);
    return serve_refuse(r->refusal, 400, name, "There is no field '%.60s'%s%s%s.", name,
                        near ? ", did you mean " : "", near ? near : "", near ? "?" : "");
}

/* esa.NAME or, as some clients write an object in a form, esa[NAME]. */
static int take_esa_field(reader *r, const char *name, json_t *value)
{
    char key[64];
    const size_t n = strlen(name);
    if (name[3] == '.' || n < 6 || n > sizeof key || name[n - 1] != ']')
        return take_esa(r, name + 4, value);
    snprintf(key, sizeof key, "%.*s", (int)(n - 5), name + 4);
    return take_esa(r, key, value);
}

/* A field of the list `idle`; -1: it is none of them. */
static int take_idle(reader *r, const char *name, const json_t *value)
{
    char text[32] = "";
    int i = 0;
    while (i < IDLE && strcmp(name, idle[i].name) != 0) i++;
    if (i == IDLE) return -1;
    if (!idle[i].values)
        return json_is_string(value)
                   ? 0
                   : serve_refuse(r->refusal, 400, name, "'%s' must be a text.", name);
    if (json_is_boolean(value))
        snprintf(text, sizeof text, "%s", json_is_true(value) ? "true" : "false");
    else if (json_is_number(value))
        snprintf(text, sizeof text, "%g", json_number_value(value));
    else if (json_is_string(value))
        snprintf(text, sizeof text, "%s", json_string_value(value));
    if (strcmp(text, idle[i].values) == 0) return 0;
    return serve_refuse(r->refusal, 400, name, "'%s' can only be %s on this server.", name,
                        idle[i].values);
}

static int take_field(reader *r, const char *name, json_t *value)
{
    if (strncmp(name, "esa.", 4) == 0 || strncmp(name, "esa[", 4) == 0)
        return take_esa_field(r, name, value);
    for (int i = 0; i < FIELDS; i++) {
        if (strcmp(name, fields[i].name) != 0) continue;
        switch (fields[i].kind) {
        case SERVE_IS_TEXT: return take_text(r, name, value);
        case SERVE_IS_NUMBER: return take_number(r, name, value);
        case SERVE_IS_PICTURE: return take_picture(r, name, value);
        case SERVE_IS_MORE: return take_members(r, name, value, 0);
        case SERVE_IS_ESA: return take_members(r, name, value, 1);
        default: /* SERVE_IS_ONE */
            if ((json_is_integer(value) && json_integer_value(value) == 1) ||
                (json_is_string(value) && strcmp(json_string_value(value), "1") == 0))
                return 0;
            return serve_refuse(r->refusal, 400, name, "'%s' must be 1: a request makes one video.",
                                name);
        }
    }
    const int code = take_idle(r, name, value);
    return code < 0 ? unknown(r, name) : code;
}

static int read_json(reader *r, const char *body, size_t bytes)
{
    json_t *value, *member;
    const char *key;
    int code = parse_json(r, &value, "", body, bytes);
    if (code) return code;
    if (!json_is_object(value))
        code = serve_refuse(r->refusal, 400, "", "The body must be a JSON object.");
    json_object_foreach(value, key, member)
    {
        if (code) break;
        if (!json_is_null(member)) code = take_field(r, key, member);
    }
    json_decref(value);
    return code;
}

static int take_part(reader *r, const serve_part *part)
{
    if (part->file) {
        if (strcmp(part->name, "input_reference") != 0 &&
            strcmp(part->name, "image_reference") != 0)
            return serve_refuse(r->refusal, 400, part->name, "'%s' takes no file.", part->name);
        if (!part->bytes) return 0; /* a form whose file was not chosen */
        unsigned char *copy = malloc(part->bytes);
        if (copy) memcpy(copy, part->data, part->bytes);
        return set_picture(r, part->name, copy, part->bytes);
    }
    if (memchr(part->data, 0, part->bytes))
        return serve_refuse(r->refusal, 400, part->name,
                            "'%s' holds a character with the number 0.", part->name);
    json_t *value = json_stringn(part->data, part->bytes);
    if (!value) return serve_refuse(r->refusal, 400, part->name, "'%s' is no UTF-8.", part->name);
    /* an empty field of a form is one that was left empty */
    int code = 0;
    if (part->bytes || strcmp(part->name, "prompt") == 0) {
        json_t *object = NULL;
        const int picture = strcmp(part->name, "image_reference") == 0 ||
                            strcmp(part->name, "input_reference") == 0;
        if (picture && part->data[0] == '{') code = object_of(r, &object, part->name, value);
        if (!code) code = take_field(r, part->name, object ? object : value);
        json_decref(object);
    }
    json_decref(value);
    return code;
}

static int read_form(reader *r, const char *content_type, const char *body, size_t bytes)
{
    char boundary[80];
    serve_part part;
    size_t at = 0;
    int more = 0;
    if (!serve_boundary(boundary, content_type))
        return serve_refuse(r->refusal, 400, "", "The form has no usable boundary.");
    for (int parts = 0; (more = serve_multipart_next(&part, &at, body, bytes, boundary)) > 0;) {
        if (++parts > 200)
            return serve_refuse(r->refusal, 400, "", "The form has more than 200 parts.");
        const int code = take_part(r, &part);
        if (code) return code;
    }
    return more ? serve_refuse(r->refusal, 400, "", "The form is damaged or cut off.") : 0;
}

int serve_wish_read(serve_wish *wish, serve_refusal *refusal, const serve_rules *rules,
                    const char *content_type, const char *body, size_t bytes)
{
    reader r = { wish, refusal, rules, 0 };
    int code = 0;
    if (!bytes) body = ""; /* there is none */
    memset(wish, 0, sizeof *wish);
    memset(refusal, 0, sizeof *refusal);
    wish->fields = json_object();
    if (!wish->fields) code = no_memory(&r);
    const char *type = content_type ? content_type : "";
    if (!code && strncasecmp(type, "multipart/form-data", 19) == 0)
        code = read_form(&r, type, body, bytes);
    else if (!code && strncasecmp(type, "application/json", 16) == 0)
        code = read_json(&r, body, bytes);
    else if (!code)
        code = serve_refuse(refusal, 415, "",
                            "The body must be application/json or multipart/form-data.");
    const char *prompt = json_string_value(json_object_get(wish->fields, "prompt"));
    if (!code && (!prompt || !prompt[strspn(prompt, " \t\r\n")]))
        code = serve_refuse(refusal, 400, "prompt", "A prompt is needed.");
    if (!code && !esa_of(&r)) code = no_memory(&r);
    if (code) serve_wish_free(wish);
    return code;
}
