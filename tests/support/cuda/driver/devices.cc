/* The GPUs that a process sees, and their primary contexts. */
#include "fake.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <mutex>
#include <sstream>
#include <unistd.h>

namespace {
constexpr int VERSION = 13000;

std::mutex &init_mutex = *new std::mutex;
std::mutex &context_mutex = *new std::mutex;
pid_t initialized_in = 0;
auto &visible = *new std::vector<int>;
auto &contexts = *new std::array<Context, MAX_GPUS>;
thread_local std::vector<Context *> stack;

bool has_mig() { return getenv("FAKE_CUDA_MIG"); }

/* What a context takes of its GPU, by default nothing. */
size_t context_bytes() {
    const char *given = getenv("FAKE_CUDA_CONTEXT");
    return given ? strtoull(given, nullptr, 10) : 0;
}

CUuuid uuid_of(int gpu, bool is_mig) {
    return {{0xfa, 0x4e, 0xc0, 0xda, 0, 0, 0x40, 0, uint8_t(is_mig ? 0x90 : 0x80), 0, 0, 0, 0, 0, 0, uint8_t(gpu)}};
}

std::string text_of(int gpu) {
    auto uuid = uuid_of(gpu, has_mig());
    std::string text = has_mig() ? "MIG-" : "GPU-";
    for (int at = 0; at < 16; at++) {
        char two[3];
        snprintf(two, sizeof two, "%02x", uuid.bytes[at]);
        text += (at == 4 || at == 6 || at == 8 || at == 10 ? "-" : "") + std::string(two);
    }
    return text;
}

int gpu_named(const std::string &name, int num_gpus) {
    bool is_uuid = name.size() > 4;
    for (int gpu = 0; gpu < num_gpus; gpu++)
        if (is_uuid ? text_of(gpu).rfind(name, 0) == 0 : std::to_string(gpu) == name)
            return gpu;
    return -1;
}

/* CUDA ends at the first name that it does not know, and sees nothing if one comes twice. */
std::vector<int> find_visible() {
    const char *num = getenv("FAKE_CUDA_GPUS"), *names = getenv("CUDA_VISIBLE_DEVICES");
    int num_gpus = std::min(num ? atoi(num) : 2, MAX_GPUS);
    std::vector<int> found;
    if (!names)
        for (int gpu = 0; gpu < num_gpus; gpu++)
            found.push_back(gpu);
    std::istringstream text(names ? names : "");
    for (std::string name; std::getline(text, name, ',');) {
        int gpu = gpu_named(name, num_gpus);
        if (gpu < 0)
            break;
        if (std::count(found.begin(), found.end(), gpu))
            return {};
        found.push_back(gpu);
    }
    return found;
}

Context &context_at(void *pointer) {
    for (auto &context : contexts)
        if (&context == pointer)
            return context;
    fail(INVALID_CONTEXT);
}

Context &usable(Context &context) {
    check(context.retained, CONTEXT_IS_DESTROYED);
    if (long planted = fault("sticky", ILLEGAL_ADDRESS))
        context.lost = CUresult(planted);
    if (CUresult lost = context.lost)
        fail(lost);
    return context;
}

const char *name_of(CUresult code) {
    switch (code) {
#define NAMED(code) case code: return "CUDA_ERROR_" #code
    case SUCCESS: return "CUDA_SUCCESS";
    NAMED(INVALID_VALUE);
    NAMED(OUT_OF_MEMORY);
    NAMED(NOT_INITIALIZED);
    NAMED(NO_DEVICE);
    NAMED(INVALID_DEVICE);
    NAMED(INVALID_IMAGE);
    NAMED(INVALID_CONTEXT);
    NAMED(NO_BINARY_FOR_GPU);
    NAMED(PEER_ACCESS_UNSUPPORTED);
    NAMED(UNSUPPORTED_PTX_VERSION);
    NAMED(INVALID_HANDLE);
    NAMED(NOT_FOUND);
    NAMED(NOT_READY);
    NAMED(ILLEGAL_ADDRESS);
    NAMED(PEER_ACCESS_ALREADY_ENABLED);
    NAMED(CONTEXT_IS_DESTROYED);
    NAMED(HOST_MEMORY_ALREADY_REGISTERED);
    NAMED(HOST_MEMORY_NOT_REGISTERED);
    NAMED(LAUNCH_FAILED);
    NAMED(NOT_PERMITTED);
    NAMED(NOT_SUPPORTED);
    NAMED(SYSTEM_DRIVER_MISMATCH);
    NAMED(UNKNOWN);
    }
    return nullptr;
}
}

