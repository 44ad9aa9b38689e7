/* report_page.c - the page: cli/report/page.html, whose marks <!--esa:name--> are filled in. Tables
 * and videos are written here, so that they are there without scripts; charts and mask pictures are
 * drawn by the page from its JSON.
 * SPDX-License-Identifier: Apache-2.0
 *
 * <!--esa:if name--> ... <!--esa:end--> leaves out what lies between where there is nothing to
 * show. Such parts do not nest. */
#include "report/report.h"

#include <math.h>
#include <string.h>

/* From the build: cmake/embed.cmake. */
extern const unsigned char esa_asset_page_html[], esa_asset_page_css[], esa_asset_core_js[],
    esa_asset_charts_js[], esa_asset_players_js[], esa_asset_masks_js[], esa_asset_heads_js[];

static int has_quality(const report_page *p)
{
    for (int r = 0; r < p->run_count; r++)
        if (p->runs[r].value[REPORT_QUALITY]) return 1;
    return 0;
}

static int has_speed(const report_page *p)
{
    for (int r = 0; r < p->run_count; r++)
        if (p->runs[r].value[REPORT_SPEED]) return 1;
    return 0;
}

static int has_heads(const report_page *p)
{
    for (int r = 0; r < p->run_count; r++)
        for (int v = 0; v < p->runs[r].variant_count; v++)
            if (p->runs[r].variants[v].head_density) return 1;
    return p->mask_count > 0;
}

static int has_videos(const report_page *p)
{
    for (int r = 0; r < p->run_count && p->videos && p->max_clips > 0; r++)
        for (int v = 0; v < p->runs[r].variant_count; v++)
            for (int64_t c = 0; c < p->runs[r].clip_count; c++)
                if (p->runs[r].variants[v].clips[c].video) return 1;
    return 0;
}

/* The number of a colour: as core.js counts them. */
static int tone_of(const report_page *p, int run, int variant)
{
    int next = 0;
    for (int r = 0; r <= run; r++)
        for (int v = 0; v < (r == run ? variant : p->runs[r].variant_count); v++)
            next += !p->runs[r].variants[v].dense;
    return next % 8;
}

static void tone(report_text *t, const report_page *p, int run, int variant)
{
    if (p->runs[run].variants[variant].dense)
        report_puts(t, "--tone:var(--dense)");
    else
        report_printf(t, "--tone:var(--s%d)", tone_of(p, run, variant));
}

static void figure(report_text *t, double x, int digits, const char *unit)
{
    if (isfinite(x))
        report_printf(t, "%.*f%s", digits, x, unit);
    else
        report_puts(t, "–");
}

/* ---------------------------------------------------------------- the head of the page */

static void facts(report_text *t, const report_page *p)
{
    const report_run *r = &p->runs[0];
    if (p->run_count == 0) return;
    const json_t *about = r->value[REPORT_SPEED] ? r->value[REPORT_SPEED] : r->value[REPORT_CONFIG];
    const char *cpu = cli_json_string(about, "machine.cpu"),
               *commit = cli_json_string(about, "commit"),
               *kernels = cli_json_string(about, "machine.kernels");
    const double cores = cli_json_number(about, "machine.cores"),
                 tokens = cli_json_number(r->value[REPORT_SPEED], "tokens");
    int same = 1;
    for (int i = 1; i < p->run_count; i++)
        same = same && strcmp(p->runs[i].setting, r->setting) == 0;
    report_puts(t, "<ul class=\"facts\">");
    if (same && r->frames) {
        report_puts(t, "<li>model <b>");
        report_html(t, r->model);
        report_printf(
            t,
            "</b></li><li><b>%lld</b> frames of <b>%lld × %lld</b></li><li><b>%lld</b> steps</li>",
            (long long)r->frames, (long long)r->width, (long long)r->height,
            (long long)r->step_count);
        if (isfinite(tokens)) report_printf(t, "<li><b>%.0f</b> tokens</li>", tokens);
    } else
        report_printf(t, "<li><b>%d</b> runs</li>", p->run_count);
    if (same && cpu) {
        report_puts(t, "<li>");
        report_html(t, cpu);
        if (isfinite(cores)) report_printf(t, ", %.0f cores", cores);
        if (kernels) {
            report_puts(t, ", ");
            report_html(t, kernels);
        }
        report_puts(t, "</li>");
    }
    if (same && commit) {
        report_puts(t, "<li>commit <code>");
        report_html(t, commit);
        report_puts(t, "</code></li>");
    }
    report_puts(t, "</ul>");
}

