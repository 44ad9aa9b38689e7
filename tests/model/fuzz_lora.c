/* fuzz_lora.c - matches any LoRA file with the tensors of a model family (lora.c), and adds its
 * changes (weights_merge.c). A file is refused with a message, or each of its tensors changes
 * something.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Input: 8 bytes length n, n bytes of text, then numbers, which the tensors of the file repeat. The
 * first line of the text begins with the letter of a family: w, c, or any other for HunyuanVideo.
 * Each other line is a tensor of the file: name, type and shape, as "blocks.10.ffn.0.diff F32 4x2".
 * A line that begins with @ has the settings of PEFT. In this way names and shapes change while the
 * file stays readable; fuzz_safetensors has files that are not. */
#include "fuzz/fuzz_common.h"
#include "model/dit/dit.h"
#include "model/dit/dit.h"
#include "model/dit/dit.h"
#include "model/weights/lora.h"
#include "model/weights/weights_internal.h"

enum { ROWS = 4, COLS = 2, MOST_NAMES = 240, MOST_ELEMENTS = 1 << 14 };

/* A model: every tensor that a naming rule of its family has. */
typedef struct family {
    char letter;
    const esa_naming *naming;
    esa_weights *w;
    uint8_t *file; /* its weights, [bytes] */
    size_t bytes;
    char name[MOST_NAMES][160]; /* in diffusers */
    int32_t count;
} family;
static family families[] = { { .letter = 'w', .naming = &esa_wan_original },
                             { .letter = 'c', .naming = &esa_cog_original },
                             { .letter = 'h', .naming = &esa_hunyuan_original } };
enum { FAMILIES = 3 };

/* ---------------------------------------------------------------- a file from its text */

typedef struct header {
    char text[1 << 17];
    size_t at;
    int64_t offset;
} header;

static void put_escaped(header *h, const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const uint8_t c = (uint8_t)s[i];
        const int plain = c >= 0x20 && c != '"' && c != '\\';
        h->at += (size_t)snprintf(h->text + h->at, sizeof h->text - h->at, plain ? "%c" : "\\u%04x",
                                  c);
    }
}

/* Splits "name type shape" from behind, and writes the tensor. */
static void put_line(header *h, const char *line, size_t n)
{
    char type[16] = "F32", shape[64] = "2x2", *at = shape;
    size_t name = n;
    for (int k = 0; k < 2; k++) {
        size_t from = name;
        while (from > 0 && line[from - 1] != ' ') from--;
        if (!from) break;
        char *word = k ? type : shape;
        const size_t room = k ? sizeof type : sizeof shape, length = name - from;
        if (length < room) snprintf(word, room, "%.*s", (int)length, line + from);
        name = from - 1;
    }
    const int32_t known = esa_file_dtype_from_name(type);
    int64_t dim[ESA_FILE_MAX_RANK], elements = 1;
    int32_t rank = 0;
    while (*at >= '0' && *at <= '9' && rank < ESA_FILE_MAX_RANK) {
        dim[rank] = strtol(at, &at, 10) % 1000;
        elements *= dim[rank++];
        if (elements > MOST_ELEMENTS) return;
        at += *at == 'x';
    }
    if (sizeof h->text - h->at < 6 * name + 300) return;
    h->text[h->at++] = h->at > 1 ? ',' : ' ';
    h->text[h->at++] = '"';
    put_escaped(h, line, name);
    h->at += (size_t)snprintf(h->text + h->at, sizeof h->text - h->at,
                              "\":{\"dtype\":\"%s\",\"shape\":[",
                              esa_file_dtype_name(known < 0 ? ESA_FILE_F32 : known));
    for (int32_t i = 0; i < rank; i++)
        h->at += (size_t)snprintf(h->text + h->at, sizeof h->text - h->at, "%s%d", i ? "," : "",
                                  (int)dim[i]);
    const int64_t end = h->offset + elements * esa_file_dtype_size(known < 0 ? 0 : known);
    h->at += (size_t)snprintf(h->text + h->at, sizeof h->text - h->at,
                              "],\"data_offsets\":[%lld,%lld]}", (long long)h->offset,
                              (long long)end);
    h->offset = end;
}