void check_initialized() { check(initialized_in == getpid(), NOT_INITIALIZED); }

Context &current() {
    check_initialized();
    check(!stack.empty() && stack.back(), INVALID_CONTEXT);
    return usable(*stack.back());
}

Context &context_of(int ordinal) {
    check_initialized();
    check(ordinal >= 0 && ordinal < int(visible.size()), INVALID_DEVICE);
    return contexts[ordinal];
}

int ordinal_of(int gpu) {
    auto found = std::find(visible.begin(), visible.end(), gpu);
    check(found != visible.end(), INVALID_DEVICE);
    return found - visible.begin();
}

void check_not_lost() {
    check_initialized();
    for (auto &context : contexts)
        if (context.retained)
            usable(context);
}

API cuInit(unsigned) try {
    std::lock_guard<std::mutex> locked(init_mutex);
    check(!initialized_in || initialized_in == getpid(), NOT_INITIALIZED); /* as in a fork of a process with CUDA */
    if (initialized_in)
        return SUCCESS;
    open_world();
    if (long planted = fault("init", SYSTEM_DRIVER_MISMATCH))
        return CUresult(planted);
    visible = find_visible();
    check(!visible.empty(), NO_DEVICE);
    for (size_t ordinal = 0; ordinal < visible.size(); ordinal++)
        contexts[ordinal].ordinal = ordinal, contexts[ordinal].gpu = visible[ordinal];
    initialized_in = getpid();
    return SUCCESS;
} FAILS

API cuDriverGetVersion(int *version) {
    const char *given = getenv("FAKE_CUDA_VERSION");
    *version = given ? atoi(given) : VERSION;
    return SUCCESS;
}

API cuGetErrorName(CUresult code, const char **name) {
    *name = name_of(code);
    return *name ? SUCCESS : INVALID_VALUE;
}

API cuGetErrorString(CUresult code, const char **text) { return cuGetErrorName(code, text); }

API cuGetProcAddress_v2(const char *name, void **found, int, uint64_t, int *status) {
    Dl_info own;
    dladdr(reinterpret_cast<void *>(&cuInit), &own);
    void *library = dlopen(own.dli_fname, RTLD_NOLOAD | RTLD_LAZY);
    *found = dlsym(library, (std::string(name) + "_v2").c_str());
    if (!*found)
        *found = dlsym(library, name);
    dlclose(library);
    if (status)
        *status = *found ? 0 : 1;
    return *found ? SUCCESS : NOT_FOUND;
}

API cuDeviceGetCount(int *num) try {
    check_initialized();
    *num = visible.size();
    return SUCCESS;
} FAILS

API cuDeviceGet(CUdevice *device, int ordinal) try {
    *device = context_of(ordinal).ordinal;
    return SUCCESS;
} FAILS

API cuDeviceGetName(char *name, int size, CUdevice device) try {
    snprintf(name, size, "Fake GPU %d", context_of(device).gpu);
    return SUCCESS;
} FAILS

API cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) try {
    context_of(device);
    *bytes = total_bytes();
    return SUCCESS;
} FAILS

/* Of a MIG instance, the first is the UUID of its GPU. */
API cuDeviceGetUuid(CUuuid *uuid, CUdevice device) try {
    *uuid = uuid_of(context_of(device).gpu, false);
    return SUCCESS;
} FAILS

API cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) try {
    *uuid = uuid_of(context_of(device).gpu, has_mig());
    return SUCCESS;
} FAILS

