/* test_outputs.c - where outputs go and what the new file looks like: links that may be a trap,
 * permissions, owners and ACLs of replaced files, pipes and open files, and folders that are synced
 * after a rename.
 *
 * What only root can make (files and links of other users) is tested as root; the rest by everyone.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "io/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include "common/one_ctx.h"
#include "esa/esa_tensors.h"

enum { OTHER = 65534 }; /* another user and another group */
#define ACL "system.posix_acl_access"

/* ---------------------------------------------------------------- what is synced */

static struct {
    ino_t ino;
    mode_t mode;
} synced[64];
static int syncs;

/* In place of libc's: notes what is synced. */
int fsync(int fd)
{
    struct stat st;
    if (syncs < 64 && fstat(fd, &st) == 0) {
        synced[syncs].ino = st.st_ino;
        synced[syncs++].mode = st.st_mode;
    }
    return (int)syscall(SYS_fsync, fd);
}

static int was_synced(const char *path)
{
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    for (int i = 0; i < syncs; i++)
        if (synced[i].ino == st.st_ino) return 1;
    return 0;
}

static void test_synced(void **state)
{
    (void)state;
    scratch s = scratch_make();
    char from[640];
    syncs = 0;
    assert_int_equal(esa_file_write(ctx, scratch_path(&s, "a"), "text", 4), ESA_OK);
    assert_true(was_synced(scratch_path(&s, "a")));
    assert_true(was_synced(s.dir));
    syncs = 0;
    strcpy(from, scratch_path(&s, "a"));
    assert_int_equal(esa_file_move(ctx, from, scratch_path(&s, "b")), ESA_OK);
    assert_true(was_synced(s.dir));
    syncs = 0;
    strcpy(from, scratch_path(&s, "folder"));
    assert_int_equal(mkdir(from, 0700), 0);
    assert_int_equal(esa_file_move(ctx, from, scratch_path(&s, "moved/")), ESA_OK);
    assert_true(was_synced(s.dir));
    assert_int_equal(rmdir(scratch_path(&s, "moved")), 0);
    assert_refused(ctx, esa_file_move(ctx, from, scratch_path(&s, "moved")), ESA_ERR_IO, "moved",
                   "No such file", NULL);
    assert_int_equal(esa_file_move(ctx, NULL, "x"), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_file_move(ctx, from, NULL), ESA_ERR_ARGUMENT);
    scratch_remove(&s);
}

/* ---------------------------------------------------------------- what is kept */

static struct stat about(const char *path)
{
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    return st;
}

static void assert_holds(const char *path, const char *text)
{
    size_t n;
    uint8_t *bytes = scratch_read(path, &n);
    assert_int_equal(n, strlen(text));
    assert_memory_equal(bytes, text, n);
    free(bytes);
}

/* Replaces path by text in each of the ways there are: 0 esa_file_write, 1 a writer's file, 2 a
 * rename. */
enum { WAYS = 3 };
static esa_status replace_on(esa_ctx *on, int way, const char *path)
{
    char beside[660];
    esa_tensors_writer *w = NULL;
    if (way == 0) return esa_file_write(on, path, "new", 3);
    if (way == 2) {
        snprintf(beside, sizeof beside, "%s.new", path);
        scratch_write(beside, "new", 3);
        const esa_status status = esa_file_move(on, beside, path);
        if (status) unlink(beside);
        return status;
    }
    esa_status status = esa_tensors_writer_create(on, &w, path);
    if (!status) status = esa_tensors_writer_finish(w);
    esa_tensors_writer_free(w);
    return status;
}
static esa_status replace(int way, const char *path) { return replace_on(ctx, way, path); }

static void test_permissions(void **state)
{
    (void)state;
    static const mode_t modes[] = { 0600, 0640, 0644, 0664, 0755, 0400, 0606 };
    scratch s = scratch_make();
    const char *path = scratch_path(&s, "file");
    for (int way = 0; way < WAYS; way++)
        for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
            scratch_write(path, "old", 3);
            assert_int_equal(chmod(path, modes[i]), 0);
            assert_int_equal(replace(way, path), ESA_OK);
            assert_int_equal(about(path).st_mode & 07777, modes[i]);
            assert_int_equal(unlink(path), 0);
        }
    for (int way = 0; way < WAYS; way++) { /* a new file follows the umask */
        const mode_t mask = umask(027);
        assert_int_equal(replace(way, path), ESA_OK);
        umask(mask);
        assert_int_equal(about(path).st_mode & 07777, 0640);
        assert_int_equal(unlink(path), 0);
    }
    scratch_remove(&s);
}

static void test_hard_links(void **state)
{
    (void)state;
    scratch s = scratch_make();
    char other[640];
    strcpy(other, scratch_path(&s, "other"));
    const char *path = scratch_path(&s, "file");
    for (int way = 0; way < WAYS; way++) {
        scratch_write(path, "old", 3);
        assert_int_equal(link(path, other), 0);
        assert_int_equal(replace(way, path), ESA_OK);
        assert_holds(other, "old");
        assert_int_equal(about(path).st_nlink, 1);
        assert_int_equal(unlink(other), 0);
    }
    scratch_remove(&s);
}