/* The largest figures of the sparse variants, while they are few enough to be read at a glance. */
static void tiles(report_text *t, const report_page *p)
{
    int sparse = 0;
    for (int r = 0; r < p->run_count; r++)
        for (int v = 0; v < p->runs[r].variant_count; v++) sparse += !p->runs[r].variants[v].dense;
    if (sparse == 0 || sparse > 6) return;
    report_puts(t, "<div class=\"tiles\">");
    for (int r = 0; r < p->run_count; r++)
        for (int i = 0; i < p->runs[r].variant_count; i++) {
            const report_variant *v = &p->runs[r].variants[i];
            if (v->dense) continue;
            report_puts(t, "<div class=\"tile\" style=\"");
            tone(t, p, r, i);
            report_puts(t, "\"><div class=\"soft small\">");
            if (p->run_count > 1) {
                report_html(t, p->runs[r].tag);
                report_puts(t, " · ");
            }
            report_html(t, v->label);
            report_puts(t, "</div><div class=\"big\">");
            if (isfinite(v->speedup)) {
                figure(t, v->speedup, 2, "×");
                report_puts(t, v->speedup >= 1 ? "<small>faster</small>"
                                               : "<small>of the dense speed</small>");
            } else {
                figure(t, v->psnr, 1, "");
                report_puts(t, "<small>dB</small>");
            }
            report_puts(t, "</div><dl>");
            if (v->identical)
                report_puts(t, "<div><dt>PSNR</dt><dd>equal, bit for bit</dd></div>");
            else if (isfinite(v->psnr)) {
                report_puts(t, "<div><dt>PSNR</dt><dd>");
                figure(t, v->psnr, 1, " dB");
                report_puts(t, "</dd></div>");
            }
            if (isfinite(v->ssim)) {
                report_puts(t, "<div><dt>SSIM</dt><dd>");
                figure(t, v->ssim, 3, "");
                report_puts(t, "</dd></div>");
            }
            report_puts(t, "</dl></div>");
        }
    report_puts(t, "</div>");
}

static void table(report_text *t, const report_page *p)
{
    int lpips = 0;
    for (int r = 0; r < p->run_count; r++)
        for (int v = 0; v < p->runs[r].variant_count; v++)
            lpips |= isfinite(p->runs[r].variants[v].lpips);
    report_puts(t, "<div class=\"card scroll\"><table><caption class=\"visually-hidden\">Speed and "
                   "quality of every variant</caption><thead><tr><th scope=\"col\">variant</th>"
                   "<th scope=\"col\">density</th><th scope=\"col\">time per video</th><th "
                   "scope=\"col\">time per step</th><th scope=\"col\">speedup</th>"
                   "<th scope=\"col\">without warm-up</th><th scope=\"col\">PSNR</th><th "
                   "scope=\"col\">SSIM</th>");
    if (lpips) report_puts(t, "<th scope=\"col\">LPIPS</th>");
    report_puts(t, "<th scope=\"col\">flicker</th></tr></thead><tbody>");
    for (int r = 0; r < p->run_count; r++)
        for (int i = 0; i < p->runs[r].variant_count; i++) {
            const report_variant *v = &p->runs[r].variants[i];
            report_puts(t, "<tr><th scope=\"row\"><span class=\"key\" style=\"");
            tone(t, p, r, i);
            report_puts(t, "\"></span>");
            if (p->run_count > 1) {
                report_html(t, p->runs[r].tag);
                report_puts(t, " · ");
            }
            report_html(t, v->label);
            report_puts(t, "</th><td>");
            figure(t, v->density, 3, "");
            report_puts(t, "</td><td>");
            figure(t, v->seconds, 2, " s");
            report_puts(t, "</td><td>");
            figure(t, v->step_seconds, 3, " s");
            report_puts(t, "</td><td>");
            figure(t, v->speedup, 2, "×");
            report_puts(t, "</td><td>");
            figure(t, v->sparse_speedup, 2, "×");
            report_puts(t, "</td><td>");
            if (v->dense)
                report_puts(t, "reference");
            else if (v->identical)
                report_puts(t, "equal");
            else
                figure(t, v->psnr, 2, " dB");
            report_puts(t, "</td><td>");
            figure(t, v->dense ? NAN : v->ssim, 4, "");
            if (lpips) {
                report_puts(t, "</td><td>");
                figure(t, v->dense ? NAN : v->lpips, 4, "");
            }
            report_puts(t, "</td><td>");
            figure(t, v->dense ? NAN : v->flicker, 2, "");
            report_puts(t, "</td></tr>");
        }
    report_puts(t, "</tbody></table></div>");
}

