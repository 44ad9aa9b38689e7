/* engine.h - ESA_ENGINE marks internal functions of libesa that the engine calls.
 * SPDX-License-Identifier: Apache-2.0
 *
 * libesa_video links libesa and works on the caller's ctx. It calls some internal functions of
 * libesa, which ESA_ENGINE exports under the symbol version ESA_PRIVATE. They are not part of the
 * API: no installed header declares them, and libesa_video refuses a libesa of another build
 * (esa_build_id). cmake/exports.cmake finds a function whose mark and name are on one line. */
#ifndef ESA_BASE_ENGINE_H
#define ESA_BASE_ENGINE_H

#if defined(__GNUC__) && !defined(__CUDACC__)
#define ESA_ENGINE __attribute__((visibility("default")))
#else
#define ESA_ENGINE
#endif

#endif
