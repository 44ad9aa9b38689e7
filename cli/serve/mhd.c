/* mhd.c - see mhd.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "serve/mhd.h"
#include "core/cli.h"

#include <dlfcn.h>
#include <string.h>

/* The names of its versions 0.9.67 to 1.0, on Linux distributions, and where the header is. */
static const char *const names[] = { "libmicrohttpd.so.12", "libmicrohttpd.so" };

static int symbol(void *function, void *handle, const char *name)
{
    void *address = dlsym(handle, name);
    memcpy(function, &address, sizeof address);
    return address != NULL;
}

int serve_mhd_open(serve_mhd *mhd)
{
    memset(mhd, 0, sizeof *mhd);
    for (int i = 0; i < 2 && !mhd->handle; i++)
        mhd->handle = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!mhd->handle)
        return cli_fail("serve: libmicrohttpd cannot be opened: %s (on Debian and Ubuntu: sudo "
                        "apt-get install libmicrohttpd12)",
                        dlerror());
    int whole = 1;
#define FIND(name) whole &= symbol(&mhd->name, mhd->handle, "MHD_" #name);
    SERVE_MHD_CALLS(FIND)
#undef FIND
    return whole
               ? CLI_OK
               : cli_fail("serve: this libmicrohttpd lacks calls that esa needs; 0.9.75 and newer "
                          "have them");
}
