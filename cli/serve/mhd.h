/* mhd.h - libmicrohttpd, opened at run time.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Only `esa serve` needs it, and it brings a TLS library along, so the command does not link it:
 * the other commands start without it, also on machines that have none. Built only where its
 * header was found. */
#ifndef ESA_CLI_MHD_H
#define ESA_CLI_MHD_H

#include <microhttpd.h>

#define SERVE_MHD_CALLS(X)                                                                         \
    X(start_daemon)                                                                                \
    X(stop_daemon)                                                                                 \
    X(get_daemon_info)                                                                             \
    X(get_connection_info)                                                                         \
    X(lookup_connection_value)                                                                     \
    X(suspend_connection)                                                                          \
    X(resume_connection)                                                                           \
    X(queue_response)                                                                              \
    X(create_response_from_buffer)                                                                 \
    X(create_response_from_callback)                                                               \
    X(create_response_from_fd_at_offset64)                                                         \
    X(add_response_header)                                                                         \
    X(destroy_response)                                                                            \
    X(get_version)

/* Pointers to its calls, under their names without MHD_. */
typedef struct serve_mhd {
    void *handle;
#define SERVE_MHD_FIELD(name) __typeof__(&MHD_##name) name;
    SERVE_MHD_CALLS(SERVE_MHD_FIELD)
#undef SERVE_MHD_FIELD
} serve_mhd;

/* CLI_FAILED after a message that says what to install. It stays open until the process ends. */
int serve_mhd_open(serve_mhd *mhd);

#endif
