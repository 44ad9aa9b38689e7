/* report_mp4.c - looks into an MP4 file: codec, size, frames, rate. Reads boxes only, decodes
 * nothing, trusts no length.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A box is a 32-bit length, four letters and its content; length 1: a 64-bit length follows; length
 * 0: up to the end. What is wanted lies at moov / trak / { tkhd, mdia / { mdhd, hdlr, minf / stbl /
 * { stsd, stts } } } (ISO 14496-12). */
#include "report/report.h"

#include <string.h>

typedef struct span {
    const unsigned char *at, *end;
} span;

static uint32_t be32(const unsigned char *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}
static uint64_t be64(const unsigned char *p) { return (uint64_t)be32(p) << 32 | be32(p + 4); }
static size_t left(span s) { return (size_t)(s.end - s.at); }

/* The next box of s: its name and content; 0 at the end or where a length lies. */
static int next_box(span *s, char name[5], span *content)
{
    if (left(*s) < 8) return 0;
    uint64_t size = be32(s->at), head = 8;
    memcpy(name, s->at + 4, 4);
    name[4] = 0;
    if (size == 1) {
        if (left(*s) < 16) return 0;
        size = be64(s->at + 8);
        head = 16;
    } else if (size == 0)
        size = left(*s);
    if (size < head || size > left(*s)) return 0;
    content->at = s->at + head;
    content->end = s->at + size;
    s->at += size;
    return 1;
}

/* The first box of that name inside s. */
static int find(span s, const char *want, span *content)
{
    char name[5];
    while (next_box(&s, name, content))
        if (strcmp(name, want) == 0) return 1;
    return 0;
}

/* The profile byte of the avcC box of a sample entry; 0: none. */
static int avc_profile(span entry)
{
    span avcc;
    if (left(entry) < 78) return 0;
    entry.at += 78; /* the fields of a visual sample entry */
    return find(entry, "avcC", &avcc) && left(avcc) > 1 ? avcc.at[1] : 0;
}

static int sample_entry(report_mp4 *m, span stbl)
{
    span stsd, entry;
    if (!find(stbl, "stsd", &stsd) || left(stsd) < 8) return 0;
    stsd.at += 8;
    if (!next_box(&stsd, m->codec, &entry)) return 0;
    for (int i = 0; i < 4; i++)
        if (m->codec[i] < 0x20 || m->codec[i] > 0x7e) m->codec[i] = '?';
    const int profile = avc_profile(entry);
    /* Baseline, main, extended, high; 4:2:2, 4:4:4 and 10 bits are not for everyone. */
    m->plays = (strcmp(m->codec, "avc1") == 0 || strcmp(m->codec, "avc3") == 0) &&
               (profile == 66 || profile == 77 || profile == 88 || profile == 100);
    return 1;
}

static int timing(report_mp4 *m, span mdia, span stbl)
{
    span mdhd, stts;
    if (!find(mdia, "mdhd", &mdhd) || !find(stbl, "stts", &stts) || left(mdhd) < 20 ||
        left(stts) < 8)
        return 0;
    const int wide = mdhd.at[0] == 1;
    if (wide && left(mdhd) < 32) return 0;
    const double scale = be32(mdhd.at + (wide ? 20 : 12));
    const uint32_t entries = be32(stts.at + 4);
    double ticks = 0;
    stts.at += 8;
    for (uint32_t i = 0; i < entries && left(stts) >= 8; i++, stts.at += 8) {
        m->frames += be32(stts.at);
        ticks += (double)be32(stts.at) * be32(stts.at + 4);
    }
    if (!(scale > 0) || !(ticks > 0)) return 0;
    m->fps = (double)m->frames * scale / ticks;
    return m->frames > 0;
}

int report_mp4_probe(report_mp4 *m, const unsigned char *bytes, size_t size)
{
    span all = { bytes, bytes + size }, moov, trak;
    char name[5];
    memset(m, 0, sizeof *m);
    if (!find(all, "moov", &moov)) return -1;
    while (next_box(&moov, name, &trak)) {
        span tkhd, mdia, hdlr, minf, stbl;
        if (strcmp(name, "trak") != 0 || !find(trak, "mdia", &mdia) || !find(mdia, "hdlr", &hdlr))
            continue;
        if (left(hdlr) < 12 || memcmp(hdlr.at + 8, "vide", 4) != 0 || !find(mdia, "minf", &minf) ||
            !find(minf, "stbl", &stbl))
            continue;
        if (find(trak, "tkhd", &tkhd) && left(tkhd) >= 84) {
            m->width = (int32_t)(be32(tkhd.end - 8) >> 16);
            m->height = (int32_t)(be32(tkhd.end - 4) >> 16);
        }
        return sample_entry(m, stbl) && timing(m, mdia, stbl) ? 0 : -1;
    }
    return -1;
}
