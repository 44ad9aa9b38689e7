/* version.h - the version numbers of esa.
 * SPDX-License-Identifier: Apache-2.0
 *
 * ESA_VERSION_*    release of the library (semantic versioning); CMake and pyproject read it here
 * ESA_API_VERSION  counts incompatible changes of the headers; see esa_api_version() */
#ifndef ESA_VERSION_H
#define ESA_VERSION_H

#define ESA_VERSION_MAJOR 0
#define ESA_VERSION_MINOR 1
#define ESA_VERSION_PATCH 0

#define ESA_API_VERSION 2

#endif
