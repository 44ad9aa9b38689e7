/* report_carry.c - the table of anchors: which steps ran dense beside sparse, and how old the
 * differences were that the others added.
 * SPDX-License-Identifier: Apache-2.0
 *
 * It is written here, not by a script, so that the page shows it without scripts. */
#include "report/report.h"

#include <math.h>

/* The most steps of a row. */
static int64_t longest(const report_page *p)
{
    int64_t steps = 0;
    for (int r = 0; r < p->run_count; r++)
        for (int i = 0; i < p->runs[r].variant_count; i++) {
            const report_variant *v = &p->runs[r].variants[i];
            if (v->carry && v->carry_count > steps) steps = v->carry_count;
        }
    return steps;
}

static void head(report_text *t, int64_t steps)
{
    report_puts(t, "<div class=\"card scroll\" id=\"carry\"><h3>Carry</h3><p class=\"hint\">At its "
                   "anchors (●) a layer runs dense and sparse and keeps the difference; the other "
                   "steps add it. Numbers: its age in steps. Steps count from 0, as --carry "
                   "does.</p><table class=\"steps\"><caption class=\"visually-hidden\">Anchors and "
                   "the age of carried differences, step by step</caption><thead><tr><th "
                   "scope=\"col\">variant</th><th scope=\"col\">anchors</th><th scope=\"col\">mean "
                   "age</th>");
    for (int64_t s = 0; s < steps; s++) report_printf(t, "<th scope=\"col\">%ld</th>", s);
    report_puts(t, "</tr></thead><tbody>");
}

static void row(report_text *t, const report_page *p, int run, int i)
{
    const report_variant *v = &p->runs[run].variants[i];
    char colour[32], number[32];
    report_printf(t, "<tr><th scope=\"row\"><span class=\"key\" style=\"%s\"></span>",
                  report_tone(colour, p, run, i));
    report_name(t, p, run, v->label);
    snprintf(number, sizeof number, "%.1f", v->figure[REPORT_AGE]);
    report_printf(t, "</th><td>%g</td><td>%s</td>", v->figure[REPORT_ANCHORS],
                  isfinite(v->figure[REPORT_AGE]) ? number : "–");
    for (int64_t s = 0; s < v->carry_count; s++) { /* shorter rows end early */
        const double age = v->carry[s];
        if (age == 0)
            report_puts(t, "<td>●</td>");
        else if (isfinite(age))
            report_printf(t, "<td>%g</td>", round(10 * age) / 10);
        else
            report_puts(t, "<td></td>");
    }
    report_puts(t, "</tr>");
}

void report_carry(report_text *t, const report_page *p)
{
    const int64_t steps = longest(p);
    if (!steps) return;
    head(t, steps);
    for (int r = 0; r < p->run_count; r++)
        for (int i = 0; i < p->runs[r].variant_count; i++)
            if (p->runs[r].variants[i].carry) row(t, p, r, i);
    report_puts(t, "</tbody></table></div>");
}
