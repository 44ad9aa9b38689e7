/* http_routes.c - which request gets which answer: what is not about one video.
 * SPDX-License-Identifier: Apache-2.0 */
#include "serve/http.h"

#include <string.h>

static enum MHD_Result health(http_exchange *x)
{
    serve_hub *hub = x->http->hub;
    cli_json *json = cli_json_new();
    pthread_mutex_lock(&hub->lock);
    cli_json_fields(json, "status %s queue %ld running %s", hub->stop ? "stopping" : "ok",
                    serve_queue_length(hub), hub->running ? hub->running->id : NULL);
    pthread_mutex_unlock(&hub->lock);
    return http_json(x, 200, json);
}

/* ---------------------------------------------------------------- models */

static void names_json(cli_json *json, const char *key, const serve_rules *rules, int kind)
{
    cli_json_open(json, key, '[');
    for (int i = 0; i < rules->names; i++)
        if (rules->name[i].kind == kind) cli_json_text(json, NULL, rules->name[i].name);
    cli_json_close(json);
}

static void choices_json(cli_json *json, const char *key, const char *names)
{
    char name[32];
    cli_json_open(json, key, '[');
    for (int i = 0; strcmp(cli_name(name, names, i), "?") != 0; i++)
        cli_json_text(json, NULL, name);
    cli_json_close(json);
}

/* Prompts that suit the model, as examples. */
static void prompts_json(cli_json *json, const esa_model_info *info)
{
    cli_prompts prompts;
    cli_json_open(json, "prompts", '[');
    if (!cli_prompts_get(&prompts, NULL, NULL, SERVE_EXAMPLES, strcmp(info->name, "wan-tiny") == 0,
                         "serve")) {
        for (int64_t i = 0; i < prompts.count; i++) cli_json_text(json, NULL, prompts.line[i]);
        cli_prompts_free(&prompts);
    }
    cli_json_close(json);
}

/* The preset of a request that says nothing; NULL: the server was started with something else. */
static const char *usual_preset(char name[32], const serve_rules *rules)
{
    const clip_request *usual = &rules->usual;
    if (usual->preset >= 0) return cli_name(name, CLI_PRESETS, usual->preset);
    if (rules->method || rules->budget || clip_wants_work(usual)) return NULL;
    return cli_name(name, CLI_PRESETS, ESA_PRESET_BALANCED);
}

static void model_json(cli_json *json, const serve_hub *hub, const serve_model *m)
{
    const serve_rules *rules = &hub->rules;
    const esa_model_info *i = &m->info;
    const esa_generate_params *usual = &rules->usual.p;
    char preset[32];
    const int warm = strcmp(hub->warm, m->name) == 0;
    cli_json_open(json, NULL, '{');
    cli_json_fields(json, "id %s object %s created %ld owned_by %s", m->name, "model",
                    rules->started, "esa");
    cli_json_open(json, "esa", '{');
    cli_json_fields(json, "loaded %i warm %i image %s", warm, warm, m->image ? "required" : "none");
    cli_json_open(json, "defaults", '{');
    cli_json_fields(
        json, "width %d height %d frames %d steps %d guidance %g fps %g",
        usual->width ? usual->width : i->width, usual->height ? usual->height : i->height,
        usual->frames ? usual->frames : i->frames, usual->steps ? usual->steps : i->steps,
        usual->guidance == usual->guidance ? usual->guidance : i->guidance, i->fps);
    cli_json_text(json, "preset", usual_preset(preset, rules));
    cli_json_close(json);
    cli_json_open(json, "multiple", '{');
    cli_json_fields(json, "width %d height %d frames %d", i->factor[2] * i->patch[2],
                    i->factor[1] * i->patch[1], i->factor[0]);
    cli_json_close(json);
    choices_json(json, "presets", CLI_PRESETS);
    prompts_json(json, i);
    names_json(json, "loras", rules, SERVE_LORA);
    names_json(json, "masks", rules, SERVE_MASKS);
    names_json(json, "plans", rules, SERVE_PLAN);
    cli_json_int(json, "max_pixels", rules->max_pixels);
    cli_json_close(json);
    cli_json_close(json);
}

static enum MHD_Result models(http_exchange *x, const char *id)
{
    serve_hub *hub = x->http->hub;
    cli_json *json = cli_json_new();
    cli_json_text(json, "object", "list");
    cli_json_open(json, "data", '[');
    pthread_mutex_lock(&hub->lock);
    for (int i = 0; i < hub->rules.models; i++)
        if (!id || strcmp(id, hub->rules.model[i].name) == 0)
            model_json(json, hub, &hub->rules.model[i]);
    pthread_mutex_unlock(&hub->lock);
    cli_json_close(json);
    return http_json(x, 200, json);
}

/* ---------------------------------------------------------------- all routes */

static enum MHD_Result openapi(http_exchange *x)
{
    struct MHD_Response *response = http_copy(x, x->http->openapi, x->http->openapi_bytes,
                                              "application/json");
    if (response) http_header(x, response, "Cache-Control", "no-cache");
    return http_send(x, 200, response);
}

enum MHD_Result http_route(http_exchange *x)
{
    enum MHD_Result result;
    static const char videos[] = "/v1/videos";
    const size_t n = sizeof videos - 1;
    if (strncmp(x->url, videos, n) == 0 && (x->url[n] == 0 || x->url[n] == '/'))
        return http_videos(x, x->url + n);
    static const char *const known[] = { "/health", "/v1/models", "/metrics", "/openapi.json" };
    int at = 0;
    while (at < 4 && strcmp(x->url, known[at]) != 0) at++;
    const int reads = strcmp(x->method, "GET") == 0 || strcmp(x->method, "HEAD") == 0;
    if (at < 4 && !reads) return http_error(x, 405, "GET, HEAD", "'%s' takes GET only.", x->url);
    switch (at) {
    case 0: return health(x);
    case 1: return models(x, NULL);
    case 2: return http_metrics(x);
    case 3: return openapi(x);
    default: break;
    }
    if (reads && http_asset(x, x->url, &result)) return result;
    return http_error(x, 404, "", "There is nothing at '%.100s'.", x->url);
}
