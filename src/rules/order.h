/* order.h - the adaptive order: which tokens it moves, where it cuts, what it samples.
 * SPDX-License-Identifier: Apache-2.0
 *
 * An adaptive order cuts the moved tokens of a head (a node) in two across their principal
 * direction, then each half, and so on:
 *
 *   cut        A node of more than one block is cut at the block border nearest to its middle. A
 *              node inside one block is cut at the multiple of ESA_ORDER_LEAF nearest to its
 *              middle. Of two equally near ones the lower is taken. Nodes of at most
 *              ESA_ORDER_LEAF tokens stay as they are.
 *   metric     C = second moment of at most ESA_ORDER_MOMENTS tokens of the other side, divided by
 *              the mean of its diagonal, + ESA_ORDER_RIDGE on the diagonal. The squared difference
 *              of two tokens in this metric is the mean squared difference of their logits. If the
 *              mean of the diagonal is not a positive number, C = I.
 *   direction  X: at most ESA_ORDER_SAMPLE tokens of the node, minus their mean. With y =
 *              esa_order_weight, 1 + ESA_ORDER_ROUNDS times: w = C X^T y, y = X w. These are power
 *              iterations in the metric: with C = L L^T and w = L u they are u <- L^T X^T X L u,
 *              and L is not needed. The sign of w makes the largest |y| positive (the first of
 *              equals).
 *   partition  The coordinate of a token is x . w. The lower ones go into the first half. Equal
 *              coordinates go by position. Both halves keep the order that their tokens had.
 *
 * Nodes of at most esa_order_small tokens sample all their tokens. There y <- K y with K = X C X^T
 * gives the same coordinates, and parts of such a node use parts of its K.
 *
 * Pure functions for the CPU and the GPU. */
#ifndef ESA_RULES_ORDER_H
#define ESA_RULES_ORDER_H

#include "base/args.h"
#include "base/inline.h"
#include "rules/rows.h"

enum {
    ESA_ORDER_SAMPLE = 256,   /* tokens that give a direction */
    ESA_ORDER_ROUNDS = 6,     /* power iterations */
    ESA_ORDER_MOMENTS = 1024, /* tokens that give a metric */
    ESA_ORDER_LEAF = 8        /* tokens that are not cut any more */
};
#define ESA_ORDER_RIDGE 1e-4f

/* Positions first .. first+n-1. */
typedef struct esa_order_node {
    uint32_t first, n;
} esa_order_node;

/* The tokens of a side (0: q, 1: k) that the order moves: neither text nor a protected frame 0. The
 * layout is resolved. */
ESA_INLINE esa_order_node esa_order_root(const esa_layout *l, int32_t side, int32_t mode, int64_t N)
{
    const int32_t *grid = side ? l->grid_k : l->grid_q;
    int64_t first = side ? l->text_front_k : l->text_front_q;
    const int64_t end = N - (side ? l->text_back_k : l->text_back_q);
    if (esa_layout_protects(l, side, mode)) first += (int64_t)grid[1] * grid[2];
    const esa_order_node root = { (uint32_t)first, end > first ? (uint32_t)(end - first) : 0u };
    return root;
}

/* First position of the second half; 0: the node is not cut. */
ESA_INLINE uint32_t esa_order_cut(esa_order_node node, uint32_t block)
{
    if (node.n <= ESA_ORDER_LEAF) return 0;
    const uint32_t last = node.first + node.n - 1,
                   unit = node.first / block != last / block ? block : (uint32_t)ESA_ORDER_LEAF;
    const uint32_t twice = 2 * node.first + node.n; /* two times the middle */
    const uint32_t low = (node.first / unit + 1) * unit, high = last / unit * unit;
    uint32_t cut = (twice + unit - 1) / (2 * unit) * unit;
    if (cut < low) cut = low;
    return cut > high ? high : cut;
}

/* The half that holds the first (0) or the second (1) part of a node. */
ESA_INLINE esa_order_node esa_order_half(esa_order_node node, uint32_t cut, uint32_t second)
{
    const esa_order_node a = { node.first, cut - node.first },
                         b = { cut, node.first + node.n - cut };
    return second ? b : a;
}

/* Nodes of at most so many tokens are compared pair by pair. */
ESA_INLINE uint32_t esa_order_small(uint32_t block) { return block < 128 ? 64 : 128; }

/* Node number `index` of 2^level on a level; bits of index from the highest to the lowest choose
 * halves. A node of at most `small` tokens is not cut: it appears on the levels below with zero
 * bits, and beside it stand nodes of 0 tokens. */
ESA_INLINE esa_order_node esa_order_find(esa_order_node root, uint32_t block, uint32_t small,
                                         int32_t level, uint32_t index)
{
    const esa_order_node none = { 0, 0 };
    esa_order_node node = root;
    while (level-- > 0) {
        const uint32_t second = index >> level & 1;
        if (node.n <= small) {
            if (second) return none;
            continue;
        }
        node = esa_order_half(node, esa_order_cut(node, block), second);
    }
    return node;
}

/* Levels of cuts until every node has at most `small` tokens. Visits every node. */
static inline int32_t esa_order_levels(esa_order_node root, uint32_t block, uint32_t small)
{
    if (root.n <= small) return 0;
    const uint32_t cut = esa_order_cut(root, block);
    const int32_t a = esa_order_levels(esa_order_half(root, cut, 0), block, small),
                  b = esa_order_levels(esa_order_half(root, cut, 1), block, small);
    return 1 + (a > b ? a : b);
}

/* Position of sample i of count among n, evenly spaced. */
ESA_INLINE uint32_t esa_order_sample(uint32_t i, uint32_t count, uint64_t n)
{
    return (uint32_t)((2 * (uint64_t)i + 1) * n / (2 * (uint64_t)count));
}

/* What the iterations start from: a fixed number in -1 .. 1 that looks random, so that no structure
 * of the data is orthogonal to it. */
ESA_INLINE float esa_order_weight(uint32_t i)
{
    uint32_t h = (i + 1) * 2654435761u;
    h = (h ^ h >> 15) * 2246822507u;
    h = (h ^ h >> 13) * 3266489909u;
    return (float)(int32_t)(h ^ h >> 16) * 0x1p-31f;
}

/* Multiply-adds of the products that cut a node and everything below it. inside: 1 below a node
 * that is compared pair by pair. */
static inline double esa_order_node_work(esa_order_node node, uint32_t block, double D,
                                         int32_t inside)
{
    const uint32_t cut = esa_order_cut(node, block);
    const double n = node.n, sample = n < ESA_ORDER_SAMPLE ? n : (double)ESA_ORDER_SAMPLE,
                 turns = ESA_ORDER_ROUNDS + 1;
    double work = 0.0;
    if (!cut) return 0.0;
    if (!inside && node.n <= esa_order_small(block)) {
        inside = 1;
        work = n * D * D + n * n * D;
    }
    work += inside ? turns * n * n : turns * (2.0 * sample * D + D * D) + n * D;
    for (uint32_t half = 0; half < 2; half++)
        work += esa_order_node_work(esa_order_half(node, cut, half), block, D, inside);
    return work;
}
/* Multiply-adds of all products for one head of a side. others: tokens of the other side that the
 * metric can sample. */
static inline double esa_order_work(esa_order_node root, uint32_t block, int64_t D, double others)
{
    const double d = (double)D,
                 moments = others < ESA_ORDER_MOMENTS ? others : (double)ESA_ORDER_MOMENTS;
    return moments * d * d + esa_order_node_work(root, block, d, 0);
}

#endif
