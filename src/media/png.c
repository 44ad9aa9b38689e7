/* png.c - PNG through libpng. Writes one frame as 8-bit RGB. Reads every colour type and depth,
 * interlaced or not.
 * SPDX-License-Identifier: Apache-2.0
 *
 * 16-bit samples are rounded to 8. Alpha and transparent colours are dropped, gamma and colour
 * profiles are ignored: metrics compare the bytes that the writer stored. Everything libpng doubts
 * counts as damage, so a file is either read as it was written or refused.
 *
 * libpng reports an error by calling on_error, which jumps back to guarded(). All state therefore
 * lives in an `image`, and no function below keeps a local that must survive the jump. */
#include "io/outfile.h"
#include "media/frames.h"

#include <png.h>
#include <setjmp.h>
#include <string.h>

typedef struct image {
    esa_ctx *ctx;
    const char *name; /* the file's name in messages */
    png_structp png;
    png_infop info;
    jmp_buf failed;
    esa_status status;    /* set together with the message in ctx */
    const uint8_t *bytes; /* reading: the whole file */
    int64_t size, at;     /* reading: its size and how much libpng has taken */
    esa_outfile *out;     /* writing; else NULL */
    int64_t width, height;
    uint8_t *rgb; /* [height][width][3]; not modified by writing */
} image;

/* ---------------------------------------------------------------- what libpng calls */

/* A status that is already set has its message; else `what` becomes the message. */
static _Noreturn void give_up(image *p, const char *what)
{
    if (!p->status && p->out)
        p->status = esa_fail(p->ctx, ESA_ERR_IO, "%.200s cannot be written: %s", p->name, what);
    else if (!p->status)
        p->status = esa_fail(p->ctx, ESA_ERR_FORMAT, "%.200s is a damaged PNG: %s", p->name, what);
    longjmp(p->failed, 1);
}

static void on_error(png_structp png, png_const_charp what)
{
    give_up(png_get_error_ptr(png), what);
}

/* The library does not print. */
static void on_warning(png_structp png, png_const_charp what)
{
    (void)png;
    (void)what;
}

/* Our allocators want the size back when memory is freed: it is kept in front of the block. */
enum { IN_FRONT = 64 };

static png_voidp on_alloc(png_structp png, png_alloc_size_t bytes)
{
    image *p = png_get_mem_ptr(png);
    const int64_t size = esa_size_add(bytes < INT64_MAX ? (int64_t)bytes : -1, IN_FRONT);
    uint8_t *block = esa_mem_alloc(&p->ctx->mem, size);
    if (!block) {
        p->status = esa_fail(p->ctx, ESA_ERR_MEMORY, "out of memory while %s %.200s",
                             p->out ? "writing" : "reading", p->name);
        return NULL;
    }
    memcpy(block, &size, sizeof size);
    return block + IN_FRONT;
}

static void on_free(png_structp png, png_voidp ptr)
{
    image *p = png_get_mem_ptr(png);
    uint8_t *block = (uint8_t *)ptr - IN_FRONT;
    int64_t size;
    memcpy(&size, block, sizeof size);
    esa_mem_free(&p->ctx->mem, block, size);
}

static void on_read(png_structp png, png_bytep to, size_t count)
{
    image *p = png_get_io_ptr(png);
    if (count > (size_t)(p->size - p->at)) give_up(p, "it ends too early");
    memcpy(to, p->bytes + p->at, count);
    p->at += (int64_t)count;
}

static void on_write(png_structp png, png_bytep from, size_t count)
{
    image *p = png_get_io_ptr(png);
    p->status = esa_outfile_write(p->out, from, (int64_t)count);
    if (p->status) give_up(p, "");
}

static void on_flush(png_structp png) { (void)png; }

/* Runs work, and comes back here when libpng or work gives up. */
static esa_status guarded(image *p, void (*work)(image *p))
{
    if (setjmp(p->failed)) return p->status;
    work(p);
    return ESA_OK;
}

/* ---------------------------------------------------------------- writing */

static void write_picture(image *p)
{
    p->png = png_create_write_struct_2(PNG_LIBPNG_VER_STRING, p, on_error, on_warning, p, on_alloc,
                                       on_free);
    p->info = p->png ? png_create_info_struct(p->png) : NULL;
    if (!p->info) give_up(p, "libpng cannot be started");
    png_set_write_fn(p->png, p, on_write, on_flush);
    /* 832 x 480 takes 14 ms a frame. With libpng's defaults it takes 88 ms and is 23 % smaller. */
    png_set_compression_level(p->png, 1);
    png_set_filter(p->png, PNG_FILTER_TYPE_BASE, PNG_FILTER_PAETH);
    png_set_IHDR(p->png, p->info, (png_uint_32)p->width, (png_uint_32)p->height, 8,
                 PNG_COLOR_TYPE_RGB, PNG_INTERLACE_NONE, PNG_COMPRESSION_TYPE_DEFAULT,
                 PNG_FILTER_TYPE_DEFAULT);
    png_write_info(p->png, p->info);
    for (int64_t y = 0; y < p->height; y++) png_write_row(p->png, p->rgb + y * p->width * 3);
    png_write_end(p->png, NULL);
}

esa_status esa_png_save(esa_ctx *ctx, const esa_frames *frames, int64_t frame, const char *path)
{
    esa_outfile out;
    ESA_TRY(esa_outfile_open(ctx, &out, path));
    image p = { .ctx = ctx,
                .name = path,
                .out = &out,
                .width = frames->width,
                .height = frames->height,
                .rgb = frames->rgb + frame * frames->height * frames->width * 3 };
    esa_status status = guarded(&p, write_picture);
    png_destroy_write_struct(&p.png, &p.info);
    if (!status) status = esa_outfile_commit(&out);
    esa_outfile_close(&out);
    return status;
}

