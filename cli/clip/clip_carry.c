/* clip_carry.c - carried differences of a clip: the option --carry, and what was done.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Only the library knows how many anchors suit a run (esa_carry_anchors). */
#include "clip/clip.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define EXPECTED                                                                                   \
    "expected auto, off, a number of anchors from 1 to %d, or the steps of the anchors in "        \
    "ascending order, such as 0,5,10,18"

/* The number that text begins with, and what is behind it; -1: none. */
static int32_t number(const char *text, const char **end)
{
    char *behind;
    errno = 0;
    const long value = strtol(text, &behind, 10);
    *end = behind;
    if (*text < '0' || *text > '9' || errno || value > CLIP_MOST_STEPS) return -1;
    return (int32_t)value;
}

static int wrong(const char *text, const char *what)
{
    return cli_usage("%s: --carry was given '%.60s', " EXPECTED, what, text, CLIP_MOST_STEPS);
}

/* Reads steps with commas between them. */
static int read_steps(clip_anchors *a, const char *text, const char *what)
{
    const char *end = text;
    for (const char *at = text;; at = end + 1) {
        const int32_t step = number(at, &end), before = a->count ? a->step[a->count - 1] : -1;
        if (step < 0 || (*end && *end != ',')) return wrong(text, what);
        if (a->count == CLIP_MOST_ANCHORS)
            return cli_usage("%s: --carry names more than %d steps", what, CLIP_MOST_ANCHORS);
        if (step == before) return cli_usage("%s: --carry names step %d twice", what, step);
        if (step < before)
            return cli_usage("%s: --carry names step %d behind step %d, expected ascending steps",
                             what, step, before);
        a->step[a->count++] = step;
        if (!*end) break;
    }
    a->carry = a->count;
    return CLI_OK;
}

int clip_carry_parse(clip_anchors *a, const char *text, const char *what)
{
    const char *end = text;
    *a = (clip_anchors){ .carry = ESA_CARRY_OFF };
    if (strcmp(text, "off") == 0) return CLI_OK;
    if (strcmp(text, "auto") == 0) {
        a->carry = ESA_CARRY_AUTO;
        return CLI_OK;
    }
    if (strchr(text, ',')) return read_steps(a, text, what);
    a->carry = number(text, &end);
    return a->carry < 1 || *end ? wrong(text, what) : CLI_OK;
}

int clip_carry_fits(const clip_anchors *a, int32_t steps, const char *what)
{
    if (a->count && a->step[a->count - 1] >= steps)
        return cli_usage("%s: --carry names step %d, but the run has %d step%s, 0 to %d", what,
                         a->step[a->count - 1], steps, steps == 1 ? "" : "s", steps - 1);
    if (a->carry > steps)
        return cli_usage("%s: --carry asks for %d anchors, but the run has %d step%s", what,
                         a->carry, steps, steps == 1 ? "" : "s");
    return CLI_OK;
}

void clip_carry_name(char out[CLIP_CARRY_TEXT], const clip_anchors *a)
{
    size_t used = 0;
    if (a->carry <= 0)
        snprintf(out, CLIP_CARRY_TEXT, "%s", a->carry ? "auto" : "off");
    else if (!a->count)
        snprintf(out, CLIP_CARRY_TEXT, "%d", a->carry);
    for (int i = 0; i < a->count; i++)
        used += (size_t)snprintf(out + used, CLIP_CARRY_TEXT - used, "%s%d", i ? "," : "",
                                 a->step[i]);
}

/* ---------------------------------------------------------------- what was done */

int clip_anchor_steps(int32_t *steps, const clip_record *r)
{
    int count = 0;
    for (int32_t i = 0; i < r->steps; i++)
        if (r->step_anchors[i] > 0) {
            if (steps) steps[count] = i;
            count++;
        }
    return count;
}

void clip_carry_json(cli_json *json, const clip_record *r)
{
    const esa_session_stats *t = &r->stats.session;
    int32_t *steps = malloc(((size_t)r->steps + 1) * sizeof *steps);
    const int carried = t->anchor_calls > 0;
    char format[32];
    cli_json_open(json, "carry", '{');
    cli_json_text(json, "asked", r->carry);
    cli_json_text(json, "format",
                  carried ? cli_name(format, CLIP_CARRY_FORMATS, r->carry_format) : NULL);
    cli_json_fields(json, "anchor_calls %ld carried_calls %ld age %g bytes %ld host_bytes %ld",
                    t->anchor_calls, t->carried_calls, t->carry_age, t->carry_bytes,
                    t->carry_host_bytes);
    if (steps)
        cli_json_ints(json, "anchors", steps, clip_anchor_steps(steps, r));
    else
        cli_json_add(json, "anchors", NULL); /* out of memory: saving it says so */
    cli_json_reals(json, "step_age", r->step_age, carried ? r->steps : 0);
    cli_json_close(json);
    free(steps);
}

void clip_carry_print(FILE *out, const clip_record *r)
{
    const esa_session_stats *t = &r->stats.session;
    const int count = clip_anchor_steps(NULL, r);
    if (!t->anchor_calls) return;
    fprintf(out, "carry: %d anchor%s, step%s", count, count == 1 ? "" : "s", count == 1 ? "" : "s");
    for (int32_t i = 0, shown = 0; i < r->steps; i++)
        if (r->step_anchors[i] > 0) fprintf(out, "%s%d", shown++ ? ", " : " ", i);
    if (t->carried_calls) fprintf(out, "; d is %.1f steps old in the mean", t->carry_age);
    fprintf(out, ", and takes %.1f MB", 1e-6 * (double)(t->carry_bytes + t->carry_host_bytes));
    if (t->carry_host_bytes)
        fprintf(out, " (%.1f MB of them in host memory)", 1e-6 * (double)t->carry_host_bytes);
    fputc('\n', out);
}
