/* status.h - how one function passes on the failure of another.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A function that can fail returns esa_status; the function that finds the error writes the message
 * into the ctx (ctx/ctx.h: esa_fail), and every caller above it passes the status on unchanged. */
#ifndef ESA_BASE_STATUS_H
#define ESA_BASE_STATUS_H

#include "esa/esa.h"

/* Calls a function and returns from this one when the call failed. Use it only where nothing needs
 * to be released. This is the one macro in the tree that hides a return. */
#define ESA_TRY(call)                                                                              \
    do {                                                                                           \
        const esa_status status_ = (call);                                                         \
        if (status_) return status_;                                                               \
    } while (0)

#endif
