/* hilbert.c - a generalised Hilbert curve through a box of any size.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The idea is J. Cerveny's "Gilbert" curve; the code is our own. A piece is a box that is walked
 * from one corner to the corner at the other end of its first axis. A long piece is cut across that
 * axis into two pieces in a row. Otherwise one or both of the other axes are halved, and the walk
 * goes out, along and back like the classic curve: three pieces for a flat box, five for a solid
 * one. Halves are even where possible, because with an even side the walk ends next to the start of
 * the next piece. An odd box can force a diagonal step, but never a jump across the box.
 *
 * Every cut shrinks the longest sides, so the recursion depth is below 3 log2(size). */
#include "mask/mask.h"

typedef struct axis {
    int64_t n;   /* number of cells */
    int64_t dir; /* +1 or -1 */
    int32_t of;  /* coordinate it moves along: 0 t, 1 h, 2 w */
} axis;

typedef struct point {
    int64_t c[3];
} point;

typedef struct walk {
    int32_t *out;
    int64_t at;
    int64_t base, h, w;
} walk;

static point moved(point p, axis a, int64_t cells)
{
    p.c[a.of] += a.dir * cells;
    return p;
}

static axis part(axis a, int64_t n)
{
    a.n = n;
    return a;
}
static axis back(axis a, int64_t n)
{
    a.n = n;
    a.dir = -a.dir;
    return a;
}

/* Half of n, made even if n is large enough. */
static int64_t even_half(int64_t n)
{
    const int64_t half = n / 2;
    return half % 2 && n > 2 ? half + 1 : half;
}

/* Walks the box spanned by the axes a, b, c from corner p to the far end of a. */
static void piece(walk *k, point p, axis a, axis b, axis c)
{
    if (b.n == 1 && c.n == 1) {
        for (int64_t i = 0; i < a.n; i++) {
            const point q = moved(p, a, i);
            k->out[k->at++] = (int32_t)(k->base + (q.c[0] * k->h + q.c[1]) * k->w + q.c[2]);
        }
        return;
    }
    if (a.n == 1) { /* a plate across the walk: walk along its longer side */
        if (b.n >= c.n)
            piece(k, p, b, c, a);
        else
            piece(k, p, c, b, a);
        return;
    }
    const int64_t a1 = even_half(a.n), a2 = a.n - a1;
    if (2 * a.n > 3 * b.n && 2 * a.n > 3 * c.n) {
        piece(k, p, part(a, a1), b, c);
        piece(k, moved(p, a, a1), part(a, a2), b, c);
        return;
    }
    /* Much flatter in one direction: keep the thin axis whole and walk the flat figure in
     * the other two. */
    if (3 * b.n > 4 * c.n || c.n == 1) {
        const int64_t b1 = even_half(b.n), b2 = b.n - b1;
        piece(k, p, part(b, b1), c, part(a, a1));
        piece(k, moved(p, b, b1), a, part(b, b2), c);
        piece(k, moved(moved(p, a, a.n - 1), b, b1 - 1), back(b, b1), c, back(a, a2));
        return;
    }
    if (3 * c.n > 4 * b.n || b.n == 1) {
        const int64_t c1 = even_half(c.n), c2 = c.n - c1;
        piece(k, p, part(c, c1), part(a, a1), b);
        piece(k, moved(p, c, c1), a, b, part(c, c2));
        piece(k, moved(moved(p, a, a.n - 1), c, c1 - 1), back(c, c1), back(a, a2), b);
        return;
    }
    const int64_t b1 = even_half(b.n), b2 = b.n - b1, c1 = even_half(c.n), c2 = c.n - c1;
    piece(k, p, part(b, b1), part(c, c1), part(a, a1));
    piece(k, moved(p, b, b1), c, part(a, a1), part(b, b2));
    piece(k, moved(moved(p, b, b1 - 1), c, c.n - 1), a, back(b, b1), back(c, c2));
    piece(k, moved(moved(moved(p, a, a.n - 1), b, b1), c, c.n - 1), back(c, c.n), back(a, a2),
          part(b, b2));
    piece(k, moved(moved(p, a, a.n - 1), b, b1 - 1), back(b, b1), part(c, c1), back(a, a2));
}

void esa_hilbert(int32_t *out, int32_t base, int64_t t, int64_t h, int64_t w)
{
    walk k = { out, 0, base, h, w };
    const axis T = { t, 1, 0 }, H = { h, 1, 1 }, W = { w, 1, 2 };
    const point origin = { { 0, 0, 0 } };
    /* The walk goes along the longest side. Ties prefer the width, as raster does. */
    if (w >= h && w >= t)
        piece(&k, origin, W, H, T);
    else if (h >= t)
        piece(&k, origin, H, W, T);
    else
        piece(&k, origin, T, W, H);
}