static void notes(report_text *t, const report_page *p)
{
    for (int r = 0; r < p->run_count; r++)
        for (int f = 0; f < 3; f++)
            if (!p->runs[r].value[f]) {
                report_printf(t, "<p class=\"note\">There is no <code>%s</code> in the results of ",
                              report_file_names[f]);
                report_html(t, p->runs[r].tag);
                report_puts(t, ": what it would say is left out.</p>");
            }
}

/* ---------------------------------------------------------------- videos */

static void player(report_text *t, report_page *p, int run, int i, int64_t clip)
{
    const report_run *r = &p->runs[run];
    const report_variant *v = &r->variants[i];
    const report_clip_figures *c = &v->clips[clip];
    report_text stage = { 0 };
    char label[400];
    p->media.frames = 0;
    snprintf(label, sizeof label, "%s: %.280s", v->label, r->prompts[clip] ? r->prompts[clip] : "");
    if (c->video)
        report_media_embed(&stage, &p->media, c->video, label);
    else
        report_puts(&stage, "<p class=\"why\">No video of this variant.</p>");
    report_puts(t, "<figure class=\"player\"");
    if (p->media.frames > 0)
        report_printf(t, " data-fps=\"%.6g\" data-frames=\"%lld\"", p->media.fps,
                      (long long)p->media.frames);
    if (v->dense) report_puts(t, " data-reference");
    report_puts(t, "><div class=\"stage\">");
    if (stage.failed)
        t->failed = 1;
    else
        report_put(t, stage.text ? stage.text : "", stage.used);
    report_text_free(&stage);
    report_puts(t, "</div><figcaption><span class=\"key\" style=\"");
    tone(t, p, run, i);
    report_puts(t, "\"></span><b>");
    report_html(t, v->label);
    report_puts(t, "</b>");
    if (!v->dense) {
        report_puts(t, "<br><span class=\"soft num\">");
        if (isfinite(v->speedup)) figure(t, v->speedup, 2, "× · ");
        if (c->identical)
            report_puts(t, "equal to dense");
        else {
            figure(t, c->psnr, 2, " dB · SSIM ");
            figure(t, c->ssim, 4, "");
        }
        report_puts(t, "</span>");
    }
    report_puts(t, "</figcaption></figure>");
}

static void videos(report_text *t, report_page *p)
{
    int64_t all = 0, number = 0;
    for (int r = 0; r < p->run_count; r++)
        all += p->runs[r].clip_count < p->max_clips ? p->runs[r].clip_count : p->max_clips;
    if (all > 1)
        report_puts(t, "<div class=\"controls no-print\" style=\"margin-bottom:.8rem\"><label "
                       "class=\"grow\">Prompt <select id=\"clip\">");
    for (int r = 0; r < p->run_count && all > 1; r++)
        for (int64_t c = 0; c < p->runs[r].clip_count && c < p->max_clips; c++, number++) {
            report_printf(t, "<option value=\"%lld\">", (long long)number);
            if (p->run_count > 1) {
                report_html(t, p->runs[r].tag);
                report_puts(t, " · ");
            }
            report_html(t, p->runs[r].prompts[c] ? p->runs[r].prompts[c] : "?");
            report_puts(t, "</option>");
        }
    if (all > 1) report_puts(t, "</select></label></div>");
    for (int r = 0; r < p->run_count; r++)
        for (int64_t c = 0; c < p->runs[r].clip_count && c < p->max_clips; c++) {
            report_printf(t, "<div class=\"clip\"><p class=\"prompt%s\">“",
                          all > 1 ? " listed" : "");
            report_html(t, p->runs[r].prompts[c] ? p->runs[r].prompts[c] : "prompt not known");
            report_puts(t, "”</p><div class=\"players\">");
            for (int v = 0; v < p->runs[r].variant_count; v++) player(t, p, r, v, c);
            report_puts(t, "</div></div>");
        }
    if (p->media.as_pictures)
        report_puts(t, "<p class=\"note\">Some videos are shown picture by picture: where the page "
                       "was made, FFmpeg has no H.264 encoder, and browsers play "
                       "no older MPEG-4.</p>");
}

