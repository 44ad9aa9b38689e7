/* plan_state.c - the results of an unfinished plan, kept in a folder.
 * SPDX-License-Identifier: Apache-2.0 */
#include "clip/plan.h"
#include "core/scratch.h"

#include <stdlib.h>
#include <string.h>

static const char what[] = "calibrate";

static const char *const names[] = { "dense-#.safetensors", "alone.safetensors", "plan.safetensors",
                                     NULL };
static const cli_own own = { "state.json", "esa.plan.state", names };

void plan_state_path(char path[PLAN_PATH + 64], const plan_state *s, const char *name)
{
    snprintf(path, PLAN_PATH + 64, "%s/%.60s", s->folder, name);
}

static int write_state(const plan_state *s)
{
    char path[PLAN_PATH + 64];
    cli_json *json = cli_json_new();
    cli_json_text(json, "format", own.format);
    cli_json_text(json, "settings", s->settings);
    cli_json_add(json, "runs", json_incref(s->runs));
    plan_state_path(path, s, own.marker);
    return cli_json_save(json, path);
}

static int read_state(plan_state *s, const char *path)
{
    json_t *old = cli_json_load(path, NULL, 0, what);
    if (!old) return CLI_FAILED;
    const char *settings = cli_json_string(old, "settings");
    json_t *runs = json_object_get(old, "runs");
    int status = CLI_OK;
    if (!settings || strcmp(settings, s->settings) != 0 || !json_is_object(runs))
        status = cli_fail("%s: '%s' was begun with other settings: --restart discards it", what,
                          s->folder);
    else
        json_object_update(s->runs, runs);
    json_decref(old);
    return status;
}

int plan_state_open(plan_state *s, const char *output, char *settings, int restart)
{
    char path[PLAN_PATH + 64];
    memset(s, 0, sizeof *s);
    s->lock = -1;
    s->settings = settings;
    s->runs = json_object();
    if (!s->runs) return cli_fail("%s: out of memory", what);
    if (snprintf(s->folder, sizeof s->folder, "%s.part", output) >= (int)sizeof s->folder)
        return cli_fail("%s: a name of %zu bytes cannot be written", what, strlen(output));
    const int status = cli_scratch_open(&s->lock, s->folder, &own, what);
    if (status) return status;
    if (restart) cli_scratch_clear(s->folder, &own);
    plan_state_path(path, s, own.marker);
    if (cli_is_missing(path)) return write_state(s);
    return read_state(s, path);
}

int plan_state_get(const plan_state *s, const char *name, double *out, int64_t count)
{
    const json_t *values = json_object_get(s->runs, name);
    if (!json_is_array(values) || (int64_t)json_array_size(values) != count) return 0;
    for (int64_t i = 0; i < count; i++) {
        const char *text = json_string_value(json_array_get(values, (size_t)i));
        if (!text) return 0;
        out[i] = strtod(text, NULL);
    }
    return 1;
}

int plan_state_put(plan_state *s, const char *name, const double *values, int64_t count)
{
    json_t *array = json_array();
    for (int64_t i = 0; array && i < count; i++) {
        char text[32]; /* as text: every bit counts, so that a continued run gives the same plan */
        snprintf(text, sizeof text, "%.17g", values[i]);
        if (json_array_append_new(array, json_string(text)) != 0) {
            json_decref(array);
            array = NULL;
        }
    }
    if (!array || json_object_set_new(s->runs, name, array) != 0)
        return cli_fail("%s: out of memory", what);
    return write_state(s);
}

void plan_state_close(plan_state *s)
{
    if (s->lock >= 0) cli_scratch_close(&s->lock, s->folder);
    json_decref(s->runs);
    free(s->settings);
    s->runs = NULL;
    s->settings = NULL;
}

void plan_state_remove(plan_state *s) { cli_scratch_remove(&s->lock, s->folder, &own); }
