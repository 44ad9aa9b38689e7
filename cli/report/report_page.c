/* report_page.c - fills in the marks <!--esa:name--> of cli/report/page/page.html. Tables and
 * videos are written here, so that the page shows them without scripts. Its scripts draw charts and
 * mask pictures from the JSON.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The part from <!--esa:if name--> to <!--esa:end--> is left out if there is nothing to show. Such
 * parts do not nest. */
#include "report/report.h"

#include <math.h>
#include <string.h>

/* From the build: cmake/embed.cmake. */
extern const unsigned char esa_asset_page_html[], esa_asset_theme_css[], esa_asset_page_css[],
    esa_asset_common_js[], esa_asset_core_js[], esa_asset_charts_js[], esa_asset_players_js[],
    esa_asset_masks_js[], esa_asset_heads_js[];

static int has_file(const report_page *p, int file)
{
    for (int r = 0; r < p->run_count; r++)
        if (p->runs[r].value[file]) return 1;
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

/* numbered as in core.js */
const char *report_tone(char out[32], const report_page *p, int run, int variant)
{
    int next = 0;
    for (int r = 0; r <= run; r++)
        for (int v = 0; v < (r == run ? variant : p->runs[r].variant_count); v++)
            next += !p->runs[r].variants[v].dense;
    if (p->runs[run].variants[variant].dense)
        snprintf(out, 32, "--tone:var(--dense)");
    else
        snprintf(out, 32, "--tone:var(--s%d)", next % 8);
    return out;
}

typedef char cell[32];

static const char *figure(cell out, double x, int digits, const char *unit)
{
    if (isfinite(x))
        snprintf(out, sizeof(cell), "%.*f%s", digits, x, unit);
    else
        snprintf(out, sizeof(cell), "–");
    return out;
}

void report_name(report_text *t, const report_page *p, int run, const char *name)
{
    const int several = p->run_count > 1;
    report_printf(t, "%s%s%s", several ? p->runs[run].tag : "", several ? " · " : "", name);
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
    cell number;
    int same = 1;
    for (int i = 1; i < p->run_count; i++)
        same = same && strcmp(p->runs[i].setting, r->setting) == 0;
    report_puts(t, "<ul class=\"facts\">");
    if (same && r->frames) {
        report_printf(t,
                      "<li>model <b>%s</b></li><li><b>%ld</b> frames of <b>%ld × %ld</b></li>"
                      "<li><b>%ld</b> steps</li>",
                      r->model, r->frames, r->width, r->height, r->step_count);
        if (isfinite(tokens))
            report_printf(t, "<li><b>%s</b> tokens</li>", figure(number, tokens, 0, ""));
    } else
        report_printf(t, "<li><b>%d</b> runs</li>", p->run_count);
    if (same && cpu)
        report_printf(t, "<li>%s%s%s%s%s</li>", cpu, isfinite(cores) ? ", " : "",
                      isfinite(cores) ? figure(number, cores, 0, " cores") : "",
                      kernels ? ", " : "", kernels ? kernels : "");
    if (same && commit) report_printf(t, "<li>commit <code>%s</code></li>", commit);
    report_puts(t, "</ul>");
}

static void tile(report_text *t, const report_page *p, int run, int i)
{
    const report_variant *v = &p->runs[run].variants[i];
    cell number, colour;
    report_printf(t, "<div class=\"tile\" style=\"%s\"><div class=\"soft small\">",
                  report_tone(colour, p, run, i));
    report_name(t, p, run, v->label);
    if (isfinite(v->figure[REPORT_SPEEDUP]))
        report_printf(t, "</div><div class=\"big\">%s<small>%s</small>",
                      figure(number, v->figure[REPORT_SPEEDUP], 2, "×"),
                      v->figure[REPORT_SPEEDUP] >= 1 ? "faster" : "of the dense speed");
    else
        report_printf(t, "</div><div class=\"big\">%s<small>dB</small>",
                      figure(number, v->figure[REPORT_PSNR], 1, ""));
    report_puts(t, "</div><dl>");
    if (v->identical || isfinite(v->figure[REPORT_PSNR]))
        report_printf(t, "<div><dt>PSNR</dt><dd>%s</dd></div>",
                      v->identical ? "equal, bit for bit"
                                   : figure(number, v->figure[REPORT_PSNR], 1, " dB"));
    if (isfinite(v->figure[REPORT_SSIM]))
        report_printf(t, "<div><dt>SSIM</dt><dd>%s</dd></div>",
                      figure(number, v->figure[REPORT_SSIM], 3, ""));
    report_puts(t, "</dl></div>");
}

/* The main figures of the sparse variants, if there are few enough to read at a glance. */
static void tiles(report_text *t, const report_page *p)
{
    int sparse = 0;
    for (int r = 0; r < p->run_count; r++)
        for (int v = 0; v < p->runs[r].variant_count; v++) sparse += !p->runs[r].variants[v].dense;
    if (sparse == 0 || sparse > 6) return;
    report_puts(t, "<div class=\"tiles\">");
    for (int r = 0; r < p->run_count; r++)
        for (int i = 0; i < p->runs[r].variant_count; i++)
            if (!p->runs[r].variants[i].dense) tile(t, p, r, i);
    report_puts(t, "</div>");
}

static void table_row(report_text *t, const report_page *p, int run, int i, int lpips)
{
    const report_variant *v = &p->runs[run].variants[i];
    static const struct {
        int figure, digits;
        const char *unit;
    } cells[] = {
        { REPORT_DENSITY, 3, "" },  { REPORT_SECONDS, 2, " s" },       { REPORT_STEP, 3, " s" },
        { REPORT_SPEEDUP, 2, "×" }, { REPORT_SPARSE_SPEEDUP, 2, "×" }, { REPORT_PSNR, 2, " dB" },
        { REPORT_SSIM, 4, "" },     { REPORT_LPIPS, 4, "" },           { REPORT_FLICKER, 2, "" }
    };
    enum { PSNR = 5, LPIPS = 7, CELLS = 9 };
    cell number, colour;
    report_printf(t, "<tr><th scope=\"row\"><span class=\"key\" style=\"%s\"></span>",
                  report_tone(colour, p, run, i));
    report_name(t, p, run, v->label);
    report_puts(t, "</th>");
    for (int c = 0; c < CELLS; c++) {
        if (c == LPIPS && !lpips) continue;
        figure(number, c >= PSNR && v->dense ? (double)NAN : v->figure[cells[c].figure],
               cells[c].digits, cells[c].unit);
        report_printf(t, "<td>%s</td>",
                      c == PSNR && v->dense       ? "reference"
                      : c == PSNR && v->identical ? "equal"
                                                  : number);
    }
    report_puts(t, "</tr>");
}

static void table(report_text *t, const report_page *p)
{
    static const char *const heads[] = { "variant",       "density", "time per video",
                                         "time per step", "speedup", "without warm-up",
                                         "PSNR",          "SSIM",    "LPIPS",
                                         "flicker" };
    int lpips = 0;
    for (int r = 0; r < p->run_count; r++)
        for (int v = 0; v < p->runs[r].variant_count; v++)
            lpips |= isfinite(p->runs[r].variants[v].figure[REPORT_LPIPS]);
    if (p->run_count == 0) return;
    report_puts(t, "<div class=\"card scroll\"><table><caption class=\"visually-hidden\">Speed and "
                   "quality of every variant</caption><thead><tr>");
    for (int i = 0; i < 10; i++)
        if (i != 8 || lpips) report_printf(t, "<th scope=\"col\">%s</th>", heads[i]);
    report_puts(t, "</tr></thead><tbody>");
    for (int r = 0; r < p->run_count; r++)
        for (int i = 0; i < p->runs[r].variant_count; i++) table_row(t, p, r, i, lpips);
    report_puts(t, "</tbody></table></div>");
}

static void notes(report_text *t, const report_page *p)
{
    for (int r = 0; r < p->run_count; r++)
        for (int f = 0; f < 3; f++)
            if (!p->runs[r].value[f])
                report_printf(t,
                              "<p class=\"note\">The results of %s have no <code>%s</code>: the "
                              "page leaves out what it would say.</p>",
                              p->runs[r].tag, report_file_names[f]);
}

/* ---------------------------------------------------------------- videos */

static void player(report_text *t, report_page *p, int run, int i, int64_t clip)
{
    const report_run *r = &p->runs[run];
    const report_variant *v = &r->variants[i];
    const report_clip *c = &v->clips[clip];
    report_text stage = { 0 };
    char label[400];
    cell colour, speedup, psnr, ssim;
    p->media.frames = 0;
    snprintf(label, sizeof label, "%s: %.280s", v->label, r->prompts[clip] ? r->prompts[clip] : "");
    if (c->video)
        report_media_embed(&stage, &p->media, r->folder, c->video, label);
    else
        report_puts(&stage, "<p class=\"why\">No video of this variant.</p>");
    report_puts(t, "<figure class=\"player\"");
    if (p->media.frames > 0)
        report_printf(t, " data-fps=\"%g\" data-frames=\"%ld\"", p->media.fps, p->media.frames);
    report_printf(t, "%s><div class=\"stage\">", v->dense ? " data-reference" : "");
    if (stage.failed)
        t->failed = 1;
    else
        report_put(t, stage.text ? stage.text : "", stage.used);
    report_text_free(&stage);
    report_printf(t, "</div><figcaption><span class=\"key\" style=\"%s\"></span><b>%s</b>",
                  report_tone(colour, p, run, i), v->label);
    if (!v->dense)
        report_printf(t, "<br><span class=\"soft num\">%s%s%s%s</span>",
                      isfinite(v->figure[REPORT_SPEEDUP])
                          ? figure(speedup, v->figure[REPORT_SPEEDUP], 2, "× · ")
                          : "",
                      c->identical ? "equal to dense" : figure(psnr, c->psnr, 2, " dB"),
                      c->identical ? "" : " · SSIM ",
                      c->identical ? "" : figure(ssim, c->ssim, 4, ""));
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
            report_printf(t, "<option value=\"%ld\">", number);
            report_name(t, p, r, p->runs[r].prompts[c] ? p->runs[r].prompts[c] : "?");
            report_puts(t, "</option>");
        }
    if (all > 1) report_puts(t, "</select></label></div>");
    for (int r = 0; r < p->run_count; r++)
        for (int64_t c = 0; c < p->runs[r].clip_count && c < p->max_clips; c++) {
            report_printf(t,
                          "<div class=\"clip\"><p class=\"prompt%s\">“%s”</p><div "
                          "class=\"players\">",
                          all > 1 ? " listed" : "",
                          p->runs[r].prompts[c] ? p->runs[r].prompts[c] : "prompt not known");
            for (int v = 0; v < p->runs[r].variant_count; v++) player(t, p, r, v, c);
            report_puts(t, "</div></div>");
        }
    if (p->media.as_pictures)
        report_puts(t,
                    "<p class=\"note\">Some videos are shown picture by picture: the FFmpeg that "
                    "made the page has no H.264 encoder, and browsers do not play older "
                    "MPEG-4.</p>");
}

