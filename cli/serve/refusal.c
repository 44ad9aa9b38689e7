/* refusal.c - why a request is refused: a status, one sentence, and the field it is about.
 * SPDX-License-Identifier: Apache-2.0 */
#include "serve/serve.h"

#include <stdarg.h>
#include <string.h>

int serve_refuse(serve_refusal *refusal, int code, const char *param, const char *format, ...)
{
    va_list args;
    refusal->code = code;
    snprintf(refusal->param, sizeof refusal->param, "%s", param ? param : "");
    va_start(args, format);
    vsnprintf(refusal->message, sizeof refusal->message, format, args);
    va_end(args);
    return code;
}

static const char *type_of(int code)
{
    switch (code) {
    case 401:
    case 403: return "authentication_error";
    case 404: return "not_found_error";
    case 409: return "conflict_error";
    case 429: return "rate_limit_error";
    default: return code >= 500 ? "server_error" : "invalid_request_error";
    }
}

cli_json *serve_refusal_json(const serve_refusal *refusal)
{
    cli_json *json = cli_json_new();
    const int names_field = refusal->param[0] && refusal->code != 405;
    cli_json_open(json, "error", '{');
    cli_json_fields(json, "code %d type %s message %s param %s", refusal->code,
                    type_of(refusal->code), refusal->message, names_field ? refusal->param : NULL);
    cli_json_close(json);
    return json;
}
