/* test_movie.c - what FFmpeg reads: nothing but the file itself is opened, one picture takes the
 * memory of one, and FFmpeg's log level is as it was.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include "io/scratch.h"

#include <sys/inotify.h>
#include <sys/mman.h>
#include "esa/esa_video.h"
#include "media/frames.h"

#ifdef ESA_HAVE_FFMPEG
#include <libavutil/log.h>
#include <pthread.h>
#endif

enum { SIDE = 64, PICTURE = SIDE * SIDE * 3 };

static esa_frames *clip(esa_ctx *ctx, int32_t count, int32_t side)
{
    esa_frames *f;
    const int64_t bytes = (int64_t)count * side * side * 3;
    uint8_t *rgb = malloc((size_t)bytes);
    assert_non_null(rgb);
    for (int64_t i = 0; i < bytes; i++) rgb[i] = (uint8_t)(i / 3 % side);
    assert_int_equal(esa_frames_create(ctx, &f, rgb, count, side, side, 25), ESA_OK);
    free(rgb);
    return f;
}

/* Saves a clip under that name in the folder. */
static void save_clip(esa_ctx *ctx, scratch *s, const char *name, int32_t count, int32_t side)
{
    esa_frames *f = clip(ctx, count, side);
    if (esa_frames_save(ctx, f, scratch_path(s, name), NULL)) fail_msg("%s", esa_ctx_error(ctx));
    esa_frames_free(f);
}

/* ---------------------------------------------------------------- other files */

/* Whether a file of the folder that is called secret... was opened since the last call; `except` is
 * not counted. */
static int opened(int watch, const char *except)
{
    char room[8192] __attribute__((aligned(__alignof__(struct inotify_event))));
    int found = 0;
    for (ssize_t n; (n = read(watch, room, sizeof room)) > 0;)
        for (char *at = room; at < room + n;) {
            const struct inotify_event *event = (const struct inotify_event *)at;
            found = found || (event->len && strncmp(event->name, "secret", 6) == 0 &&
                              strcmp(event->name, except) != 0);
            at += sizeof *event + event->len;
        }
    return found;
}

/* Files that name other files. @ stands for the folder. */
static const struct {
    const char *name, *text;
} references[] = {
    { "concat.mp4", "ffconcat version 1.0\nfile secret.mp4\n" },
    { "text.mp4", "ffconcat version 1.0\nfile secret.txt\n" },
    { "list.mp4", "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:10\n#EXT-X-MEDIA-SEQUENCE:0\n"
                  "#EXTINF:1.0,\n@/secret.mp4\n#EXT-X-ENDLIST\n" },
    { "list.mkv", "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:1.0,\nfile:@/secret.mp4\n"
                  "#EXT-X-ENDLIST\n" },
    { "key.mp4", "#EXTM3U\n#EXT-X-TARGETDURATION:10\n"
                 "#EXT-X-KEY:METHOD=AES-128,URI=\"@/secret.txt\"\n#EXTINF:1.0,\n@/secret.mp4\n"
                 "#EXT-X-ENDLIST\n" },
    { "dash.mp4",
      "<?xml version=\"1.0\"?>\n<MPD xmlns=\"urn:mpeg:dash:schema:mpd:2011\" type=\"static\" "
      "mediaPresentationDuration=\"PT1S\" profiles=\"urn:mpeg:dash:profile:isoff-main:2011\">"
      "<BaseURL>@/</BaseURL><Period><AdaptationSet contentType=\"video\" mimeType=\"video/mp4\">"
      "<Representation id=\"0\" bandwidth=\"1000\" width=\"64\" height=\"64\">"
      "<BaseURL>secret.mp4</BaseURL></Representation></AdaptationSet></Period></MPD>\n" },
    { "secret_words.idx", "# VobSub index file, v7 (do not modify this line!)\nsize: 64x64\n"
                          "id: en, index: 0\ntimestamp: 00:00:00:000, filepos: 000000000\n" },
    { "secret%03d.png", "a pattern of pictures\n" },
    { "secret%03d.jpg", "a pattern of pictures\n" },
    { "session.sdp", "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
                     "m=video 9 RTP/AVP 96\na=rtpmap:96 H264/90000\n" },
    { "picture.svg", "<?xml version=\"1.0\"?>\n<svg xmlns=\"http://www.w3.org/2000/svg\" "
                     "xmlns:xlink=\"http://www.w3.org/1999/xlink\" width=\"64\" height=\"64\">"
                     "<image xlink:href=\"secret000.png\" width=\"64\" height=\"64\"/></svg>\n" },
    { "words.txt", "only words, which a video must not become\n" },
};