/* ---------------------------------------------------------------- the rest */

static void details(report_text *t, const report_page *p)
{
    for (int r = 0; r < p->run_count; r++) {
        const char *command = cli_json_string(p->runs[r].value[REPORT_CONFIG], "command");
        report_printf(t, "<h3>%s</h3>", p->runs[r].tag);
        if (command) report_printf(t, "<p><code>%s</code></p>", command);
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

/* Nothing inside a script element may look like markup. In JSON, < occurs in strings only and can
 * be written as an escape. */
static void data(report_text *t, const report_page *p)
{
    const char *from = p->data, *end = p->data + p->data_bytes;
    for (const char *at; (at = memchr(from, '<', (size_t)(end - from))) != NULL; from = at + 1) {
        report_put(t, from, (size_t)(at - from));
        report_puts(t, "\\u003c");
    }
    report_put(t, from, (size_t)(end - from));
}

static void fill(report_text *t, report_page *p, const char *name)
{
    static const struct {
        const char *name;
        const unsigned char *text;
    } assets[] = { { "css", esa_asset_theme_css }, { "css", esa_asset_page_css },
                   { "js", esa_asset_common_js },  { "js", esa_asset_core_js },
                   { "js", esa_asset_charts_js },  { "js", esa_asset_players_js },
                   { "js", esa_asset_masks_js },   { "js", esa_asset_heads_js } };
    static const struct {
        const char *name;
        void (*write)(report_text *, const report_page *);
    } parts[] = { { "facts", facts }, { "tiles", tiles },        { "table", table },
                  { "notes", notes }, { "carry", report_carry }, { "details", details },
                  { "data", data } };
    for (size_t i = 0; i < sizeof assets / sizeof *assets; i++)
        if (strcmp(name, assets[i].name) == 0) report_puts(t, (const char *)assets[i].text);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (strcmp(name, parts[i].name) == 0) parts[i].write(t, p);
    if (strcmp(name, "title") == 0) report_html(t, p->title);
    if (strcmp(name, "version") == 0) report_printf(t, "esa %s (%s)", esa_version(), cli_commit());
    if (strcmp(name, "videos") == 0) videos(t, p);
}

static int wanted(const report_page *p, const char *name)
{
    if (strcmp(name, "videos") == 0) return has_videos(p);
    if (strcmp(name, "quality") == 0) return has_file(p, REPORT_QUALITY);
    if (strcmp(name, "speed") == 0) return has_file(p, REPORT_SPEED);
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
