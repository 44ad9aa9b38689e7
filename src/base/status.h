/* status.h - ESA_TRY passes the failure of a call on.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A function that can fail returns esa_status. The function that finds the error writes the message
 * into the ctx (ctx/ctx.h: esa_fail). Every caller above passes the status on unchanged. */
#ifndef ESA_BASE_STATUS_H
#define ESA_BASE_STATUS_H

#include "esa/esa.h"

/* Calls a function and returns its status if it failed. Use it only if nothing needs to be
 * released. No other macro in the tree hides a return. */
#define ESA_TRY(call)                                                                              \
    do {                                                                                           \
        const esa_status status_ = (call);                                                         \
        if (status_) return status_;                                                               \
    } while (0)

#endif
