/* amx.h - AMX, the matrix tiles of Intel processors: whether they may be used, and their shape.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Linux gives a process the tile registers only if it asks. A thread must set the shape of its
 * tiles before the first tile instruction; without that the instruction faults. All kernels here
 * use whole tiles of 16 rows of 64 bytes, so one shape serves them all. They pad what is
 * smaller. */
#ifndef ESA_CPU_AMX_H
#define ESA_CPU_AMX_H

#include <stdint.h>

enum { ESA_AMX_ROWS = 16, ESA_AMX_ROW_BYTES = 64, ESA_AMX_TILE_BYTES = 1024 };

/* 1 if this process may use AMX with bf16 and int8: the processor has it, the operating system
 * saves its registers, and grants the permission. Asks for the permission once in a process;
 * threads that are started later inherit it. 0 elsewhere, and where the system refuses (kernels
 * before Linux 5.16, some sandboxes). */
int32_t esa_cpu_amx(void);

/* clang before 16 spells the macros of the flags in another way. */
#if (defined(__AMX_TILE__) || defined(__AMXTILE__)) &&                                             \
    (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__AVX512F__)
#define ESA_AMX_HERE 1
#include <immintrin.h>

/* Sets the shape of the tiles in this thread. Call it at the beginning of a task, and
 * esa_amx_end at its end: tiles in use make each switch of threads slower. */
static inline void esa_amx_begin(void)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape __attribute__((aligned(64))) = { .palette = 1 };
    for (int i = 0; i < 8; i++) {
        shape.row_bytes[i] = ESA_AMX_ROW_BYTES;
        shape.rows[i] = ESA_AMX_ROWS;
    }
    __asm__ volatile("" ::"m"(shape)); /* gcc 12's intrinsic does not say that it reads memory */
    _tile_loadconfig(&shape);
}

static inline void esa_amx_end(void) { _tile_release(); }

/* Put it between stores that are not tile stores and tile loads of the same memory: gcc 12's
 * intrinsic for loads does not say that it reads memory. */
#define ESA_AMX_FENCE() __asm__ volatile("" ::: "memory")
#endif

#endif
