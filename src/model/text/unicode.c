/* unicode.c - see unicode.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/text/unicode.h"

/* Hangul syllables are composed by arithmetic: 19 leading, 21 vowels, 28 trailing (one is none). */
#define HANGUL   0xac00
#define LEADING  0x1100
#define VOWEL    0x1161
#define TRAILING 0x11a7
#define SYLLABLE 11172

/* The value of the run that holds c. */
static int32_t run_value(const uint32_t *run, int32_t count, int32_t c)
{
    int32_t lo = 0, hi = count; /* the first run beyond c */
    while (lo < hi) {
        const int32_t mid = (lo + hi) / 2;
        if ((int32_t)(run[mid] >> 8) <= c)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo ? (int32_t)(run[lo - 1] & 255) : 0;
}

int32_t esa_char_class(int32_t c)
{
    return run_value(esa_unicode_class, esa_unicode_class_count, c);
}

static int32_t mark_class(int32_t c)
{
    return c < 0x300 ? 0 : run_value(esa_unicode_mark, esa_unicode_mark_count, c);
}

int32_t esa_char_lower(int32_t c, int32_t out[2])
{
    if (c == 0x130) {
        out[0] = 'i';
        out[1] = 0x307;
        return 2;
    }
    int32_t lo = 0, hi = esa_unicode_lower_count; /* the first range that ends at c or later */
    while (lo < hi) {
        const int32_t mid = (lo + hi) / 2;
        if (esa_unicode_lower[mid][1] < c)
            lo = mid + 1;
        else
            hi = mid;
    }
    const int32_t *range = lo < esa_unicode_lower_count ? esa_unicode_lower[lo] : 0;
    const int32_t inside = range && c >= range[0] && (c - range[0]) % range[2] == 0;
    out[0] = inside ? c + range[3] : c;
    return 1;
}

static const uint32_t *parts_of(int32_t c)
{
    int32_t lo = 0, hi = esa_unicode_part_count;
    while (lo < hi) {
        const int32_t mid = (lo + hi) / 2;
        if (esa_unicode_part[mid][0] == (uint32_t)c) return esa_unicode_part[mid];
        if (esa_unicode_part[mid][0] < (uint32_t)c)
            lo = mid + 1;
        else
            hi = mid;
    }
    return 0;
}

/* Writes c without precomposed characters, and returns how many there are. */
static int64_t decompose(int32_t *out, int32_t c)
{
    if (c >= HANGUL && c < HANGUL + SYLLABLE) {
        const int32_t s = c - HANGUL;
        out[0] = LEADING + s / 588;
        out[1] = VOWEL + s % 588 / 28;
        out[2] = TRAILING + s % 28;
        return s % 28 ? 3 : 2;
    }
    /* Only the first part can be precomposed itself: its marks go behind it in order. */
    int32_t tail[ESA_NFC_GROWTH], tails = 0;
    for (const uint32_t *p = parts_of(c); p && tails < ESA_NFC_GROWTH - 1; p = parts_of(c)) {
        if (p[2]) tail[tails++] = (int32_t)p[2];
        c = (int32_t)p[1];
    }
    out[0] = c;
    for (int32_t i = 0; i < tails; i++) out[1 + i] = tail[tails - 1 - i];
    return 1 + tails;
}

/* The character that a and b make, or 0. */
static int32_t compose(int32_t a, int32_t b)
{
    if (a >= LEADING && a < LEADING + 19 && b >= VOWEL && b < VOWEL + 21)
        return HANGUL + ((a - LEADING) * 21 + b - VOWEL) * 28;
    if (a >= HANGUL && a < HANGUL + SYLLABLE && (a - HANGUL) % 28 == 0 && b > TRAILING &&
        b < TRAILING + 28)
        return a + b - TRAILING;
    int32_t lo = 0, hi = esa_unicode_pair_count;
    while (lo < hi) {
        const int32_t mid = (lo + hi) / 2;
        const uint32_t *p = esa_unicode_part[esa_unicode_pair[mid]];
        const int64_t order = p[1] != (uint32_t)a ? (int64_t)p[1] - a : (int64_t)p[2] - b;
        if (order == 0) return (int32_t)p[0];
        if (order < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return 0;
}

/* Sorts the marks of every run by their class; equal ones keep their order. */
static void order_marks(int32_t *text, int64_t count)
{
    for (int64_t begin = 0; begin < count;) {
        int64_t end = begin + 1;
        if (!mark_class(text[begin])) {
            begin++;
            continue;
        }
        while (end < count && mark_class(text[end])) end++;
        for (int64_t i = begin + 1; i < end; i++) {
            const int32_t c = text[i], order = mark_class(c);
            int64_t to = i;
            for (; to > begin && mark_class(text[to - 1]) > order; to--) text[to] = text[to - 1];
            text[to] = c;
        }
        begin = end;
    }
}

int64_t esa_text_nfc(int32_t *out, const int32_t *in, int64_t count)
{
    int64_t n = 0, kept = 0, starter = -1;
    for (int64_t i = 0; i < count; i++) n += decompose(out + n, in[i]);
    order_marks(out, n);
    int32_t last = 0; /* class of the character kept last; only those above it may pass */
    for (int64_t i = 0; i < n; i++) {
        const int32_t c = out[i], order = mark_class(c);
        const int32_t free_way = starter >= 0 && (kept - 1 == starter || (last && last < order));
        const int32_t whole = free_way ? compose(out[starter], c) : 0;
        if (whole) {
            out[starter] = whole;
            continue;
        }
        if (!order) starter = kept;
        last = order;
        out[kept++] = c;
    }
    return kept;
}
