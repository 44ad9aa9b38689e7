/* session_call.h - the parts of one attention call of a session.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_SESSION_SESSION_CALL_H
#define ESA_SESSION_SESSION_CALL_H

#include "session/session.h"

/* The plan for these views, made if need be (which takes the ctx guard: the caller must not hold
 * it). sparse 0: without a selector. */
esa_status esa_session_get_plan(esa_session *s, esa_session_plan **entry, const esa_tensor *q,
                                const esa_tensor *k, int32_t kind, int32_t sparse);

#endif
