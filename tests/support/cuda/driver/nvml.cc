/* The few calls of NVML that UCX and kvbus make: GPUs with FAKE_CUDA_NVLINKS links each, by default none. */
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

#define NVML extern "C" __attribute__((visibility("default"))) int

namespace {
enum { DONE = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3 };

struct Value {
    unsigned field, scope;
    long long time, latency;
    int type, result;
    unsigned long long value;
};

struct PciInfo {
    char legacy_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
};

struct Memory {
    unsigned long long total, free, used;
};

int from_environment(const char *name, int otherwise) {
    const char *given = getenv(name);
    return given ? atoi(given) : otherwise;
}
}

extern "C" __attribute__((visibility("default"))) const char *nvmlErrorString(int code) { return code ? "failed" : "done"; }

NVML nvmlInit_v2() { return DONE; }
NVML nvmlShutdown() { return DONE; }

NVML nvmlDeviceGetCount_v2(unsigned *num) {
    *num = from_environment("FAKE_CUDA_GPUS", 2);
    return DONE;
}

NVML nvmlDeviceGetHandleByIndex_v2(unsigned gpu, void **handle) {
    *handle = reinterpret_cast<void *>(1ul + gpu);
    return DONE;
}

/* The last byte of a UUID is the number of its GPU. */
NVML nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    size_t length = strlen(uuid);
    if (length < 2)
        return INVALID_ARGUMENT;
    *handle = reinterpret_cast<void *>(1ul + strtoul(uuid + length - 2, nullptr, 16));
    return DONE;
}

NVML nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    auto read = reinterpret_cast<void (*)(int, size_t *, size_t *)>(dlsym(driver, "fakeReadMemory"));
    size_t total, used;
    read(reinterpret_cast<unsigned long>(handle) - 1, &total, &used);
    *memory = {total, total - used, used};
    return DONE;
}

NVML nvmlDeviceGetPciInfo_v3(void *handle, PciInfo *info) {
    memset(info, 0, sizeof *info);
    info->bus = reinterpret_cast<unsigned long>(handle);
    snprintf(info->id, sizeof info->id, "00000000:%02x:00.0", info->bus);
    return DONE;
}

NVML nvmlDeviceGetFieldValues(void *, int num, Value *values) {
    for (int which = 0; which < num; which++) {
        values[which].result = DONE;
        values[which].type = 1;
        values[which].value = from_environment("FAKE_CUDA_NVLINKS", 0);
    }
    return DONE;
}

NVML nvmlDeviceGetNvLinkRemotePciInfo_v2(void *, unsigned, PciInfo *) { return DONE; }
NVML nvmlDeviceGetGpuFabricInfoV(void *, void *) { return NOT_SUPPORTED; }
