/* cmd_serve.c - `esa serve`: options, threads, signals. The work is in cli/serve.
 * SPDX-License-Identifier: Apache-2.0 */
#include "serve/start.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifndef ESA_MICROHTTPD /* set by the build where it found the header */
int serve_http_ready(void)
{
    return cli_fail(
        "serve: this esa was built without libmicrohttpd; install libmicrohttpd-dev (on "
        "Debian and Ubuntu: sudo apt-get install libmicrohttpd-dev) and build it "
        "again");
}
int serve_http_port(const serve_http *http) { return http != NULL; }
void serve_http_tick(serve_http *http) { (void)http; }
void serve_http_stop(serve_http *http) { (void)http; }
#endif

static void say_ready(const serve_options *o, const serve_hub *hub, int port)
{
    const int six = strchr(o->host, ':') != NULL;
    printf("esa serve: http://%s%s%s:%d/\n", six ? "[" : "", o->host, six ? "]" : "", port);
    printf("models    ");
    for (int i = 0; i < hub->rules.models; i++)
        printf("%s%s", i ? ", " : "", hub->rules.model[i].name);
    printf("\nvideos in %s; Ctrl-C stops\n", hub->rules.folder);
    fflush(stdout);
}

/* Runs until a signal. The worker ends within a few blocks of the running video, which is failed;
 * videos that wait are made when a server starts on the folder again. */
static int run(const serve_options *o, serve_hub *hub)
{
    serve_http *http = NULL;
    pthread_t clerk, worker;
    int status = serve_http_start(&http, hub, o->host, (int)o->port);
    const int has_clerk = !status && pthread_create(&clerk, NULL, serve_clerk, hub) == 0,
              has_worker = has_clerk && pthread_create(&worker, NULL, serve_worker, hub) == 0;
    if (!status && !has_worker) status = cli_fail("serve: a thread could not be started");
    if (!status) say_ready(o, hub, serve_http_port(http));
    while (!status && !clip_interrupted()) {
        const struct timespec nap = { 0, 200000000 };
        nanosleep(&nap, NULL);
        serve_http_tick(http);
    }
    pthread_mutex_lock(&hub->lock);
    hub->stop = 1;
    pthread_cond_broadcast(&hub->clerk_wake);
    pthread_cond_broadcast(&hub->worker_wake);
    pthread_mutex_unlock(&hub->lock);
    if (has_worker) pthread_join(worker, NULL);
    if (has_clerk) pthread_join(clerk, NULL);
    serve_http_stop(http);
    if (!status) printf("esa serve: stopped\n");
    return status;
}

int cmd_serve(int argc, char **argv)
{
    static serve_hub hub; /* large; its models and names */
    static serve_options o;
    int done = 0;
    int status = serve_options_read(&o, &hub.rules, argc, argv, &done);
    if (status || done) return status;
    clip_catch_signals();
    status = serve_http_ready();
    if (!status) status = serve_models_look(&hub.rules, &o);
    if (!status) {
        status = serve_hub_open(&hub);
        if (!status) status = run(&o, &hub);
        serve_hub_close(&hub);
    }
    serve_rules_free(&hub.rules);
    return status;
}
