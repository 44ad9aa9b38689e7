/* fuzz_tokenizer.c - reads any tokenizer.json and splits any text with it. A file is refused with a
 * message, or every text gets ids, the same ones with less room.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Input: 8 bytes length n, n bytes of tokenizer.json, then the text up to its first 0. */
#include "fuzz/fuzz_common.h"
#include "model/text/prompt.h"
#include "model/text/tokenizer_kind.h"

enum { LONG = 4096, SHORT = 5 };

static void encode(const esa_tokenizer *t, const char *text)
{
    static int32_t ids[LONG];
    int32_t few[SHORT], count = 0, total = 0, short_count = 0;
    int64_t bytes;
    const int32_t valid = esa_utf8_check(fuzz_ctx, text, &bytes, NULL) == ESA_OK;
    const esa_status status = esa_tokenizer_encode(t, text, ids, LONG, &count, &total);
    must(valid == (status == ESA_OK), "UTF-8 is split, anything else is refused");
    if (status != ESA_OK) return;
    const int32_t front = t->bos >= 0, back = t->eos >= 0;
    must(count >= front + back && count <= LONG && count <= total, "the number of ids");
    must(!front || ids[0] == t->bos, "the front of the frame");
    must(!back || ids[count - 1] == t->eos, "the back of the frame");
    for (int32_t i = 0; i < count; i++)
        must(ids[i] >= 0 && ids[i] <= t->largest, "ids are those of the file");
    for (int32_t i = count; i < LONG; i++) must(ids[i] == t->pad, "padding");
    must(esa_tokenizer_encode(t, text, few, SHORT, &short_count, NULL) == ESA_OK, "less room");
    must(short_count == (total < SHORT ? total : SHORT), "the room is used");
    for (int32_t i = 0; i < short_count - back; i++) must(few[i] == ids[i], "the same ids");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t n = 0;
    esa_tokenizer *t = NULL;
    if (size < 8) return 0;
    memcpy(&n, data, 8);
    if (n > size - 8) return 0;
    const size_t rest = size - 8 - (size_t)n;
    char *json = malloc((size_t)n + 1),
         *text = malloc(rest + 1); /* so that reads past ends are seen */
    if (json && text) {
        memcpy(json, data + 8, (size_t)n);
        memcpy(text, data + 8 + n, rest);
        text[rest] = 0;
        if (esa_bpe_open_memory(fuzz_ctx, &t, json, (int64_t)n) == ESA_OK)
            encode(t, text);
        else
            must(!t && esa_ctx_error(fuzz_ctx)[0], "a refusal has a message and no object");
        esa_tokenizer_free(t);
    }
    free(json);
    free(text);
    return 0;
}

#define MODEL(suffix)                                                                              \
    "\"model\":{\"type\":\"BPE\",\"unk_token\":\"?\",\"end_of_word_suffix\":\"" suffix "\","       \
    "\"ignore_merges\":false,\"vocab\":{\"?\":0,\"a\":1,\"b\":2,\"c\":3,\"ab\":4,\"bc\":5,"        \
    "\"abc\":6,\"c</w>\":7,\"abc</w>\":8,\"\xc4\xa0\":9,\"\xc4\xa0"                                \
    "a\":10,\"\xc3\x83\":11,\"\xc2"                                                                \
    "\xa9\":12,\"\xc3\x83\xc2\xa9\":13,\"ab</w>\":14,\"b</w>\":15},\"merges\":[\"a b\","           \
    "[\"b\",\"c\"],[\"a\",\"bc\"],\"ab c\",\"ab c</w>\",\"\xc4\xa0 a\",\"\xc3\x83 \xc2\xa9\","     \
    "\"a b</w>\"]}"
#define SPLIT(regex, behavior, invert, level)                                                      \
    "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":" \
    "{\"Regex\":\"" regex "\"},\"behavior\":\"" behavior "\",\"invert\":" invert                   \
    "},{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":" level "}]}"
#define ADDED(name, id, normalized)                                                                \
    "{\"id\":" id ",\"content\":\"" name "\",\"normalized\":" normalized ",\"special\":true}"
#define CLIP "'s|'t|'re|'ve|'m|'ll|'d|[\\\\p{L}]+|[\\\\p{N}]|[^\\\\s\\\\p{L}\\\\p{N}]+"

#define LLAMA                                                                                      \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}{1,3}| "         \
    "?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"
/* clang-format off */
#define LLAMA_FRAME                                                                                \
    "\"post_processor\":{\"type\":\"Sequence\",\"processors\":[{\"type\":\"ByteLevel\"},"          \
    "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<s>\"}},"            \
    "{\"Sequence\":{\"id\":\"A\"}}]}]}"
#define CLIP_NORMAL                                                                                \
    "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},"                   \
    "{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"\\\\s+\"},\"content\":\" \"},"                 \
    "{\"type\":\"Lowercase\"}]}"
#define CLIP_FRAME                                                                                 \
    "\"post_processor\":{\"type\":\"RobertaProcessing\",\"sep\":[\"<e>\",17],\"cls\":[\"<S>\",16]}"
static const char llama_file[] =
    "{\"added_tokens\":[" ADDED("<s>", "16", "false") "," ADDED("<S>", "17", "true")
    "],\"normalizer\":null," SPLIT(LLAMA, "Isolated", "false", "false") "," LLAMA_FRAME ","
    MODEL("") "}";
#define CLIP_FILE(regex)                                                                           \
    "{\"added_tokens\":[" ADDED("<S>", "16", "true") "," ADDED("<e>", "17", "false") "],"          \
    CLIP_NORMAL "," SPLIT(regex, "Removed", "true", "true") "," CLIP_FRAME "," MODEL("</w>") "}"
/* clang-format on */
static const char clip_file[] = CLIP_FILE(CLIP);
static const char names_file[] = CLIP_FILE("<\\\\|startoftext\\\\|>|<\\\\|endoftext\\\\|>|" CLIP);

static const char plain_text[] = "abc aabcbc<s> A\xcc\x81 it's 12345\r\n  \xc3\xa9<S>a";
/* Marks out of order, single letters of Hangul, a letter that becomes two. */
static const char marks_text[] = "abcABC<|ENDOFTEXT|>!\xcc\xa3\xcc\x87 \xe1\x84\x80\xe1\x85\xa1"
                                 "\xe1\x86\xa8 \xc4\xb0<s>x<e>";

static int make_seeds(const char *folder)
{
    static const char *const files[] = { llama_file, clip_file, names_file };
    static const char *const texts[] = { plain_text, marks_text, "\xff" };
    for (int i = 0; i < 9; i++) {
        char path[1024];
        snprintf(path, sizeof path, "%s/seed%d", folder, i);
        FILE *f = fopen(path, "wb");
        if (!f) return 1;
        const char *json = files[i / 3], *text = texts[i % 3];
        const uint64_t n = strlen(json);
        const int bad = fwrite(&n, 1, 8, f) != 8 || fwrite(json, 1, n, f) != n ||
                        fwrite(text, 1, strlen(text), f) != strlen(text);
        if (fclose(f) != 0 || bad) return 1;
    }
    /* The seeds must be good files, or the fuzzer would never get beyond the reader. */
    for (int i = 0; i < 3; i++) {
        esa_tokenizer *t = NULL;
        must(esa_bpe_open_memory(fuzz_ctx, &t, files[i], (int64_t)strlen(files[i])) == ESA_OK,
             "the seeds are read");
        encode(t, texts[i]);
        esa_tokenizer_free(t);
    }
    return 0;
}