/* ---------------------------------------------------------------- the rest */

static void details(report_text *t, const report_page *p)
{
    for (int r = 0; r < p->run_count; r++) {
        const char *command = cli_json_string(p->runs[r].value[REPORT_CONFIG], "command");
        report_puts(t, "<h3>");
        report_html(t, p->runs[r].tag);
        report_puts(t, "</h3>");
        if (command) {
            report_puts(t, "<p><code>");
            report_html(t, command);
            report_puts(t, "</code></p>");
        }
        for (int f = 0; f < 3; f++)
            if (p->runs[r].text[f])
                report_printf(t,
                              "<details data-run=\"%d\" data-file=\"%s\"><summary>%s</summary><pre "
                              "tabindex=\"0\"></pre></details>",
                              r, report_file_names[f], report_file_names[f]);
    }
    if (p->run_count == 0)
        report_puts(t, "<p class=\"soft\">This page was made from mask files alone.</p>");
}

/* Inside a script element nothing may look like markup; in JSON, < stands in strings only and can
 * be written otherwise. */
static void data(report_text *t, const report_page *p)
{
    const char *from = p->data, *end = p->data + p->data_bytes;
    for (const char *at; (at = memchr(from, '<', (size_t)(end - from))) != NULL; from = at + 1) {
        report_put(t, from, (size_t)(at - from));
        report_puts(t, "\\u003c");
    }
    report_put(t, from, (size_t)(end - from));
}

static void scripts(report_text *t)
{
    const unsigned char *const all[] = { esa_asset_core_js, esa_asset_charts_js,
                                         esa_asset_players_js, esa_asset_masks_js,
                                         esa_asset_heads_js };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) report_puts(t, (const char *)all[i]);
}

static void fill(report_text *t, report_page *p, const char *name)
{
    if (strcmp(name, "title") == 0)
        report_html(t, p->title);
    else if (strcmp(name, "version") == 0)
        report_printf(t, "esa %s (%s)", esa_version(), cli_commit());
    else if (strcmp(name, "css") == 0)
        report_puts(t, (const char *)esa_asset_page_css);
    else if (strcmp(name, "facts") == 0)
        facts(t, p);
    else if (strcmp(name, "tiles") == 0)
        tiles(t, p);
    else if (strcmp(name, "table") == 0) {
        if (p->run_count) table(t, p);
    } else if (strcmp(name, "notes") == 0)
        notes(t, p);
    else if (strcmp(name, "videos") == 0)
        videos(t, p);
    else if (strcmp(name, "details") == 0)
        details(t, p);
    else if (strcmp(name, "data") == 0)
        data(t, p);
    else if (strcmp(name, "js") == 0)
        scripts(t);
}

static int wanted(const report_page *p, const char *name)
{
    if (strcmp(name, "videos") == 0) return has_videos(p);
    if (strcmp(name, "quality") == 0) return has_quality(p);
    if (strcmp(name, "speed") == 0) return has_speed(p);
    if (strcmp(name, "heads") == 0) return has_heads(p);
    return strcmp(name, "masks") == 0 && p->mask_count > 0;
}

void report_page_write(report_text *t, report_page *p)
{
    static const char open[] = "<!--esa:", close[] = "-->", end[] = "<!--esa:end-->";
    const char *from = (const char *)esa_asset_page_html;
    for (const char *mark; (mark = strstr(from, open)) != NULL;) {
        char name[32];
        const char *word = mark + sizeof open - 1, *stop = strstr(word, close);
        snprintf(name, sizeof name, "%.*s", (int)(stop - word), word);
        report_put(t, from, (size_t)(mark - from));
        from = stop + sizeof close - 1;
        if (strncmp(name, "if ", 3) == 0) {
            if (!wanted(p, name + 3)) from = strstr(from, end) + sizeof end - 1;
        } else
            fill(t, p, name); /* end: nothing to fill in */
    }
    report_puts(t, from);
}
