/* version.h - the one place where esa's version numbers are written.
 * SPDX-License-Identifier: Apache-2.0
 *
 * ESA_VERSION_*  library release, semantic versioning; CMake and pyproject read it from here.
 * ESA_API_VERSION  counts incompatible changes of the headers; compare with esa_api_version(). */
#ifndef ESA_VERSION_H
#define ESA_VERSION_H

#define ESA_VERSION_MAJOR 0
#define ESA_VERSION_MINOR 1
#define ESA_VERSION_PATCH 0

#define ESA_API_VERSION 1

#endif
