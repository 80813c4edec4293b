/* What a host build of a kernel shows the driver: a HostKernel with the name HOST_KERNEL + its own. */
#pragma once
#include <cstddef>

#define HOST_KERNEL "host_kernel_"

struct KernelDim { unsigned x, y, z; };
struct KernelSize { KernelDim grid, block; };
struct Checker { /* of accesses to memory; `touch` does not return if it must not be */
    void (*touch)(Checker &self, const void *at, size_t bytes, bool writes);
};

struct HostKernel {
    void *(*bind)(void **parameters); /* copies the arguments, as a launch does */
    void (*run)(const void *arguments, KernelSize size, Checker &checker);
    void (*drop)(void *arguments);
};