static void put_settings(header *h, const char *text, size_t n)
{
    static const char start[] = "\"__metadata__\":{\"lora_adapter_metadata\":\"";
    if (sizeof h->text - h->at < 6 * n + 300 || strstr(h->text, start)) return;
    h->at += (size_t)snprintf(h->text + h->at, sizeof h->text - h->at, "%s%s",
                              h->at > 1 ? "," : " ", start);
    put_escaped(h, text, n);
    h->at += (size_t)snprintf(h->text + h->at, sizeof h->text - h->at, "\"}");
}

/* The file of a text's lines, to be freed; NULL: out of memory. number: [numbers] bytes. */
static uint8_t *make_file(size_t *bytes, const char *text, size_t n, const uint8_t *number,
                          size_t numbers)
{
    static header h;
    h.at = 1;
    h.offset = 0;
    memset(h.text, 0, sizeof h.text);
    h.text[0] = '{';
    for (size_t from = 0, end; from < n; from = end + 1) {
        for (end = from; end < n && text[end] != '\n';) end++;
        if (text[from] == '@')
            put_settings(&h, text + from + 1, end - from - (end > from));
        else if (end > from)
            put_line(&h, text + from, end - from);
    }
    h.text[h.at++] = '}';
    const uint64_t length = h.at;
    *bytes = 8 + h.at + (size_t)h.offset;
    uint8_t *file = malloc(*bytes); /* exactly, so that a read past its end is seen */
    if (!file) return NULL;
    memcpy(file, &length, 8);
    memcpy(file + 8, h.text, h.at);
    for (size_t i = 0; i < (size_t)h.offset; i++)
        file[8 + h.at + i] = numbers ? number[i % numbers] : 0;
    return file;
}

/* ---------------------------------------------------------------- the models */

static int32_t is_vector(const char *name)
{
    return strstr(name, ".bias") || (strstr(name, "norm") && !strstr(name, "linear"));
}

static void add_name(family *f, const char *name)
{
    for (int32_t i = 0; i < f->count; i++)
        if (strcmp(f->name[i], name) == 0) return;
    must(f->count < MOST_NAMES, "the names have room");
    snprintf(f->name[f->count++], sizeof f->name[0], "%s", name);
}

/* The weight and the bias that a rule names, in a block with two digits. */
static void add_rule(family *f, const char *ours)
{
    const char *hash = strchr(ours, '#');
    const size_t n = strlen(ours);
    const int32_t whole = n > 7 && strcmp(ours + n - 7, ".weight") == 0;
    char base[120], name[160];
    if (hash)
        snprintf(base, sizeof base, "%.*s10%s", (int)(hash - ours), ours, hash + 1);
    else
        snprintf(base, sizeof base, "%s", ours);
    snprintf(name, sizeof name, "%s%s", base, whole ? "" : ".weight");
    add_name(f, name);
    snprintf(name, sizeof name, "%s.bias", base);
    if (!whole) add_name(f, name);
}

static void make_family(family *f)
{
    static char text[MOST_NAMES * 180];
    static const uint8_t half[] = { 0, 0, 0, 0x3f }; /* 0.5 */
    static const int64_t dim[] = { ROWS, COLS };
    size_t at = 0;
    if (f->w) return;
    for (const esa_naming *n = f->naming; n; n = n->next)
        for (int32_t i = 0; i < n->rules; i++) add_rule(f, n->rule[i].ours);
    for (int32_t i = 0; i < f->count; i++)
        at += (size_t)snprintf(text + at, sizeof text - at, "%s F32 %s\n", f->name[i],
                               is_vector(f->name[i]) ? "4" : "4x2");
    f->file = make_file(&f->bytes, text, at, half, sizeof half);
    must(f->file && esa_weights_open_memory(fuzz_ctx, &f->w, f->file, (int64_t)f->bytes,
                                            "transformer") == ESA_OK,
         "the weights of the model are read");
    esa_weights_naming(f->w, f->naming);
    for (int32_t i = 0; i < f->count; i++)
        esa_weights_want(f->w, NULL, 0, is_vector(f->name[i]) ? 1 : 2, dim, "%s", f->name[i]);
    must(esa_weights_check(f->w, NULL, NULL) == ESA_OK, "the weights of the model fit");
}

