/* http_guard.c - who may ask: the key, and what browsers of other sites may not do.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A server without a key listens on the loopback device, where every page in a browser of this
 * machine can reach it. Such a page cannot hide its origin, and a name that its owner points to
 * 127.0.0.1 shows in the Host header. */
#include "serve/http.h"

#include <arpa/inet.h>
#include <string.h>
#include <strings.h>

/* Takes the same time for any two texts whose first has this length. */
static int same_key(const char *key, const char *given)
{
    const size_t n = strlen(key), m = strlen(given);
    unsigned char different = n != m;
    for (size_t i = 0; i < n; i++) different |= (unsigned char)(key[i] ^ given[m ? i % m : 0]);
    return m > 0 && !different;
}

/* What may be read without a key: the page, which asks for it, and what says nothing of anyone. */
static int is_open(const char *url)
{
    return strncmp(url, "/v1/", 4) != 0 && strcmp(url, "/metrics") != 0;
}

/* 1 if a Host header names this machine by an address, as localhost, or as --host did. */
static int is_own_host(const serve_http *http, const char *host)
{
    char name[256];
    unsigned char address[16];
    const char *end = host[0] == '[' ? strchr(host, ']') : strchr(host, ':');
    const size_t skip = host[0] == '[', n = end ? (size_t)(end - host) - skip : strlen(host);
    if (n < 1 || n >= sizeof name) return 0;
    memcpy(name, host + skip, n);
    name[n] = 0;
    return strcasecmp(name, "localhost") == 0 || strcasecmp(name, http->host) == 0 ||
           inet_pton(AF_INET, name, address) == 1 || inet_pton(AF_INET6, name, address) == 1;
}

int http_guard(http_exchange *x, serve_refusal *refusal)
{
    const serve_rules *rules = &x->http->hub->rules;
    const char *host = http_request_header(x, "Host"), *origin = http_request_header(x, "Origin"),
               *given = http_request_header(x, "Authorization");
    if (!rules->key && host && !is_own_host(x->http, host))
        return serve_refuse(refusal, 403, "",
                            "Without a key, this server answers only to its address or to "
                            "localhost, not to '%.80s'.",
                            host);
    const char *site = origin ? strstr(origin, "://") : NULL;
    if (origin && (!site || !host || strcasecmp(site + 3, host) != 0))
        return serve_refuse(refusal, 403, "", "Pages of other sites may not use this server.");
    if (!rules->key || is_open(x->url)) return 0;
    if (given && strncasecmp(given, "Bearer ", 7) == 0 && same_key(rules->key, given + 7)) return 0;
    return serve_refuse(refusal, 401, "",
                        given ? "The key is not the server's."
                              : "A key is needed: Authorization: Bearer KEY.");
}
