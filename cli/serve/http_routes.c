/* http_routes.c - which request gets which answer.
 * SPDX-License-Identifier: Apache-2.0 */
#include "serve/http.h"

#include <string.h>

static enum MHD_Result health(http_exchange *x)
{
    serve_hub *hub = x->http->hub;
    cli_json *json = cli_json_new();
    pthread_mutex_lock(&hub->lock);
    cli_json_fields(json, "status %s queue %ld running %s", "ok", serve_queue_length(hub),
                    hub->running ? hub->running->id : NULL);
    pthread_mutex_unlock(&hub->lock);
    return http_json(x, 200, json);
}

enum MHD_Result http_route(http_exchange *x)
{
    enum MHD_Result result;
    if (strcmp(x->url, "/health") == 0) return health(x);
    if (http_asset(x, x->url, &result)) return result;
    return http_error(x, 404, "", "There is nothing at '%s'.", x->url);
}
