/* clerk.c - the clerk's thread: what takes longer than an answer may wait for.
 * SPDX-License-Identifier: Apache-2.0 */
#include "serve/serve.h"

#include <stdlib.h>
#include <string.h>

void serve_errand_free(serve_errand *e)
{
    if (!e) return;
    free(e->content_type);
    free(e->body);
    free(e);
}

void serve_errand_give(serve_hub *hub, serve_errand *errand)
{
    serve_errand **last = &hub->errands;
    while (*last) last = &(*last)->next;
    *last = errand;
    pthread_cond_signal(&hub->clerk_wake);
}

static void create(serve_hub *hub, serve_errand *e)
{
    serve_wish wish;
    serve_settings settings;
    int code = serve_wish_read(&wish, &e->refusal, &hub->rules, e->content_type, e->body, e->bytes);
    if (code) return;
    code = serve_settings_read(&settings, &e->refusal, &hub->rules, wish.fields,
                               wish.image ? "a picture" : NULL);
    if (!code) {
        serve_job_create(hub, &e->job, &e->refusal, &wish, &settings);
        serve_settings_free(&settings);
    }
    serve_wish_free(&wish);
}

void *serve_clerk(void *user)
{
    serve_hub *hub = user;
    pthread_mutex_lock(&hub->lock);
    for (;;) {
        while (!hub->errands && !hub->stop) pthread_cond_wait(&hub->clerk_wake, &hub->lock);
        serve_errand *e = hub->errands;
        if (!e) break; /* errands that came before the stop are done */
        hub->errands = e->next;
        e->next = NULL;
        pthread_mutex_unlock(&hub->lock);
        if (e->kind == SERVE_CREATE)
            create(hub, e);
        else
            serve_job_delete(hub, &e->refusal, e->id);
        pthread_mutex_lock(&hub->lock);
        e->done = 1;
        hub->answered(hub->user, e);
    }
    pthread_mutex_unlock(&hub->lock);
    return NULL;
}
