/* test_carry_gpu.c - device memory of the differences that a video carries: they take what weights
 * leave, the rest is copied from host memory, the plan says so, and the latents are the same.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/gpu_clip.h"

enum { MIB = 1 << 20, LATENTS = 1 << 16 };

static int begin(void **state)
{
    (void)state;
    setenv("ESA_STAND_IN_OPEN", "1", 1); /* test_pipeline_gpu guards the memory */
    return 0;
}

static void note(void *user, const char *line)
{
    char *text = user;
    const size_t used = strlen(text);
    snprintf(text + used, 900 - used, "%s\n", line);
}

/* What a run said and left behind. */
typedef struct run {
    char said[900];
    esa_generate_stats stats;
    char latents[LATENTS];
    size_t size;
} run;

/* Latents alone: no room is kept for a decoder. carry: as in esa_session_params; room: its
 * carry_room. 0: out of memory. */
static int32_t made_latents(run *r, int64_t limit, int32_t carry, int64_t room)
{
    scratch dir = scratch_make();
    char path[640];
    esa_ctx *ctx = context();
    esa_model *model = NULL;
    esa_frames *frames = NULL;
    esa_generate_params p = video(64, 3);
    *r = (run){ .stats.struct_size = sizeof r->stats };
    snprintf(path, sizeof path, "%s", scratch_path(&dir, "latents"));
    p.session = esa_session_params_recommended(ESA_SESSION_ONLINE, ESA_SELECT_ERROR, 128);
    p.session.select.block_q = p.session.select.block_k = 16;
    p.session.select.budget = 0.4;
    p.session.carry = carry;
    p.session.carry_format = ESA_CARRY_BF16;
    p.session.carry_room = room;
    p.decode = 0;
    p.save_latents = path;
    p.say = note;
    p.say_user = r->said;
    esa_status status = open_on(ctx, &model, ESA_DEVICE_CUDA, limit);
    if (!status) status = esa_generate(model, &frames, &p, &r->stats);
    if (status && status != ESA_ERR_MEMORY) fail_msg("%s", esa_ctx_error(ctx));
    if (!status) {
        FILE *file = fopen(path, "rb");
        assert_non_null(file);
        r->size = fread(r->latents, 1, sizeof r->latents, file);
        fclose(file);
        assert_true(r->size > 1000 && r->size < sizeof r->latents);
    }
    esa_model_free(model);
    esa_ctx_free(ctx);
    scratch_remove(&dir);
    return !status;
}

static void assert_same(const run *a, const run *b)
{
    assert_int_equal(a->size, b->size);
    assert_memory_equal(a->latents, b->latents, a->size);
}

static void assert_said(const run *r, const char *words)
{
    if (!strstr(r->said, words)) fail_msg("\"%s\" should mention \"%s\"", r->said, words);
}

static run want, got;

/* Resident, then as little as can be: the same bits, and the stats and the plan say where. */
static void resident_and_copied(void **state)
{
    (void)state;
    assert_true(made_latents(&want, 0, 2, -1));
    const esa_session_stats *s = &want.stats.session;
    print_message("%s", want.said);
    assert_said(&want, "carry     0.00 GiB on the GPU, 2 anchors\n");
    assert_said(&want, ", carry 0.00, rest ");
    assert_int_equal(s->anchor_calls, 2 * 8);
    const int64_t all = s->carry_bytes, one = all / 8;
    assert_true(all > 0 && s->carry_host_bytes == 0);
    assert_int_equal(all, 8 * esa_carry_bytes(ESA_CARRY_BF16, 1, 4, want.stats.tokens, 64));
    for (int32_t layers = 0; layers < 8; layers += 3) {
        assert_true(made_latents(&got, 0, 2, layers * one));
        assert_same(&want, &got);
        s = &got.stats.session;
        /* three lanes at least, of the memory that there is */
        const int64_t device = layers > 3 ? layers * one : 3 * one;
        assert_int_equal(s->carry_bytes, device);
        assert_int_equal(s->carry_host_bytes, all - (device - 3 * one));
        assert_said(&got, " stays on the GPU, ");
        assert_said(&got, " is copied when used, 2 anchors\n");
        assert_true(got.stats.device_peak_bytes < want.stats.device_peak_bytes);
        assert_true(got.stats.peak_bytes > want.stats.peak_bytes);
    }
    assert_true(made_latents(&got, 0, ESA_CARRY_OFF, -1));
    assert_null(strstr(got.said, "carry"));
    assert_int_equal(got.stats.session.carry_bytes, 0);
}

/* Under a limit, weights and differences share what there is. All limits above the first that works
 * give the same latents; no more than the limit without the driver's share can be allocated. */
static void within_a_limit(void **state)
{
    (void)state;
    if (!on_stand_in()) skip(); /* a real GPU cannot be told to refuse */
    int32_t worked = 0, copied = 0, resident = 0;
    assert_true(made_latents(&want, 0, 2, -1));
    for (int64_t limit = 15 * MIB; limit < 25 * MIB; limit += MIB * 5 / 4) {
        char most[32];
        snprintf(most, sizeof most, "%lld", (long long)(limit - limit / 16));
        setenv("ESA_STAND_IN_MOST", most, 1);
        const int32_t works = made_latents(&got, limit, 2, -1);
        unsetenv("ESA_STAND_IN_MOST");
        print_message("%.1f MiB: %s, %lld bytes of differences in host memory\n",
                      (double)limit / MIB, works ? "works" : "too little",
                      (long long)got.stats.session.carry_host_bytes);
        assert_true(works || !worked);
        if (!works) continue;
        assert_same(&want, &got);
        assert_int_equal(got.stats.session.anchor_calls, 2 * 8);
        worked++;
        copied += got.stats.session.carry_host_bytes > 0;
        resident += got.stats.session.carry_host_bytes == 0;
    }
    assert_true(worked > 4 && copied > 0 && resident > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(resident_and_copied),
        cmocka_unit_test(within_a_limit),
    };
    return cmocka_run_group_tests(tests, begin, NULL);
}
