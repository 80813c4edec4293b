/* Kernels: PTX names them, and host builds of their sources (kernel_shim.h) run. */
#include "fake.h"
#include "kernel_abi.h"

#include <algorithm>
#include <csetjmp>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <pthread.h>

extern "C" CUresult cuDriverGetVersion(int *version);

namespace {
struct Function {
    Context &context;
    const HostKernel &kernel;
};
struct Module {
    Context &context;
    std::string ptx;
    void *library;
    std::map<std::string, std::unique_ptr<Function>> functions;
};
std::mutex &mutex = *new std::mutex;
auto &modules = *new std::map<void *, std::unique_ptr<Module>>;

struct Touched {
    uint64_t first = 0, last = 0;
    bool is_writable = false;
    bool has(uint64_t at, size_t bytes, bool writes) const {
        return at >= first && at + bytes <= last && (is_writable || !writes);
    }
};

uint64_t address(const void *pointer) { return reinterpret_cast<uint64_t>(pointer); }

Touched own_stack() {
    pthread_attr_t attributes;
    void *start;
    size_t bytes;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &start, &bytes);
    pthread_attr_destroy(&attributes);
    return {address(start), address(start) + bytes, true};
}

struct Running : Checker {
    const Context &context;
    const Touched stack = own_stack();
    std::array<Touched, 4> touched; /* ranges that it used last */
    unsigned next = 0;
    std::jmp_buf fault;
    Running(void (*touch)(Checker &, const void *, size_t, bool), const Context &context)
        : Checker{touch}, context(context) {}
};

/* With the lock of the memory. */
void touch(Checker &checker, const void *pointer, size_t bytes, bool writes) {
    auto &running = static_cast<Running &>(checker);
    uint64_t at = address(pointer);
    for (auto &range : running.touched)
        if (range.has(at, bytes, writes))
            return;
    if (running.stack.has(at, bytes, writes))
        return;
    if (!can_reach(running.context, at, bytes, writes, true))
        longjmp(running.fault, 1);
    Range &range = *find_range(at);
    running.touched[running.next++ % running.touched.size()] = {range.base, range.base + range.bytes, writes};
}

void run_kernel(const HostKernel &kernel, const void *arguments, KernelSize size, Context &context) {
    std::shared_lock<std::shared_mutex> locked(memory_lock);
    Running running(touch, context);
    bool has_failed = setjmp(running.fault);
    if (!has_failed)
        kernel.run(arguments, size, running);
    check(!has_failed, ILLEGAL_ADDRESS);
    count(KERNELS);
}

/* The version of PTX that a driver knows follows from its own. */
void check_ptx(const char *image) {
    const char *version = strstr(image, ".version ");
    check(version && strstr(image, ".target "), INVALID_IMAGE);
    int driver, ptx = int(10 * atof(version + strlen(".version ")) + 0.5);
    cuDriverGetVersion(&driver);
    int newest = 10 * (driver / 1000 - 4) + driver % 1000 / 10;
    check(ptx <= newest, UNSUPPORTED_PTX_VERSION);
}
}

API cuModuleLoadData(void **handle, const void *image) try {
    auto &context = current();
    check_ptx(static_cast<const char *>(image));
    check(!fault("no_kernel"), NO_BINARY_FOR_GPU);
    const char *path = getenv("FAKE_CUDA_KERNELS");
    void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
    check(library, NO_BINARY_FOR_GPU);
    std::lock_guard<std::mutex> locked(mutex);
    std::unique_ptr<Module> made(new Module{context, static_cast<const char *>(image), library, {}});
    *handle = made.get();
    modules[*handle] = std::move(made);
    return SUCCESS;
} FAILS

API cuModuleUnload(void *handle) try {
    current();
    std::lock_guard<std::mutex> locked(mutex);
    check(modules.erase(handle), INVALID_HANDLE);
    return SUCCESS;
} FAILS

API cuModuleGetFunction(void **handle, void *module, const char *name) try {
    current();
    std::lock_guard<std::mutex> locked(mutex);
    auto found = modules.find(module);
    check(found != modules.end(), INVALID_HANDLE);
    auto &[context, ptx, library, functions] = *found->second;
    auto *kernel = static_cast<HostKernel *>(dlsym(library, (HOST_KERNEL + std::string(name)).c_str()));
    check(kernel && ptx.find(".entry " + std::string(name) + "(") != std::string::npos, NOT_FOUND);
    auto &function = functions[name];
    if (!function)
        function.reset(new Function{context, *kernel});
    *handle = function.get();
    return SUCCESS;
} FAILS

API cuLaunchKernel(void *handle, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned, void *stream, void **parameters, void **extra) try {
    auto &context = current();
    auto &function = *static_cast<Function *>(handle);
    bool is_here = &function.context == &context && &context_of_stream(stream) == &context;
    check(is_here, INVALID_HANDLE);
    KernelSize size{{x, y, z}, {block_x, block_y, block_z}};
    uint64_t num_threads = uint64_t(block_x) * block_y * block_z;
    check(x && y && z && num_threads && num_threads <= 1024 && parameters && !extra);
    auto &kernel = function.kernel;
    std::shared_ptr<void> arguments(kernel.bind(parameters), kernel.drop);
    enqueue(stream, [=, &kernel](Context &own) { run_kernel(kernel, arguments.get(), size, own); });
    return SUCCESS;
} FAILS
