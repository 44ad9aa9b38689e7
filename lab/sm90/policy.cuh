// SPDX-License-Identifier: Apache-2.0
//
// The rungs. A version is a policy: what it changes against the one it derives from. notes.md has
// the numbers.
#pragma once

#include "softmax.cuh"

struct policy_v1 {
    // QK of the next block and PV of the last are in flight together
    static constexpr bool OVERLAP = false;
    // the consumers take turns to issue products: one multiplies, one does softmax
    static constexpr bool PINGPONG = false;
    static constexpr max_rule RULE = MAX_EAGER;
    // Q as register fragments: a third less shared-memory traffic in QK
    static constexpr bool Q_REGS = false;
    static constexpr bool HALVES = false; // 64 keys at a time: S and P take half the registers
    // tiles at a time on a multiprocessor; 2 leaves a consumer 112 registers
    static constexpr int TEAMS = 1;
    // 128: Q and six stages fill 224 of 227 KB
    template <int D> static constexpr int STAGES = D == 128 ? 6 : 8;
};
struct policy_v2 : policy_v1 {
    static constexpr bool OVERLAP = true;
};
struct policy_v3 : policy_v2 {
    static constexpr bool PINGPONG = true;
};
struct policy_v4 : policy_v3 {
    static constexpr max_rule RULE = MAX_EXACT;
};
struct policy_v5 : policy_v4 {
    static constexpr bool Q_REGS = true;
};
// Once Q is in registers, taking turns no longer pays: the same speed within noise, one mechanism
// less.
struct policy_v6_128 : policy_v5 {
    static constexpr bool PINGPONG = false;
};
// Four consumers cover for each other. Branches do not pay here, so the rule is eager again. 128
// cannot follow: its O alone takes more than half of the 112 registers.
struct policy_v6_64 : policy_v1 {
    static constexpr bool HALVES = true;
    static constexpr int TEAMS = 2;
    template <int D> static constexpr int STAGES = 6;
};
struct policy_v7_128 : policy_v5 {
    static constexpr max_rule RULE = MAX_LAZY;
};
struct policy_v7_64 : policy_v6_64 {
    static constexpr max_rule RULE = MAX_LAZY;
};
