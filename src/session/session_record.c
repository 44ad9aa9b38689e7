/* session_record.c - saves the recording of a RECORD session, and resumes from a file.
 * SPDX-License-Identifier: Apache-2.0 */
#include "session/session.h"

static esa_status check_records(const esa_session *s)
{
    if (s->params.mode == ESA_SESSION_RECORD) return ESA_OK;
    return esa_fail(s->ctx, ESA_ERR_STATE,
                    "this session does not record: recordings need mode RECORD");
}

esa_status esa_session_save(esa_session *s, const char *path)
{
    ESA_TRY(check_records(s));
    return esa_recorder_save(&s->recorder, path);
}

esa_status esa_session_resume(esa_session *s, const char *path)
{
    ESA_TRY(check_records(s));
    return esa_recorder_load(&s->recorder, path, &s->params.select.layout);
}

esa_status esa_session_save_recording(esa_session *s, const char *path)
{
    if (!s) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(s->ctx));
    const esa_status status = esa_session_save(s, path);
    esa_ctx_leave(s->ctx);
    return status;
}

esa_status esa_session_load_recording(esa_session *s, const char *path)
{
    if (!s) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(s->ctx));
    const esa_status status = esa_session_resume(s, path);
    esa_ctx_leave(s->ctx);
    return status;
}