/* owner rw-, user OTHER r--, group ---, mask r--, others --- : version 2, then tag, permissions and
 * id of each entry. */
static const uint8_t acl[] = {
    2,    0,    0, 0, /* version */
    1,    0,    6, 0, 0xff,        0xff,
    0xff, 0xff, /* the owner */
    2,    0,    4, 0, OTHER & 255, OTHER >> 8 & 255,
    0,    0, /* a user */
    4,    0,    0, 0, 0xff,        0xff,
    0xff, 0xff, /* the group */
    0x10, 0,    4, 0, 0xff,        0xff,
    0xff, 0xff, /* the mask */
    0x20, 0,    0, 0, 0xff,        0xff,
    0xff, 0xff /* others */
};

static void test_acl(void **state)
{
    (void)state;
    scratch s = scratch_make();
    const char *path = scratch_path(&s, "file");
    for (int way = 0; way < WAYS; way++) {
        uint8_t now[256];
        scratch_write(path, "old", 3);
        const int given = setxattr(path, ACL, acl, sizeof acl, 0) == 0;
        if (!given) assert_int_equal(errno, ENOTSUP); /* a file system without ACLs */
        const mode_t mode = about(path).st_mode;
        assert_int_equal(replace(way, path), ESA_OK);
        assert_int_equal(about(path).st_mode, mode);
        if (given) {
            assert_int_equal(getxattr(path, ACL, now, sizeof now), sizeof acl);
            assert_memory_equal(now, acl, sizeof acl);
        }
        assert_int_equal(unlink(path), 0);
    }
    scratch_remove(&s);
}

/* As another user: the owner cannot be kept, nor can a group that this user is not in. */
static int as_other(const char *path)
{
    esa_ctx *own = NULL;
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = 1;
    if (setgroups(0, NULL) || setresgid(OTHER, OTHER, OTHER) || setresuid(OTHER, OTHER, OTHER))
        return 2;
    if (esa_ctx_create(&own, &p)) return 3;
    for (int way = 0; way < WAYS; way++)
        if (replace_on(own, way, path)) return 10 + way;
    esa_ctx_free(own);
    return 0;
}

static void owners_as_root(scratch *s)
{
    const char *path = scratch_path(s, "file");
    for (int way = 0; way < WAYS; way++) {
        scratch_write(path, "old", 3);
        assert_int_equal(chown(path, OTHER, OTHER), 0);
        assert_int_equal(chmod(path, 0640), 0);
        assert_int_equal(replace(way, path), ESA_OK);
        const struct stat st = about(path);
        assert_int_equal(st.st_uid, OTHER);
        assert_int_equal(st.st_gid, OTHER);
        assert_int_equal(st.st_mode & 07777, 0640);
    }
    assert_int_equal(chmod(s->dir, 0777), 0);
    assert_int_equal(chown(path, 0, 0), 0);
    assert_int_equal(chmod(path, 0664), 0);
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) _exit(as_other(path));
    int how = 0;
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFEXITED(how));
    assert_int_equal(WEXITSTATUS(how), 0);
    const struct stat st = about(path);
    assert_int_equal(st.st_uid, OTHER);
    assert_int_equal(st.st_gid, OTHER);
    /* the group of root could write; this one gets what everybody had */
    assert_int_equal(st.st_mode & 07777, 0644);
}

static void owners_as_user(scratch *s)
{
    gid_t groups[64];
    const int count = getgroups(64, groups);
    const char *path = scratch_path(s, "file");
    for (int i = 0; i < count; i++)
        for (int way = 0; way < WAYS; way++) {
            scratch_write(path, "old", 3);
            assert_int_equal(chown(path, (uid_t)-1, groups[i]), 0);
            assert_int_equal(chmod(path, 0640), 0);
            assert_int_equal(replace(way, path), ESA_OK);
            assert_int_equal(about(path).st_gid, groups[i]);
            assert_int_equal(about(path).st_mode & 07777, 0640);
        }
    scratch_write(path, "old", 3);
    assert_int_equal(replace(0, path), ESA_OK);
    assert_int_equal(about(path).st_uid, geteuid());
}

static void test_owners(void **state)
{
    (void)state;
    scratch s = scratch_make();
    if (geteuid() == 0)
        owners_as_root(&s);
    else
        owners_as_user(&s);
    scratch_remove(&s);
}

/* ---------------------------------------------------------------- links */

