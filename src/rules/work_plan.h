/* work_plan.h - how attention work is spread over the cells (layer, step) of a run.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A cell may run at any density. Its curve says what the result loses there: points (density,
 * error), with the densities ascending and common to all cells, and a dense end (cost 1, error 0).
 * A sparse cell of density d costs d plus a fixed part for its mask, its order and its exact rows;
 * a dense cell costs 1. All costs are shares of one dense cell, and the work of a run is the mean
 * cost of its cells.
 *
 * Every cell starts at its cheapest point and climbs the lower convex hull of its curve. A segment
 * of the hull has a gain: weighted error saved per cost. Segments are taken in the order of their
 * gains, over all cells, until the work is spent. So one price holds for the whole run: no cell has
 * a segment left that gains more than the price, and none took one that gains less. Segments at the
 * price itself are taken in part, all by the same fraction. A cell that stops on the way to its
 * dense end is sparse with the density that its cost pays for.
 *
 * Pure functions; the same inputs give the same bits. */
#ifndef ESA_RULES_WORK_PLAN_H
#define ESA_RULES_WORK_PLAN_H

#include <math.h>
#include <string.h>
#include "base/inline.h"

#define ESA_PLAN_POINTS 32 /* most points of a curve */

typedef struct esa_plan_curves {
    int64_t cells;
    int32_t points;        /* 1 .. ESA_PLAN_POINTS */
    const double *density; /* [points], ascending, within 0 .. 1 */
    const double *error;   /* [cells][points], >= 0 */
    const double *weight;  /* [cells], >= 0 */
    const double *fixed;   /* [cells], >= 0: cost of mask, order and exact rows of a sparse cell */
    /* [cells][points], or NULL: what each point costs instead of density + fixed, where cells
     * differ. Then the solution gives costs, not densities. */
    const double *cost;
} esa_plan_curves;

/* The lower convex hull of one cell: gains fall strictly from segment to segment. */
typedef struct esa_plan_hull {
    int32_t points;
    double cost[ESA_PLAN_POINTS + 1], loss[ESA_PLAN_POINTS + 1];
} esa_plan_hull;

/* Error saved per cost between two points of a hull. */
ESA_INLINE double esa_plan_gain(const esa_plan_hull *h, int32_t from, int32_t to)
{
    return (h->loss[from] - h->loss[to]) / (h->cost[to] - h->cost[from]);
}

ESA_INLINE void esa_plan_hull_add(esa_plan_hull *h, double cost, double loss)
{
    int32_t n = h->points;
    if (n && !(cost > h->cost[n - 1] && loss < h->loss[n - 1])) return;
    h->cost[n] = cost;
    h->loss[n] = loss;
    for (; n > 1 && esa_plan_gain(h, n - 1, n) >= esa_plan_gain(h, n - 2, n - 1); n--) {
        h->cost[n - 1] = cost;
        h->loss[n - 1] = loss;
    }
    h->points = n + 1;
}

ESA_INLINE void esa_plan_hull_of(esa_plan_hull *h, const esa_plan_curves *c, int64_t cell)
{
    h->points = 0;
    for (int32_t i = 0; i < c->points; i++) {
        const double cost = c->cost ? c->cost[cell * c->points + i]
                                    : c->density[i] + c->fixed[cell];
        if (cost < 1) esa_plan_hull_add(h, cost, c->weight[cell] * c->error[cell * c->points + i]);
    }
    if (h->points)
        esa_plan_hull_add(h, 1, 0);
    else { /* even the cheapest point costs as much as a dense cell */
        h->cost[0] = 1;
        h->loss[0] = 0;
        h->points = 1;
    }
}

/* Bits of a number >= 0: they sort like the numbers. */
ESA_INLINE uint64_t esa_plan_bits(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, 8);
    return bits;
}

/* Cost of a cell that takes every segment with a gain above the price. *tied receives the cost of
 * its segment at the price, if it has one, else 0. */
ESA_INLINE double esa_plan_cost_at(const esa_plan_hull *h, uint64_t price, double *tied)
{
    int32_t at = 0;
    while (at + 1 < h->points && esa_plan_bits(esa_plan_gain(h, at, at + 1)) > price) at++;
    const int32_t on = at + 1 < h->points && esa_plan_bits(esa_plan_gain(h, at, at + 1)) == price;
    *tied = on ? h->cost[at + 1] - h->cost[at] : 0;
    return h->cost[at];
}

ESA_INLINE double esa_plan_spent(const esa_plan_curves *c, uint64_t price, double *tied)
{
    double spent = 0;
    *tied = 0;
    for (int64_t i = 0; i < c->cells; i++) {
        esa_plan_hull h;
        double t;
        esa_plan_hull_of(&h, c, i);
        spent += esa_plan_cost_at(&h, price, &t);
        *tied += t;
    }
    return spent;
}

/* Solves for the densities (with cost: the costs) of all cells: out[cells], 1 means dense. work:
 * mean cost per cell. Returns the mean cost of the solution. It is above work if even the cheapest
 * points cost more, and below if more work would save nothing. */
ESA_INLINE double esa_plan_solve(double *out, const esa_plan_curves *c, double work)
{
    const double budget = work * (double)c->cells;
    /* The lowest price that can be paid: low stays too cheap, high stays affordable. Price 0 takes
     * every segment, because all gains are positive. */
    uint64_t low = 0, high = UINT64_C(0x7ff0000000000000);
    double tied, spent = esa_plan_spent(c, 0, &tied), total = 0;
    if (spent <= budget) high = 0;
    while (high > low + 1) {
        const uint64_t middle = low + (high - low) / 2;
        if (esa_plan_spent(c, middle, &tied) <= budget)
            high = middle;
        else
            low = middle;
    }
    spent = esa_plan_spent(c, high, &tied);
    double part = tied > 0 ? (budget - spent) / tied : 0;
    part = part < 0 ? 0 : part > 1 ? 1 : part;
    for (int64_t i = 0; i < c->cells; i++) {
        esa_plan_hull h;
        esa_plan_hull_of(&h, c, i);
        const double cost = esa_plan_cost_at(&h, high, &tied);
        const double paid = cost + part * tied;
        out[i] = paid < 1 - 1e-12 ? paid - (c->cost ? 0 : c->fixed[i]) : 1;
        total += paid;
    }
    return total / (double)c->cells;
}

/* Error of a cell at a density, between the points of its curve and the dense end. */
ESA_INLINE double esa_plan_error(const esa_plan_curves *c, int64_t cell, double density)
{
    const double *e = c->error + cell * c->points, *d = c->density;
    if (density >= 1) return 0;
    if (density <= d[0]) return e[0];
    int32_t i = 1;
    while (i < c->points && d[i] < density) i++;
    const double d1 = i < c->points ? d[i] : 1, e1 = i < c->points ? e[i] : 0;
    return e[i - 1] + (e1 - e[i - 1]) * (density - d[i - 1]) / (d1 - d[i - 1]);
}

/* ---------------------------------------------------------------- without a plan file
 * The built-in curve, which is the same for all cells, with weight 1. The error falls by
 * ESA_SHAPE_DECAY nepers from density 0 to 1. */

#define ESA_SHAPE_DECAY  9.0
#define ESA_SHAPE_POINTS 16 /* densities 1/32, 3/32 .. 31/32 */

ESA_INLINE double esa_shape_density(int32_t point)
{
    return (2 * point + 1) / (2.0 * ESA_SHAPE_POINTS);
}
ESA_INLINE double esa_shape_error(double density)
{
    return exp(-ESA_SHAPE_DECAY * density) - exp(-ESA_SHAPE_DECAY);
}

#endif
