/* Builds CUDA C++ for the host: include this, then the kernels, and name each with HOST_KERNEL_OF.

   The compiler has to instrument memory accesses (-fsanitize=thread), whose calls come here: the driver
   refuses those that a GPU could not make. Blocks run last to first, as their order is open. There are no
   __shared__ or __device__ variables and no __syncthreads(): each thread runs to its end before the next. */
#pragma once
#include "kernel_abi.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define SHOWN __attribute__((visibility("default")))
#define UNINSTRUMENTED __attribute__((no_sanitize("thread")))

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
struct alignas(16) longlong2 { long long x, y; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

using std::max;
using std::min;
template <typename T> T __ldg(const T *at) { return *at; }
template <typename T> T __ldcs(const T *at) { return *at; }
template <typename T> T __ldcg(const T *at) { return *at; }
template <typename T> T __ldcv(const T *at) { return *at; }
template <typename T> void __stcs(T *at, T value) { *at = value; }
template <typename T> void __stcg(T *at, T value) { *at = value; }
template <typename T> void __stwt(T *at, T value) { *at = value; }
inline void __threadfence() {}
inline void __threadfence_system() {}

struct KernelThread {
    KernelDim block, thread;
    KernelSize size;
    Checker &checker;
};
static thread_local KernelThread *kernel_thread __attribute__((tls_model("initial-exec")));
UNINSTRUMENTED static KernelDim kernel_block() { return kernel_thread->block; }
UNINSTRUMENTED static KernelDim kernel_place() { return kernel_thread->thread; }
UNINSTRUMENTED static KernelSize kernel_size() { return kernel_thread->size; }
#define blockIdx kernel_block()
#define threadIdx kernel_place()
#define blockDim kernel_size().block
#define gridDim kernel_size().grid

template <typename Visit> UNINSTRUMENTED void each_backwards(KernelDim dim, Visit visit) {
    for (unsigned z = dim.z; z--;)
        for (unsigned y = dim.y; y--;)
            for (unsigned x = dim.x; x--;)
                visit(KernelDim{x, y, z});
}

template <auto KERNEL, typename... Arguments> struct HostBuild {
    using Values = std::tuple<std::remove_const_t<Arguments>...>;

    template <size_t... I> UNINSTRUMENTED static void *copied(void **parameters, std::index_sequence<I...>) {
        return new Values(*static_cast<std::tuple_element_t<I, Values> *>(parameters[I])...);
    }

    UNINSTRUMENTED static void *bind(void **parameters) {
        return copied(parameters, std::index_sequence_for<Arguments...>{});
    }

    UNINSTRUMENTED static void run(const void *arguments, KernelSize size, Checker &checker) {
        auto own = *static_cast<const Values *>(arguments); /* on the stack, which kernels may touch */
        KernelThread here{{}, {}, size, checker};
        kernel_thread = &here;
        each_backwards(size.grid, [&](KernelDim block) {
            here.block = block;
            each_backwards(size.block, [&](KernelDim thread) {
                here.thread = thread;
                std::apply(KERNEL, own);
            });
        });
        kernel_thread = nullptr;
    }

    UNINSTRUMENTED static void drop(void *arguments) { delete static_cast<Values *>(arguments); }
};

template <auto KERNEL, typename... Arguments> constexpr HostKernel build_of(void (*)(Arguments...)) {
    using Build = HostBuild<KERNEL, Arguments...>;
    return {Build::bind, Build::run, Build::drop};
}

#define HOST_KERNEL_OF(name) \
    extern "C" { extern const HostKernel SHOWN host_kernel_##name = build_of<&name>(&name); }

UNINSTRUMENTED static void touch(void *at, size_t bytes, bool writes) {
    if (KernelThread *here = kernel_thread)
        here->checker.touch(here->checker, at, bytes, writes);
}

#define TOUCHES(call, bytes, writes) \
    extern "C" UNINSTRUMENTED void __tsan_##call(void *at) { touch(at, bytes, writes); }
#define OF_SIZE(bytes) \
    TOUCHES(read##bytes, bytes, false) TOUCHES(unaligned_read##bytes, bytes, false) \
    TOUCHES(write##bytes, bytes, true) TOUCHES(unaligned_write##bytes, bytes, true)
OF_SIZE(1) OF_SIZE(2) OF_SIZE(4) OF_SIZE(8) OF_SIZE(16)
extern "C" {
UNINSTRUMENTED void __tsan_read_range(void *at, size_t bytes) { touch(at, bytes, false); }
UNINSTRUMENTED void __tsan_write_range(void *at, size_t bytes) { touch(at, bytes, true); }
UNINSTRUMENTED void __tsan_func_entry(void *) {}
UNINSTRUMENTED void __tsan_func_exit() {}
UNINSTRUMENTED void __tsan_init() {}
}
