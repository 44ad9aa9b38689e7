/* test_host_limits.c - what control groups leave of memory and CPUs, in made-up /proc and /sys.
 * SPDX-License-Identifier: Apache-2.0 */
#define _XOPEN_SOURCE 700 /* nftw */
#include "common/fake_tree.h"

#include "base/host_limits.h"

enum { MIB = 1 << 20 };

static scratch dir;

static int make(void **state)
{
    (void)state;
    dir = scratch_make();
    return 0;
}

static int clean(void **state)
{
    (void)state;
    fake_remove(&dir);
    return 0;
}

static void put(const char *folder, const char *name, const char *text)
{
    fake_put(&dir, folder, name, text);
}

static void groups(const char *text) { put("/proc/self", "cgroup", text); }

/* What the machine has, less what the groups above the process leave. */
static void memory(void **state)
{
    (void)state;
    assert_true(esa_host_available("") > MIB);
    assert_true(esa_host_available("/no/such/place") == INT64_MAX);
    put("/proc", "meminfo", "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n");
    assert_int_equal(esa_host_available(dir.dir), 4096000);
    groups("0::/a/b\n");
    assert_int_equal(esa_host_available(dir.dir), 4096000); /* no limits */
    put("/sys/fs/cgroup/a/b", "memory.max", "max\n");
    put("/sys/fs/cgroup/a/b", "memory.current", "100\n");
    assert_int_equal(esa_host_available(dir.dir), 4096000);
    put("/sys/fs/cgroup/a", "memory.max", "3000000\n");
    put("/sys/fs/cgroup/a", "memory.current", "2000000\n");
    assert_int_equal(esa_host_available(dir.dir), 1000000);
    put("/sys/fs/cgroup/a", "memory.stat", "anon 5\ninactive_file 500000\n");
    assert_int_equal(esa_host_available(dir.dir), 1500000);
    put("/sys/fs/cgroup/a", "memory.stat", "active_file 200000\nanon 5\ninactive_file 500000\n");
    assert_int_equal(esa_host_available(dir.dir), 1600000); /* half of the files in use */
    put("/sys/fs/cgroup/a", "memory.high", "2500000\n");
    assert_int_equal(esa_host_available(dir.dir), 1100000);
    put("/sys/fs/cgroup/a/b", "memory.max", "50\n"); /* more is used than allowed */
    assert_int_equal(esa_host_available(dir.dir), 0);
    groups("0::/elsewhere\n"); /* a container: only the top is there */
    put("/sys/fs/cgroup", "memory.max", "800000\n");
    put("/sys/fs/cgroup", "memory.current", "200000\n");
    assert_int_equal(esa_host_available(dir.dir), 600000);
}

static void memory_of_version_1(void **state)
{
    (void)state;
    put("/proc", "meminfo", "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n");
    groups("7:cpu,memory:/job\n2:cpuset:/a\n0::/\n");
    put("/sys/fs/cgroup/memory/job", "memory.limit_in_bytes", "900000\n");
    put("/sys/fs/cgroup/memory/job", "memory.usage_in_bytes", "200000\n");
    assert_int_equal(esa_host_available(dir.dir), 700000);
    put("/sys/fs/cgroup/memory/job", "memory.stat",
        "inactive_file 7\nactive_file 9\ntotal_inactive_file 100000\ntotal_active_file 20000\n");
    assert_int_equal(esa_host_available(dir.dir), 810000); /* with the groups below */
    put("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "9223372036854771712\n"); /* none */
    put("/sys/fs/cgroup/memory", "memory.usage_in_bytes", "200000\n");
    assert_int_equal(esa_host_available(dir.dir), 810000);
    groups("7:cpu,other_memory:/job\n"); /* names are compared whole */
    assert_int_equal(esa_host_available(dir.dir), 4096000);
}

static void cpus(void **state)
{
    (void)state;
    assert_true(esa_host_quota("") > 0);
    assert_true(esa_host_quota("/no/such/place") == INT64_MAX);
    groups("0::/a/b\n");
    assert_true(esa_host_quota(dir.dir) == INT64_MAX);
    put("/sys/fs/cgroup/a/b", "cpu.max", "max 100000\n");
    assert_true(esa_host_quota(dir.dir) == INT64_MAX);
    put("/sys/fs/cgroup/a/b", "cpu.max", "250000 100000\n");
    assert_int_equal(esa_host_quota(dir.dir), 2500);
    put("/sys/fs/cgroup/a", "cpu.max", "75000 50000\n"); /* the group above grants less */
    assert_int_equal(esa_host_quota(dir.dir), 1500);
    put("/sys/fs/cgroup/a", "cpu.max", "800000 100000\n");
    assert_int_equal(esa_host_quota(dir.dir), 2500);
    put("/sys/fs/cgroup/a", "cpu.max", "1000 1000000\n");
    assert_int_equal(esa_host_quota(dir.dir), 1);
    put("/sys/fs/cgroup/a", "cpu.max", "0 0\n"); /* says nothing */
    assert_int_equal(esa_host_quota(dir.dir), 2500);
    groups("0::/elsewhere\n"); /* a container */
    put("/sys/fs/cgroup", "cpu.max", "400000 100000\n");
    assert_int_equal(esa_host_quota(dir.dir), 4000);
}

static void cpus_of_version_1(void **state)
{
    (void)state;
    groups("8:cpuset:/job\n5:cpu,cpuacct:/job/step\n0::/\n");
    put("/sys/fs/cgroup/cpuset/job", "cpu.cfs_quota_us", "1000\n"); /* another controller's */
    put("/sys/fs/cgroup/cpuset/job", "cpu.cfs_period_us", "1000\n");
    assert_true(esa_host_quota(dir.dir) == INT64_MAX);
    put("/sys/fs/cgroup/cpu,cpuacct/job/step", "cpu.cfs_quota_us", "-1\n");
    put("/sys/fs/cgroup/cpu,cpuacct/job/step", "cpu.cfs_period_us", "100000\n");
    assert_true(esa_host_quota(dir.dir) == INT64_MAX);
    put("/sys/fs/cgroup/cpu,cpuacct/job", "cpu.cfs_quota_us", "300000\n");
    put("/sys/fs/cgroup/cpu,cpuacct/job", "cpu.cfs_period_us", "100000\n");
    assert_int_equal(esa_host_quota(dir.dir), 3000);
    put("/sys/fs/cgroup/cpu/job", "cpu.cfs_quota_us", "50000\n"); /* mounted by the short name */
    put("/sys/fs/cgroup/cpu/job", "cpu.cfs_period_us", "100000\n");
    assert_int_equal(esa_host_quota(dir.dir), 500);
    groups("0::/v2\n");
    put("/sys/fs/cgroup/unified/v2", "cpu.max", "200000 100000\n"); /* version 2 beside 1 */
    assert_int_equal(esa_host_quota(dir.dir), 2000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(memory, make, clean),
        cmocka_unit_test_setup_teardown(memory_of_version_1, make, clean),
        cmocka_unit_test_setup_teardown(cpus, make, clean),
        cmocka_unit_test_setup_teardown(cpus_of_version_1, make, clean),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
