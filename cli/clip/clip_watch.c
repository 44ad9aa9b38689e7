/* clip_watch.c - shows progress while a clip is made, and stops on a signal.
 * SPDX-License-Identifier: Apache-2.0 */
#include "clip/clip.h"

#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/select.h>
#include <unistd.h>

/* Atomic: the threads of a server look at them while another one gets the signal. */
static atomic_int interrupted, at_terminal;

/* A layer of a large model takes minutes, so a second signal ends the process at once. Files under
 * their final names are whole at any moment. */
static void on_signal(int number)
{
    static const char hint[] =
        "\ninterrupted: stops after this layer; press again to stop at once\n";
    (void)number;
    if (interrupted) _exit(CLIP_INTERRUPTED);
    interrupted = 1;
    if (at_terminal && write(2, hint, sizeof hint - 1) < 0) at_terminal = 0;
}

/* Signals that were ignored at the start stay ignored: nohup and shells ignore them for jobs that
 * go on in the background. Without SA_RESTART a signal also ends a call that waits, such as reading
 * from a pipe to which nobody writes. */
void clip_catch_signals(void)
{
    static const int numbers[] = { SIGINT, SIGTERM, SIGHUP };
    struct sigaction action, before;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    sigemptyset(&action.sa_mask);
    at_terminal = isatty(2);
    for (int i = 0; i < 3; i++)
        if (sigaction(numbers[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN)
            sigaction(numbers[i], &action, NULL);
}

int clip_interrupted(void) { return interrupted; }

/* The signals are blocked between the look at `interrupted` and the wait, so none is missed. */
int clip_wait_input(void)
{
    sigset_t ours, before;
    sigemptyset(&ours);
    sigaddset(&ours, SIGINT);
    sigaddset(&ours, SIGTERM);
    sigaddset(&ours, SIGHUP);
    sigprocmask(SIG_BLOCK, &ours, &before);
    fd_set input;
    FD_ZERO(&input);
    FD_SET(STDIN_FILENO, &input);
    if (!interrupted) pselect(STDIN_FILENO + 1, &input, NULL, NULL, NULL, &before);
    sigprocmask(SIG_SETMASK, &before, NULL);
    return interrupted;
}

void clip_clock(char out[24], double seconds)
{
    const long s = seconds < 1e8 ? (long)ceil(seconds) : 99999999;
    if (s < 3600)
        snprintf(out, 24, "%ld:%02ld", s / 60, s % 60);
    else
        snprintf(out, 24, "%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
}

int32_t clip_progress(void *user, const esa_progress *p)
{
    clip_watch *w = user;
    if (interrupted) return 1;
    const int news = p->stage != w->stage || p->done != w->done, terminal = isatty(2);
    if (!news) return 0;
    w->stage = p->stage;
    w->done = p->done;
    if (p->stage == ESA_STAGE_TEXT || p->total < 1) return 0;
    if (p->stage == ESA_STAGE_LOAD) {
        if (terminal && p->seconds > 1)
            fprintf(stderr, "\r\033[K%s: %.1f of %.1f GB", w->label, 1e-3 * p->done,
                    1e-3 * p->total);
        fflush(stderr);
        return 0;
    }
    char line[240], left[24];
    int used = 0;
    if (p->stage == ESA_STAGE_DENOISE) {
        used = snprintf(line, sizeof line, "step %d/%d", p->done, p->total);
        if (p->done) {
            clip_clock(left,
                       p->unit_seconds * (double)(p->total - p->done + w->clips_left * p->total));
            used += snprintf(line + used, sizeof line - (size_t)used, ", %.2f s/step, %s left",
                             p->unit_seconds, left);
        }
        if (!isnan(p->density))
            snprintf(line + used, sizeof line - (size_t)used, ", density %.3f", p->density);
    } else
        snprintf(line, sizeof line, "decoding %d/%d", p->done, p->total);
    if (terminal) {
        char bar[25];
        const int filled = 24 * p->done / p->total;
        for (int i = 0; i < 24; i++) bar[i] = i < filled ? '#' : '.';
        bar[24] = 0;
        fprintf(stderr, "\r\033[K%s [%s] %s", w->label, bar, line);
        fflush(stderr);
    } else if (w->quiet) {
        return 0;
    } else if (p->done == p->total || (p->stage == ESA_STAGE_DENOISE && p->done))
        fprintf(stderr, "%s: %s\n", w->label, line);
    return 0;
}
