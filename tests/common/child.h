/* child.h - work in a child process, and q, k, v, o of one call to do it on.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_CHILD_H
#define ESA_TESTS_CHILD_H

#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/naive.h"
#include "common/tests.h"

/* The thread sanitizer refuses new threads in a child of a process with threads, and has a thread
 * of its own. It takes signals itself and calls handlers later, on the stack of the thread. */
#if defined(__SANITIZE_THREAD__)
enum { CHILD_THREADS = 1, OWN_THREADS = 1, LATE_SIGNALS = 1 };
#else
enum { CHILD_THREADS = 2, OWN_THREADS = 0, LATE_SIGNALS = 0 };
#endif

static esa_tensor tq, tk, tv, to;

/* Views of four arrays [1,H,N,D], and contents of the first three. */
static inline int fill_call(int32_t dtype, int64_t H, int64_t N, int64_t D, void *q, void *k,
                            void *v, void *o)
{
    tq = esa_tensor_bnsd(q, dtype, 1, H, N, D);
    tk = esa_tensor_bnsd(k, dtype, 1, H, N, D);
    tv = esa_tensor_bnsd(v, dtype, 1, H, N, D);
    to = esa_tensor_bnsd(o, dtype, 1, H, N, D);
    tensor_fill(&tq, 1, 1.5);
    tensor_fill(&tk, 2, 1.5);
    tensor_fill(&tv, 3, 1.0);
    return 0;
}

/* Runs work in a child. It must return 0 within a minute; its number names the check that failed.
 */
static inline void in_child(int (*work)(void *arg), void *arg)
{
    int status;
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (!child) {
        alarm(60);
        _exit(work(arg));
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    if (WIFSIGNALED(status)) fail_msg("the child died of signal %d", WTERMSIG(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

#endif