API cuDeviceGetPCIBusId(char *id, int size, CUdevice device) try {
    snprintf(id, size, "0000:%02x:00.0", 1 + context_of(device).gpu);
    return SUCCESS;
} FAILS

API cuDeviceGetAttribute(int *value, int attribute, CUdevice device) try {
    auto &context = context_of(device);
    check(attribute > 0 && attribute < 200);
    switch (attribute) {
    case MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case NUM_MULTIPROCESSORS: *value = 132; break;
    case CAPABILITY_MAJOR: *value = 9; break;
    case PCI_BUS: *value = 1 + context.gpu; break;
    case CONCURRENT_KERNELS: case UNIFIED_ADDRESSING: case HOST_POINTER_OF_REGISTERED: case HOST_REGISTER:
    case VIRTUAL_MEMORY: case POSIX_HANDLES: case STREAM_WRITES_64_BITS: *value = 1; break;
    default: *value = 0;
    }
    return SUCCESS;
} FAILS

API cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) try {
    *can = &context_of(device) != &context_of(peer) && !fault("no_peer");
    return SUCCESS;
} FAILS

API cuDevicePrimaryCtxRetain(Context **context, CUdevice device) try {
    auto &made = context_of(device);
    std::lock_guard<std::mutex> locked(context_mutex);
    if (made.retained++ == 0 && context_bytes())
        made.slot = enter_memory(uint64_t(getpid()) << 32 | made.gpu, context_bytes(), made.gpu);
    *context = &made;
    return SUCCESS;
} FAILS

/* The last release frees what the context has. */
API cuDevicePrimaryCtxRelease_v2(CUdevice device) try {
    auto &context = context_of(device);
    std::lock_guard<std::mutex> locked(context_mutex);
    check(context.retained, INVALID_CONTEXT);
    if (--context.retained == 0) {
        drop_streams(context);
        drop_memory(context);
        context.peers.clear();
        if (context_bytes())
            leave_memory(context.slot);
    }
    return SUCCESS;
} FAILS

API cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) try {
    *flags = 0;
    *is_active = context_of(device).retained > 0;
    return SUCCESS;
} FAILS

API cuCtxPushCurrent_v2(void *context) try {
    check_initialized();
    stack.push_back(&context_at(context));
    return SUCCESS;
} FAILS

API cuCtxPopCurrent_v2(Context **context) try {
    check_initialized();
    check(!stack.empty(), INVALID_CONTEXT);
    if (context)
        *context = stack.back();
    stack.pop_back();
    return SUCCESS;
} FAILS

API cuCtxSetCurrent(void *context) try {
    check_initialized();
    if (!stack.empty())
        stack.pop_back();
    if (context)
        stack.push_back(&context_at(context));
    return SUCCESS;
} FAILS

API cuCtxGetCurrent(Context **context) try {
    check_initialized();
    *context = stack.empty() ? nullptr : stack.back();
    return SUCCESS;
} FAILS

API cuCtxGetDevice(CUdevice *device) try {
    check_initialized();
    check(!stack.empty(), INVALID_CONTEXT);
    *device = stack.back()->ordinal;
    return SUCCESS;
} FAILS

API cuCtxGetId(void *context, unsigned long long *id) try {
    *id = 1 + (context ? context_at(context) : current()).ordinal;
    return SUCCESS;
} FAILS

API cuCtxGetFlags(unsigned *flags) try {
    current();
    *flags = 0;
    return SUCCESS;
} FAILS

API cuCtxSetFlags(unsigned) try {
    current();
    return SUCCESS;
} FAILS

API cuCtxEnablePeerAccess(void *peer, unsigned) try {
    auto &context = current(), &other = context_at(peer);
    check(&context != &other, INVALID_DEVICE);
    check(!fault("no_peer"), PEER_ACCESS_UNSUPPORTED);
    check(context.peers.insert(other.ordinal).second, PEER_ACCESS_ALREADY_ENABLED);
    return SUCCESS;
} FAILS

API cuCtxSynchronize() try {
    synchronize(current());
    return SUCCESS;
} FAILS