/* ---------------------------------------------------------------- reading */

static void read_header(image *p)
{
    p->png = png_create_read_struct_2(PNG_LIBPNG_VER_STRING, p, on_error, on_warning, p, on_alloc,
                                      on_free);
    p->info = p->png ? png_create_info_struct(p->png) : NULL;
    if (!p->info) give_up(p, "libpng cannot be started");
    png_set_read_fn(p->png, p, on_read);
    png_set_benign_errors(p->png, 0);
    png_set_crc_action(p->png, PNG_CRC_ERROR_QUIT, PNG_CRC_ERROR_QUIT);
    /* Chunks that do not change the pixels are skipped unread: they cannot ask for memory. */
    png_set_keep_unknown_chunks(p->png, PNG_HANDLE_CHUNK_NEVER, NULL, -1);
    png_set_keep_unknown_chunks(p->png, PNG_HANDLE_CHUNK_NEVER, (png_const_bytep) "tRNS", 1);
    png_set_user_limits(p->png, PNG_UINT_31_MAX, PNG_UINT_31_MAX); /* the limit is checked here */
    png_read_info(p->png, p->info);
    p->width = png_get_image_width(p->png, p->info);
    p->height = png_get_image_height(p->png, p->info);
    if (p->width > ESA_FRAMES_MAX_SIDE || p->height > ESA_FRAMES_MAX_SIDE) {
        p->status = esa_fail(p->ctx, ESA_ERR_FORMAT,
                             "%.200s has %lld x %lld pixels, expected sides of 1 .. %d", p->name,
                             (long long)p->width, (long long)p->height, ESA_FRAMES_MAX_SIDE);
        give_up(p, "");
    }
    /* Deflate turns one byte into at most 1032. A header that promises more is wrong, and no memory
     * is reserved for it. */
    if ((int64_t)png_get_rowbytes(p->png, p->info) * p->height / 1032 > p->size)
        give_up(p, "it ends too early");
}

/* A row of palette indices, one byte each, becomes RGB in place. */
static void expand_row(image *p, uint8_t *row, png_const_colorp palette, int colours)
{
    for (int64_t x = p->width - 1; x >= 0; x--) {
        if (row[x] >= colours) give_up(p, "a pixel has a colour that is not in the palette");
        const png_color c = palette[row[x]];
        row[3 * x] = c.red;
        row[3 * x + 1] = c.green;
        row[3 * x + 2] = c.blue;
    }
}

static void read_pixels(image *p)
{
    const int64_t line = 3 * p->width;
    const int indexed = png_get_color_type(p->png, p->info) == PNG_COLOR_TYPE_PALETTE;
    if (indexed) {
        png_set_packing(p->png); /* one index a byte */
    } else {
        png_set_scale_16(p->png);
        png_set_strip_alpha(p->png);
        png_set_gray_to_rgb(p->png);
    }
    const int passes = png_set_interlace_handling(p->png);
    png_read_update_info(p->png, p->info);
    for (int pass = 0; pass < passes; pass++)
        for (int64_t y = 0; y < p->height; y++) png_read_row(p->png, p->rgb + y * line, NULL);
    png_read_end(p->png, NULL);
    if (!indexed) return;
    png_colorp palette = NULL;
    int colours = 0;
    png_get_PLTE(p->png, p->info, &palette, &colours);
    for (int64_t y = 0; y < p->height; y++) expand_row(p, p->rgb + y * line, palette, colours);
}

static esa_status read_into(image *p, esa_frames *frames, int64_t i)
{
    ESA_TRY(guarded(p, read_header));
    if (p->width != frames->width || p->height != frames->height)
        return esa_fail(p->ctx, ESA_ERR_FORMAT,
                        "%.200s has %lld x %lld pixels, the pictures before it have %d x %d",
                        p->name, (long long)p->width, (long long)p->height, frames->width,
                        frames->height);
    p->rgb = frames->rgb + i * p->height * p->width * 3;
    return guarded(p, read_pixels);
}

esa_status esa_png_read_into(esa_ctx *ctx, esa_frames *frames, int64_t i, const char *name,
                             const uint8_t *bytes, int64_t size)
{
    image p = { .ctx = ctx, .name = name, .bytes = bytes, .size = size };
    const esa_status status = read_into(&p, frames, i);
    png_destroy_read_struct(&p.png, &p.info, NULL);
    return status;
}

static esa_status read_all(image *p, esa_frames **frames, esa_frames_info *info, double fps)
{
    ESA_TRY(guarded(p, read_header));
    *info = esa_frames_sizes(1, p->height, p->width, fps);
    if (!frames) return ESA_OK;
    ESA_TRY(esa_frames_new(p->ctx, frames, 1, p->height, p->width, fps));
    p->rgb = (*frames)->rgb;
    return guarded(p, read_pixels);
}

esa_status esa_png_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info, const char *name,
                        const uint8_t *bytes, int64_t size, double fps)
{
    image p = { .ctx = ctx, .name = name, .bytes = bytes, .size = size };
    if (frames) *frames = NULL;
    const esa_status status = read_all(&p, frames, info, fps);
    png_destroy_read_struct(&p.png, &p.info, NULL);
    return esa_frames_drop(status, frames);
}