/* ---------------------------------------------------------------- one LoRA */

/* Every tensor of an accepted file is part of a change. */
static void all_used(const esa_weights *w)
{
    for (int32_t k = 0; k < w->loras.count; k++)
        for (int64_t i = 0; i < w->loras.file[k]->count; i++) {
            const esa_st_entry *entry = &w->loras.file[k]->entry[i];
            int32_t uses = 0;
            for (int64_t e = 0; e < w->count; e++)
                for (const esa_delta *d = w->want[e].delta; d; d = d->next)
                    uses += d->down == entry || d->up == entry || d->alpha == entry;
            must(uses > 0, "no tensor of an accepted LoRA is left out");
        }
}

static void merge_all(esa_weights *w)
{
    static const int32_t dtypes[] = { ESA_DTYPE_F32, ESA_DTYPE_F16, ESA_DTYPE_BF16 };
    for (int64_t i = 0; i < w->count; i++) {
        const esa_wanted *e = &w->want[i];
        if (!e->delta) continue;
        const int64_t rows = esa_weights_rows(e),
                      bytes = esa_weights_size(dtypes[i % 3], esa_wanted_count(e));
        void *exact = malloc((size_t)bytes);
        must(exact && esa_weights_merge(w, e, exact, dtypes[i % 3], 0, rows) == ESA_OK,
             "a change that fits is added");
        free(exact);
    }
}

/* 1 if the file was accepted. */
static int32_t try_file(family *f, const uint8_t *file, size_t bytes, int32_t times)
{
    static const esa_lora list[2] = { { .file = "fuzzed", .scale = 0.75f },
                                      { .file = "fuzzed", .scale = -2 } };
    esa_loras *l = &f->w->loras;
    esa_status status = ESA_OK;
    fuzz_ctx->error[0] = 0;
    for (int32_t i = 0; i < times && !status; i++) {
        status = esa_st_open_memory(fuzz_ctx, &l->file[i], file, (int64_t)bytes);
        if (!status) l->count++;
    }
    l->list = list;
    if (!status) status = esa_lora_match(f->w, NULL, NULL);
    if (status) {
        must(fuzz_ctx->error[0] != 0, "a refusal has a message");
        must(status == ESA_ERR_MISMATCH || status == ESA_ERR_FORMAT ||
                 status == ESA_ERR_UNSUPPORTED,
             "of the file");
    } else {
        all_used(f->w);
        merge_all(f->w);
    }
    esa_lora_close(f->w);
    return !status;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t n = 0;
    if (size < 8) return 0;
    memcpy(&n, data, 8);
    if (n < 1 || n > size - 8) return 0;
    family *f = families;
    while (f->letter != (char)data[8] && f < families + FAMILIES - 1) f++;
    make_family(f);
    const char *text = (const char *)data + 8, *line = memchr(text, '\n', (size_t)n);
    const size_t head = line ? (size_t)(line - text) + 1 : (size_t)n;
    size_t bytes;
    uint8_t *file = make_file(&bytes, text + head, (size_t)n - head, data + 8 + n,
                              size - 8 - (size_t)n);
    if (file) try_file(f, file, bytes, 1 + (int32_t)(size % 2));
    free(file);
    return 0;
}

/* ---------------------------------------------------------------- seeds */

enum { KOHYA, COMFY, PEFT, STYLES };

typedef struct seed {
    char text[4000];
    size_t at;
} seed;

