/* old_driver.c - a libcuda.so.1 that says it is the driver of CUDA 11.4, which is too old for every
 * CUDA that the plugin is built with. check_plugin.sh puts it where the CUDA runtime looks first.
 * SPDX-License-Identifier: Apache-2.0 */
int cuInit(unsigned flags);
int cuDriverGetVersion(int *version);

int cuInit(unsigned flags)
{
    (void)flags;
    return 0;
}

int cuDriverGetVersion(int *version)
{
    *version = 11040;
    return 0;
}
