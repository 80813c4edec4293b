/* Names and numbers of NVIDIA's cuda.h that this driver needs; the numbers are its ABI. */
#pragma once
#include <cstddef>
#include <cstdint>

enum CUresult : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    PEER_ACCESS_UNSUPPORTED = 217,
    UNSUPPORTED_PTX_VERSION = 222,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    PEER_ACCESS_ALREADY_ENABLED = 704,
    CONTEXT_IS_DESTROYED = 709,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    LAUNCH_FAILED = 719,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    SYSTEM_DRIVER_MISMATCH = 803,
    UNKNOWN = 999,
};

using CUdevice = int;
using CUdeviceptr = uint64_t;
using CUmemHandle = uint64_t;

struct CUuuid { unsigned char bytes[16]; };
struct CUipcMemHandle { unsigned char reserved[64]; };
struct CUmemLocation { int type, id; };
struct CUmemAccessDesc { CUmemLocation location; int flags; };
struct CUmemAllocationProp {
    int type, handle_types;
    CUmemLocation location;
    void *win32;
    unsigned char flags[8];
};
struct CUmemcpyAttributes {
    int order;
    CUmemLocation source, target;
    unsigned flags;
};

constexpr int DEVICE_LOCATION = 1, PINNED_ALLOCATION = 1, POSIX_DESCRIPTOR = 1;
constexpr int HOST_MEMORY = 1, DEVICE_MEMORY = 2;
constexpr int CAN_READ = 1, CAN_READ_AND_WRITE = 3;
constexpr unsigned LAZY_PEER_ACCESS = 1, NON_BLOCKING = 1;

enum DeviceAttribute {
    MAX_THREADS_PER_BLOCK = 1, NUM_MULTIPROCESSORS = 16, CONCURRENT_KERNELS = 31, PCI_BUS = 33, PCI_DEVICE = 34,
    UNIFIED_ADDRESSING = 41, CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76, HOST_POINTER_OF_REGISTERED = 91,
    HOST_REGISTER = 99, VIRTUAL_MEMORY = 102, POSIX_HANDLES = 103, STREAM_WRITES_64_BITS = 122,
};

enum PointerAttribute {
    CONTEXT = 1, MEMORY_TYPE, DEVICE_POINTER, HOST_POINTER, P2P_TOKENS, SYNC_MEMOPS, BUFFER_ID, IS_MANAGED,
    DEVICE_ORDINAL, IS_LEGACY_IPC_CAPABLE, RANGE_START, RANGE_SIZE, IS_MAPPED, HANDLE_TYPES, IS_RDMA_CAPABLE,
    ACCESS_FLAGS, MEMPOOL_HANDLE, MAPPING_SIZE, MAPPING_BASE,
};