/* The secrets, which can all be read, and an index of subtitles that belong to one of them. */
static void make_secrets(esa_ctx *ctx, scratch *s)
{
    save_clip(ctx, s, "secret000.png", 1, SIDE);
    save_clip(ctx, s, "secret001.png", 1, SIDE);
    scratch_write(scratch_path(s, "secret.txt"), "the words of a secret\n", 22);
    scratch_write(scratch_path(s, "secret000.jpg"), "no picture, but a name\n", 23);
    scratch_write(scratch_path(s, "secret_words.sub"), "\0\0\1\xba subtitles", 14);
    esa_frames *f = clip(ctx, 3, SIDE);
    const esa_status saved = esa_frames_save(ctx, f, scratch_path(s, "secret.mp4"), NULL);
    if (saved && saved != ESA_ERR_UNSUPPORTED) fail_msg("%s", esa_ctx_error(ctx));
    if (saved) scratch_write(scratch_path(s, "secret.mp4"), "no FFmpeg", 9);
    esa_frames_free(f);
}

/* Copies text with the folder for every @. */
static void fill(char *out, size_t size, const char *text, const char *folder)
{
    size_t n = 0;
    for (; *text; text++)
        n += (size_t)snprintf(out + n, size - n, *text == '@' ? "%s" : "%.1s",
                              *text == '@' ? folder : text);
    assert_true(n < size);
}

static void only_the_file(void **state)
{
    (void)state;
    scratch s = scratch_make();
    esa_ctx *ctx;
    esa_frames *frames;
    size_t size;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    make_secrets(ctx, &s);
    const int watch = inotify_init1(IN_NONBLOCK);
    assert_true(watch >= 0 && inotify_add_watch(watch, s.dir, IN_OPEN) >= 0);
    free(scratch_read(scratch_path(&s, "secret.txt"), &size));
    assert_true(opened(watch, "")); /* the watch works */
    for (size_t i = 0; i < sizeof references / sizeof references[0]; i++) {
        char text[2048], path[640];
        fill(text, sizeof text, references[i].text, s.dir);
        snprintf(path, sizeof path, "%s", scratch_path(&s, references[i].name));
        scratch_write(path, text, strlen(text));
        esa_frames_info info = { .struct_size = sizeof info };
        const esa_status peeked = esa_frames_peek(ctx, &info, path, NULL);
        const esa_status loaded = esa_frames_load(ctx, &frames, path, NULL);
        if (!loaded || !peeked || frames) fail_msg("%s became a video", references[i].name);
        if (!strstr(esa_ctx_error(ctx), references[i].name))
            fail_msg("%s: %s", references[i].name, esa_ctx_error(ctx));
        if (opened(watch, references[i].name))
            fail_msg("%s: another file was opened", references[i].name);
        unlink(path);
    }
    close(watch);
    esa_ctx_free(ctx);
    scratch_remove(&s);
}

/* ---------------------------------------------------------------- memory */

/* An allocator that knows how much was in use at once, and may change the file while it is read. */
typedef struct meter {
    int64_t used, most;
    int calls, armed; /* the call at which `change` runs, 0: none */
    void (*change)(struct meter *m);
    uint8_t *bytes;
    int64_t size;
} meter;

static void *meter_alloc(void *user, uint64_t bytes)
{
    meter *m = user;
    m->used += (int64_t)bytes;
    if (m->used > m->most) m->most = m->used;
    if (++m->calls == m->armed) m->change(m);
    return aligned_alloc(64, (size_t)bytes);
}

