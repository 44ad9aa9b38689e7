/* cmd_serve.c - `esa serve`: options, threads, signals. The work is in cli/serve.
 * SPDX-License-Identifier: Apache-2.0 */
#include "serve/serve.h"

#include <stdlib.h>
#include <string.h>

#ifndef ESA_MICROHTTPD /* set by the build where it found the header */
int serve_http_start(serve_http **http, serve_hub *hub, const char *host, int port)
{
    (void)hub, (void)host, (void)port;
    *http = NULL;
    return cli_fail("serve: this esa was built without libmicrohttpd; install libmicrohttpd-dev (on "
                    "Debian and Ubuntu: sudo apt-get install libmicrohttpd-dev) and build it "
                    "again");
}
int serve_http_port(const serve_http *http) { return http != NULL; }
void serve_http_tick(serve_http *http) { (void)http; }
void serve_http_stop(serve_http *http) { (void)http; }
#endif

int64_t serve_queue_length(const serve_hub *hub) { return hub->count; }

int cmd_serve(int argc, char **argv)
{
    static serve_hub hub;
    serve_http *http = NULL;
    int64_t port = 8000;
    int done;
    const cli_option table[] = {
        { "--port", CLI_INT, &port, "N", 0, 65535, 0, "the port; 0: any that is free (8000)" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    int status = cli_options("esa serve", "[options]",
                             "Answers requests for videos over HTTP, one after the other, with a "
                             "model that stays in memory.",
                             table, argc, argv, NULL, &done);
    if (status || done) return status;
    pthread_mutex_init(&hub.lock, NULL);
    clip_catch_signals();
    status = serve_http_start(&http, &hub, "127.0.0.1", (int)port);
    if (!status) {
        printf("esa serve: http://127.0.0.1:%d/\n", serve_http_port(http));
        fflush(stdout);
    }
    while (!status && !clip_interrupted()) {
        const struct timespec nap = { 0, 200000000 };
        nanosleep(&nap, NULL);
        serve_http_tick(http);
    }
    serve_http_stop(http);
    return status;
}
