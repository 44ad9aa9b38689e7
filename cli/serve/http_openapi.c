/* http_openapi.c - /openapi.json: what api/openapi.json says, with the options of "esa" from the
 * command's own table and this server's limits.
 * SPDX-License-Identifier: Apache-2.0 */
#include "serve/http.h"

#include <stdlib.h>
#include <string.h>

/* cli/serve/api/openapi.json, put into the command by the build. */
extern const unsigned char esa_asset_openapi_json[];

static int fill_in(json_t *api, const serve_rules *rules)
{
    json_t *schemas = cli_json_at(api, "components.schemas"),
           *fields = cli_json_at(schemas, "Request.properties"), *esa = serve_esa_schema();
    json_t *models = json_array();
    for (int i = 0; i < rules->models; i++)
        json_array_append_new(models, json_string(rules->model[i].name));
    int failed = json_object_set_new(schemas, "Esa", esa);
    failed |= json_object_set_new(json_object_get(fields, "model"), "enum", models);
    failed |= json_object_set_new(json_object_get(fields, "prompt"), "maxLength",
                                  json_integer(rules->max_prompt));
    failed |= json_object_set_new(json_object_get(api, "info"), "version",
                                  json_string(esa_version()));
    if (!rules->key) failed |= json_object_del(api, "security");
    return failed;
}

int http_openapi_make(serve_http *http)
{
    json_error_t error;
    json_t *api = json_loads((const char *)esa_asset_openapi_json, 0, &error);
    if (!api || fill_in(api, &http->hub->rules)) {
        json_decref(api);
        return cli_fail("serve: the description of the API cannot be made: %s", error.text);
    }
    http->openapi = json_dumps(api, JSON_INDENT(1));
    json_decref(api);
    if (!http->openapi) return cli_fail("serve: out of memory");
    http->openapi_bytes = strlen(http->openapi);
    return CLI_OK;
}