/* Writes through a link must be refused, or must reach the target. */
static void try_link(scratch *s, const char *name, int trap)
{
    char link[640], end[640] = "";
    strcpy(link, scratch_path(s, name));
    for (int way = 0; way < 2; way++) { /* a rename replaces the link itself */
        scratch_write(scratch_path(s, "target"), "old", 3);
        const esa_status status = replace(way, link);
        if (trap)
            assert_refused(ctx, status, ESA_ERR_IO, name, "link of another user", NULL);
        else if (status)
            fail_msg("%s", esa_ctx_error(ctx));
        if (trap || way == 0) assert_holds(scratch_path(s, "target"), trap ? "old" : "new");
        struct stat st;
        assert_int_equal(lstat(link, &st), 0);
        assert_true(S_ISLNK(st.st_mode));
    }
    const esa_status status = esa_file_target(ctx, link, end, sizeof end, NULL);
    assert_int_equal(status, trap ? ESA_ERR_IO : ESA_OK);
    if (!trap) assert_string_equal(end + strlen(end) - 6, "target");
}

static void test_traps(void **state)
{
    (void)state;
    const int root = geteuid() == 0;
    scratch s = scratch_make(), shared = scratch_make();
    char target[640], link[640];
    strcpy(target, scratch_path(&s, "target"));
    strcpy(link, scratch_path(&shared, "link"));
    assert_int_equal(symlink(target, link), 0);
    assert_int_equal(symlink(link, scratch_path(&s, "outer")), 0);
    /* This user's own link is followed everywhere. */
    static const mode_t modes[] = { 0700, 0777, 01777, 01755 };
    for (int i = 0; i < 4; i++) {
        assert_int_equal(chmod(shared.dir, modes[i]), 0);
        try_link(&s, "outer", 0);
    }
    /* Another user's link is followed unless the folder is sticky, writable by everybody, and not
     * that user's. Two links in a row are no way around it. */
    for (int owner = 0; root && owner < 2; owner++)
        for (int i = 0; i < 4; i++) {
            assert_int_equal(lchown(link, OTHER, OTHER), 0);
            assert_int_equal(chown(shared.dir, owner ? OTHER : 0, 0), 0);
            assert_int_equal(chmod(shared.dir, modes[i]), 0);
            try_link(&s, "outer", modes[i] == 01777 && !owner);
        }
    assert_int_equal(chmod(shared.dir, 0700), 0);
    scratch_remove(&shared);
    scratch_remove(&s);
}

/* ---------------------------------------------------------------- not replaced */

static void test_in_place(void **state)
{
    (void)state;
    scratch s = scratch_make();
    char text[8] = "", end[640], name[64];
    int32_t in_place = 0;
    const char *path = scratch_path(&s, "pipe");
    assert_int_equal(mkfifo(path, 0600), 0);
    const int pipe = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
    assert_true(pipe >= 0);
    assert_int_equal(esa_file_write(ctx, path, "text", 4), ESA_OK);
    assert_int_equal(read(pipe, text, sizeof text), 4);
    assert_memory_equal(text, "text", 4);
    close(pipe);
    assert_int_equal(esa_file_target(ctx, path, end, sizeof end, &in_place), ESA_OK);
    assert_int_equal(in_place, 1);
    assert_true(S_ISFIFO(about(path).st_mode));

    path = scratch_path(&s, "open");
    scratch_write(path, "one ", 4);
    const ino_t ino = about(path).st_ino;
    const int fd = open(path, O_WRONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    assert_int_equal(esa_file_write(ctx, name, "two", 3), ESA_OK);
    assert_int_equal(esa_file_target(ctx, name, end, sizeof end, &in_place), ESA_OK);
    assert_int_equal(in_place, 1);
    assert_string_equal(end, name);
    close(fd);
    assert_holds(path, "one two");
    assert_int_equal(about(path).st_ino, ino);

    assert_int_equal(esa_file_target(ctx, path, end, sizeof end, &in_place), ESA_OK);
    assert_int_equal(in_place, 0);
    assert_string_equal(end, path);
    assert_refused(ctx, esa_file_write(ctx, s.dir, "x", 1), ESA_ERR_IO, "Is a directory", NULL);
    assert_refused(ctx, esa_file_write(ctx, "", "x", 1), ESA_ERR_ARGUMENT, "file name", NULL);
    assert_refused(ctx, esa_file_write(ctx, NULL, "x", 1), ESA_ERR_ARGUMENT, "file name", NULL);
    assert_refused(ctx, esa_file_write(ctx, path, NULL, 1), ESA_ERR_ARGUMENT, "NULL", NULL);
    assert_refused(ctx, esa_file_write(ctx, path, "x", -1), ESA_ERR_ARGUMENT, "-1", NULL);
    assert_refused(ctx, esa_file_target(ctx, path, NULL, 0, NULL), ESA_ERR_ARGUMENT, "NULL", NULL);
    assert_refused(ctx, esa_file_target(ctx, path, end, 4, NULL), ESA_ERR_ARGUMENT, "4 bytes",
                   NULL);
    assert_int_equal(esa_file_write(ctx, path, NULL, 0), ESA_OK);
    assert_holds(path, "");
    scratch_remove(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_synced),     cmocka_unit_test(test_permissions),
        cmocka_unit_test(test_hard_links), cmocka_unit_test(test_acl),
        cmocka_unit_test(test_owners),     cmocka_unit_test(test_traps),
        cmocka_unit_test(test_in_place)
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