static void meter_free(void *user, void *ptr, uint64_t bytes)
{
    ((meter *)user)->used -= (int64_t)bytes;
    free(ptr);
}

static esa_ctx *metered(meter *m)
{
    esa_ctx *ctx;
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = 1;
    p.alloc = meter_alloc;
    p.dealloc = meter_free;
    p.alloc_user = m;
    *m = (meter){ 0 };
    assert_int_equal(esa_ctx_create(&ctx, &p), ESA_OK);
    m->most = m->used;
    return ctx;
}

/* Frames through FFmpeg take the memory of at most three times their number, at the moment when the
 * room doubles from n to 2 n; one frame takes that of one. 4 KiB: the objects around them. */
static void memory_of_frames(void **state)
{
    (void)state;
    scratch s = scratch_make();
    meter m;
    esa_ctx *ctx = metered(&m);
    for (int32_t count = 1; count <= 9; count++) {
        static const char *const names[] = { "a.mp4", "a.png" };
        for (int n = 0; n < (count == 1 ? 2 : 1); n++) {
            esa_frames *f = clip(ctx, count, SIDE), *back;
            esa_frames_info info;
            size_t size;
            const esa_status saved = esa_frames_save(ctx, f, scratch_path(&s, names[n]), NULL);
            esa_frames_free(f);
            if (saved == ESA_ERR_UNSUPPORTED) {
                print_message("%s\n", esa_ctx_error(ctx));
                continue;
            }
            assert_int_equal(saved, ESA_OK);
            uint8_t *bytes = scratch_read(scratch_path(&s, names[n]), &size);
            const int64_t before = m.most = m.used;
            const esa_status read = esa_mp4_read(ctx, &back, &info, names[n], bytes, (int64_t)size,
                                                 16);
            free(bytes);
#ifndef ESA_HAVE_FFMPEG
            assert_refused(ctx, read, ESA_ERR_UNSUPPORTED, "a.", "no FFmpeg", NULL);
#else
            if (read) fail_msg("%s", esa_ctx_error(ctx));
            assert_int_equal(back->count, count);
            const int64_t most = m.most - before, kept = m.used - before;
            const int64_t allowed = (count == 1 ? 1 : 3 * count) * PICTURE + 4096;
            if (most > allowed)
                fail_msg("%s: %d frames take %lld bytes, expected at most %lld", names[n], count,
                         (long long)most, (long long)allowed);
            /* the file says how many there are, so no room is left over */
            if (kept > count * PICTURE + 4096)
                fail_msg("%s: %d frames keep %lld bytes", names[n], count, (long long)kept);
            esa_frames_free(back);
#endif
        }
    }
    esa_ctx_free(ctx);
    assert_int_equal(m.used, 0);
    scratch_remove(&s);
}

/* ---------------------------------------------------------------- a file that changes */

/* A frame line that was short becomes long, so that the frame would end behind the file. */
static void lengthen(meter *m)
{
    memset(m->bytes + m->size - PICTURE - 6, 'x', 900);
    memcpy(m->bytes + m->size - PICTURE - 6, "FRAME ", 6);
    m->bytes[m->size - PICTURE - 6 + 899] = '\n';
}

static void vanish(meter *m) { memset(m->bytes + m->size - PICTURE - 6, 0, 6); }

