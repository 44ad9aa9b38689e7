/* test_folder_sync.c - a folder of pictures that was renamed into place is durable: the folder that
 * holds it is synced, whether it is new or replaces an older one.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/scratch.h"

#include <sys/syscall.h>
#include "common/one_ctx.h"
#include "esa/esa_frames.h"

static ino_t watched;
static int syncs; /* of the watched folder */

long syscall(long number, ...); /* declared for GNU sources only */

/* In place of libc's. */
int fsync(int fd)
{
    struct stat st;
    syncs += fstat(fd, &st) == 0 && st.st_ino == watched;
    return (int)syscall(SYS_fsync, fd);
}

static void renamed_folders(void **state)
{
    (void)state;
    scratch s = scratch_make();
    struct stat st;
    esa_frames *f;
    assert_int_equal(stat(s.dir, &st), 0);
    watched = st.st_ino;
    assert_int_equal(esa_frames_create(ctx, &f, NULL, 2, 16, 16, 16), ESA_OK);
    for (int turn = 0; turn < 2; turn++) {
        syncs = 0;
        if (esa_frames_save(ctx, f, scratch_path(&s, "out/"), NULL))
            fail_msg("%s", esa_ctx_error(ctx));
        assert_true(syncs >= 1);
    }
    esa_frames_free(f);
    unlink(scratch_path(&s, "out/00000.png"));
    unlink(scratch_path(&s, "out/00001.png"));
    assert_int_equal(rmdir(scratch_path(&s, "out")), 0);
    scratch_remove(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(renamed_folders) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
