/* 02_masks.c - a mask made by hand: a band given as lists, printed from its bits, converted to
 * FA4's form, saved to a file and read back.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Before: 01_plan.c. Next: 03_session.c uses a session, which decides call by call. */
#include <stdio.h>
#include <string.h>
#include <esa/esa_session.h>

enum { H = 1, N = 1000, BLOCK = 128, NB = (N + BLOCK - 1) / BLOCK, WIDTH = (NB + 7) / 8 };

static int fail(const esa_ctx *ctx, esa_status status)
{
    fprintf(stderr, "%s: %s\n", esa_status_name(status), esa_ctx_error(ctx));
    return 1;
}

int main(void)
{
    const char *path = "02_masks.safetensors";
    int32_t count[H * NB], index[H * NB * NB], fa4_count[H * NB], fa4_index[H * NB * NB];
    uint8_t bits[H * NB * WIDTH], again[H * NB * WIDTH];

    /* Each query block sees its neighbours and block 0. */
    for (int i = 0; i < NB; i++) {
        count[i] = 0;
        for (int j = 0; j < NB; j++)
            if (j == 0 || (j >= i - 1 && j <= i + 1)) index[i * NB + count[i]++] = j;
    }
    esa_mask_info info;
    memset(&info, 0, sizeof info);
    info.struct_size = sizeof info;
    info.block_q = info.block_k = BLOCK;
    info.B = 1;
    info.H = H;
    info.Nq = info.Nk = N;
    info.layout = esa_layout_default();

    esa_ctx *ctx;
    esa_mask *mask = NULL, *loaded = NULL;
    esa_mask_file *file = NULL;
    if (esa_ctx_create(&ctx, NULL)) return 1;
    esa_status status = esa_mask_from_lists(ctx, &mask, &info, count, index, NB);
    if (status) return fail(ctx, status);
    esa_mask_get_info(mask, &info);
    esa_mask_to_bits(mask, bits);
    esa_mask_to_fa4(mask, fa4_count, fa4_index);
    for (int i = 0; i < NB; i++) {
        for (int j = 0; j < NB; j++) putchar(bits[i * WIDTH + j / 8] >> (j % 8) & 1 ? '#' : '.');
        printf("  %d blocks\n", (int)fa4_count[i]);
    }

    /* A file is written completely or not at all. */
    status = esa_mask_file_save(ctx, path, mask);
    if (!status) status = esa_mask_file_open(ctx, &file, path);
    if (!status) status = esa_mask_file_get(file, &loaded, 0, 0, 0, info.density);
    if (status) return fail(ctx, status);
    esa_mask_to_bits(loaded, again);
    const int same = memcmp(bits, again, sizeof bits) == 0 && fa4_count[0] == 2;
    printf("density %.3f; read back from %s: %s\n", info.density, path,
           same ? "the same bits" : "DIFFERENT");
    esa_mask_free(loaded);
    esa_mask_file_free(file);
    esa_mask_free(mask);
    esa_ctx_free(ctx);
    remove(path);
    return same ? 0 : 1;
}