/* Behind the bytes lies a page that nobody may read. */
static void changing(void **state)
{
    (void)state;
    static const char head[] = "YUV4MPEG2 W64 H64 F16:1 C444\n";
    static void (*const changes[])(meter *m) = { lengthen, vanish };
    const int64_t page = sysconf(_SC_PAGESIZE), size = (int64_t)sizeof head - 1 + 3 * (6 + PICTURE),
                  room = (size + page - 1) / page * page;
    uint8_t *base = mmap(NULL, (size_t)(room + page), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(base != MAP_FAILED && mprotect(base + room, (size_t)page, PROT_NONE) == 0);
    uint8_t *bytes = base + room - size;
    int refused = 0;
    for (int c = 0; c < 2; c++)
        for (int armed = 1, ran = 1; ran; armed++) {
            memcpy(bytes, head, sizeof head - 1);
            for (int i = 0; i < 3; i++) {
                uint8_t *at = bytes + sizeof head - 1 + i * (6 + PICTURE);
                memcpy(at, "FRAME\n", 6);
                memset(at + 6, 7, PICTURE);
            }
            meter m;
            esa_ctx *ctx = metered(&m);
            esa_frames *frames;
            esa_frames_info info;
            m.change = changes[c];
            m.bytes = bytes;
            m.size = size;
            m.calls = 0;
            m.armed = armed;
            const esa_status status = esa_video_read(ctx, &frames, &info, "changing", bytes, size,
                                                     16);
            if (status) assert_refused(ctx, status, ESA_ERR_FORMAT, "changing", "frame 2", NULL);
            assert_true(!status == (frames != NULL));
            refused += status != ESA_OK;
            ran = m.calls >= armed;
            esa_frames_free(frames);
            esa_ctx_free(ctx);
            assert_int_equal(m.used, 0);
        }
    assert_true(refused >= 4); /* at both allocations, the object and its pixels, both changes */
    munmap(base, (size_t)(room + page));
}

/* ---------------------------------------------------------------- FFmpeg's log level */

#ifdef ESA_HAVE_FFMPEG
typedef struct reader {
    const char *path;
    pthread_barrier_t *start;
} reader;

static void *read_often(void *user)
{
    reader *r = user;
    esa_ctx *ctx;
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = 1;
    if (esa_ctx_create(&ctx, &p)) return "no ctx";
    pthread_barrier_wait(r->start);
    const char *wrong = NULL;
    for (int i = 0; i < 20 && !wrong; i++) {
        esa_frames *frames;
        if (esa_frames_load(ctx, &frames, r->path, NULL)) wrong = "a file that was not read";
        esa_frames_free(frames);
    }
    esa_ctx_free(ctx);
    return (void *)(uintptr_t)wrong;
}

static void log_level(void **state)
{
    (void)state;
    scratch s = scratch_make();
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    save_clip(ctx, &s, "a.mp4", 2, SIDE);
    char path[640];
    snprintf(path, sizeof path, "%s", scratch_path(&s, "a.mp4"));
    av_log_set_level(AV_LOG_VERBOSE);
    for (int round = 0; round < 2; round++) {
        enum { THREADS = 4 };
        pthread_barrier_t start;
        pthread_t thread[THREADS];
        reader r = { path, &start };
        assert_int_equal(pthread_barrier_init(&start, NULL, THREADS), 0);
        for (int i = 0; i < THREADS; i++)
            assert_int_equal(pthread_create(&thread[i], NULL, read_often, &r), 0);
        for (int i = 0; i < THREADS; i++) {
            void *wrong;
            assert_int_equal(pthread_join(thread[i], &wrong), 0);
            if (wrong) fail_msg("%s", (const char *)wrong);
        }
        pthread_barrier_destroy(&start);
        assert_int_equal(av_log_get_level(), AV_LOG_VERBOSE);
    }
    /* a refusal restores it, too, and prints nothing although FFmpeg would say something */
    size_t size;
    uint8_t *bytes = scratch_read(path, &size);
    scratch_write(path, bytes, size / 2);
    free(bytes);
    esa_frames *frames;
    const int kept = dup(STDERR_FILENO);
    assert_true(kept >= 0 && freopen(scratch_path(&s, "said"), "w", stderr) != NULL);
    const esa_status status = esa_frames_load(ctx, &frames, path, NULL);
    fflush(stderr);
    assert_true(dup2(kept, STDERR_FILENO) >= 0);
    close(kept);
    assert_refused(ctx, status, ESA_ERR_FORMAT, "a.mp4", NULL);
    assert_int_equal(av_log_get_level(), AV_LOG_VERBOSE);
    free(scratch_read(scratch_path(&s, "said"), &size));
    assert_int_equal(size, 0);
    esa_ctx_free(ctx);
    scratch_remove(&s);
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_the_file),
        cmocka_unit_test(memory_of_frames),
        cmocka_unit_test(changing),
#ifdef ESA_HAVE_FFMPEG
        cmocka_unit_test(log_level),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