static void put(seed *s, const char *module, const char *end, const char *shape)
{
    s->at += (size_t)snprintf(s->text + s->at, sizeof s->text - s->at, "%s%s%s\n", module, end,
                              shape);
    must(s->at < sizeof s->text, "a seed has room");
}

/* The lines that change one tensor, in the spelling of a style. Tensors that lie in one tensor of
 * the layout share their lines. */
static void put_change(seed *s, const family *f, const esa_naming *layout, int32_t style, int32_t i)
{
    static const char *const prefix[] = { "\nlora_unet_", "\ndiffusion_model.", "\ntransformer." };
    char theirs[192], other[192], module[240], up[16], whole[16];
    const char *runs;
    int32_t side = 0;
    must(esa_naming_apply(theirs, sizeof theirs, layout, f->name[i], &runs), "names have room");
    for (int32_t k = 0; k < f->count; k++)
        if (esa_naming_apply(other, sizeof other, layout, f->name[k], &runs) &&
            strcmp(theirs, other) == 0)
            side += ROWS;
    const size_t n = strlen(theirs);
    const int32_t bias = n > 5 && strcmp(theirs + n - 5, ".bias") == 0;
    if (!bias && (n < 7 || strcmp(theirs + n - 7, ".weight") != 0)) return;
    theirs[n - (bias ? 5 : 7)] = 0;
    for (char *c = theirs; style == KOHYA && *c; c++)
        if (*c == '.') *c = '_';
    snprintf(module, sizeof module, "%s%s%s", prefix[style], theirs, bias ? ".diff_b" : ".");
    if (strstr(s->text, module)) return;
    snprintf(module, sizeof module, "%s%s", prefix[style] + 1, theirs);
    snprintf(up, sizeof up, " %dx2", side);
    snprintf(whole, sizeof whole, " %d", side);
    if (bias) {
        put(s, module, ".diff_b F32", whole);
    } else if (is_vector(f->name[i])) {
        put(s, module, ".diff F32", whole);
    } else if (style == KOHYA) {
        put(s, module, ".lora_down.weight F16", " 2x2");
        put(s, module, ".lora_up.weight F16", up);
        put(s, module, ".alpha F32 ", "");
    } else {
        put(s, module, ".lora_A.weight BF16", " 2x2");
        put(s, module, ".lora_B.weight F32", up);
    }
}

static int write_seed(const char *folder, const char *name, const seed *s)
{
    static const uint8_t number[] = { 0, 0x3c, 0, 0xbc, 0x80, 0x3f };
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    if (!file) return 1;
    const uint64_t n = s->at;
    const int bad = fwrite(&n, 1, 8, file) != 8 || fwrite(s->text, 1, n, file) != n ||
                    fwrite(number, 1, sizeof number, file) != sizeof number;
    return fclose(file) != 0 || bad;
}

/* Every family in every layout and style; each must be accepted. */
static int make_seeds(const char *folder)
{
    static const char settings[] = "@{\"transformer.lora_alpha\":4,"
                                   "\"transformer.alpha_pattern\":{\"to_q\":1}}\n";
    for (family *f = families; f < families + FAMILIES; f++) {
        int32_t number = 0;
        make_family(f);
        for (const esa_naming *layout = f->naming; layout; layout = layout->next, number++)
            for (int32_t style = 0; style < STYLES; style++) {
                seed s = { .at = 2 };
                char name[64];
                s.text[0] = f->letter;
                s.text[1] = '\n';
                for (int32_t i = 0; i < 8; i++)
                    put_change(&s, f, layout, style,
                               (number * 31 + style * 17 + i * 13) % f->count);
                if (style == PEFT) put(&s, settings, "", "");
                size_t bytes;
                uint8_t *file = make_file(&bytes, s.text + 2, s.at - 2, NULL, 0);
                must(file && try_file(f, file, bytes, 2), "every seed fits its model");
                free(file);
                snprintf(name, sizeof name, "seed_%c%d%d", f->letter, number, style);
                if (write_seed(folder, name, &s)) return 1;
            }
    }
    return 0;
}
