/* Memory between processes: CUDA IPC, and virtual memory management with POSIX descriptors. */
#include "fake.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {
struct IpcHandle {
    uint64_t magic, inode, bytes;
    int pid, fd;
    unsigned char zeros[32];
};
static_assert(sizeof(IpcHandle) == sizeof(CUipcMemHandle));
constexpr uint64_t MAGIC = 0xfa4ec0da;

struct Handle {
    PhysicalPtr physical;
    int references = 1;
};
auto &handles = *new std::map<CUmemHandle, Handle>;
auto &reservations = *new std::map<uint64_t, size_t>;
CUmemHandle next_handle = 0x1000;

using Unique = std::unique_lock<std::shared_mutex>;

/* Not pidfd_getfd, which not all machines allow between processes of a user. */
PhysicalPtr open_exported(const IpcHandle &handle) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat file;
    check(fd >= 0, INVALID_HANDLE);
    bool is_same = !fstat(fd, &file) && file.st_ino == handle.inode;
    auto physical = is_same ? open_physical(fd) : nullptr;
    close(fd);
    check(is_same, INVALID_HANDLE);
    return physical;
}

Range *opened_before(uint64_t inode, const Context &context) {
    for (Range *range : all_ranges())
        if (range->kind == Kind::IMPORTED && range->physical->inode == inode && range->context == &context)
            return range;
    return nullptr;
}

CUmemHandle new_handle(PhysicalPtr physical) {
    handles[next_handle] = {physical};
    return next_handle++;
}

Handle &handle_at(CUmemHandle handle) {
    auto found = handles.find(handle);
    check(found != handles.end());
    return found->second;
}

std::pair<const uint64_t, size_t> &reservation_of(uint64_t at, size_t bytes) {
    auto next = reservations.upper_bound(at);
    check(next != reservations.begin());
    auto &found = *std::prev(next);
    check(at + bytes <= found.first + found.second);
    return found;
}

/* The mappings of which [at, at + bytes) consists. */
std::vector<Range *> mappings_in(uint64_t at, size_t bytes) {
    std::vector<Range *> found;
    for (uint64_t next = at; next < at + bytes;) {
        Range *range = find_range(next);
        check(range && range->kind == Kind::MAPPED && range->base == next);
        check(next + range->bytes <= at + bytes);
        found.push_back(range);
        next += range->bytes;
    }
    return found;
}

int protection_of(const Range &range) {
    int access = 0;
    for (auto of_one : range.access)
        access |= of_one;
    return access == CAN_READ_AND_WRITE ? PROT_READ | PROT_WRITE : access ? PROT_READ : PROT_NONE;
}
}

API cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr at) try {
    current();
    if (long planted = fault("no_handle"))
        return CUresult(planted);
    std::shared_lock<std::shared_mutex> locked(memory_lock);
    Range *range = find_range(at);
    check(range && range->kind == Kind::ALLOCATED);
    IpcHandle made{MAGIC, range->physical->inode, range->bytes, getpid(), range->physical->fd, {}};
    memcpy(handle, &made, sizeof made);
    return SUCCESS;
} FAILS

API cuIpcOpenMemHandle_v2(CUdeviceptr *at, CUipcMemHandle by_value, unsigned flags) try {
    auto &context = current();
    if (long planted = fault("no_open"))
        return CUresult(planted);
    IpcHandle handle;
    memcpy(&handle, &by_value, sizeof handle);
    check(handle.magic == MAGIC && flags == LAZY_PEER_ACCESS);
    check(handle.pid != getpid(), INVALID_CONTEXT);
    Unique locked(memory_lock);
    Range *range = opened_before(handle.inode, context);
    if (!range) {
        auto physical = open_exported(handle);
        bool is_here = context_of(ordinal_of(physical->gpu)).gpu == context.gpu;
        check(is_here || !fault("no_peer"), PEER_ACCESS_UNSUPPORTED);
        uint64_t base = reserve_addresses(physical->bytes);
        map_physical(base, physical->bytes, *physical, PROT_READ | PROT_WRITE);
        range = &add_range({base, handle.bytes, Kind::IMPORTED, physical, &context});
    }
    range->num_opened++;
    *at = range->base;
    return SUCCESS;
} FAILS

API cuIpcCloseMemHandle(CUdeviceptr at) try {
    current();
    Unique locked(memory_lock);
    Range *range = find_range(at);
    check(range && range->kind == Kind::IMPORTED && range->base == at);
    if (!--range->num_opened)
        remove_range(at);
    return SUCCESS;
} FAILS

API cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *, int) try {
    check_initialized();
    *bytes = PAGE;
    return SUCCESS;
} FAILS

API cuMemCreate(CUmemHandle *handle, size_t bytes, const CUmemAllocationProp *wanted, uint64_t flags) try {
    check_not_lost();
    bool is_device = wanted->type == PINNED_ALLOCATION && wanted->location.type == DEVICE_LOCATION;
    check(is_device && bytes && bytes % PAGE == 0 && !flags);
    check(!(wanted->handle_types & ~POSIX_DESCRIPTOR), NOT_SUPPORTED);
    auto physical = make_physical(context_of(wanted->location.id).gpu, bytes, wanted->handle_types);
    Unique locked(memory_lock);
    *handle = new_handle(physical);
    return SUCCESS;
} FAILS

API cuMemRelease(CUmemHandle handle) try {
    check_not_lost();
    Unique locked(memory_lock);
    if (!--handle_at(handle).references)
        handles.erase(handle);
    return SUCCESS;
} FAILS

API cuMemRetainAllocationHandle(CUmemHandle *handle, void *pointer) try {
    check_not_lost();
    Unique locked(memory_lock);
    Range *range = find_range(reinterpret_cast<uint64_t>(pointer));
    check(range && range->kind == Kind::MAPPED);
    for (auto &[number, held] : handles)
        if (held.physical == range->physical) {
            held.references++;
            *handle = number;
            return SUCCESS;
        }
    *handle = new_handle(range->physical);
    return SUCCESS;
} FAILS

API cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *found, CUmemHandle handle) try {
    check_not_lost();
    std::shared_lock<std::shared_mutex> locked(memory_lock);
    auto &physical = *handle_at(handle).physical;
    *found = {PINNED_ALLOCATION, physical.handle_types, {DEVICE_LOCATION, ordinal_of(physical.gpu)}, nullptr, {}};
    return SUCCESS;
} FAILS

API cuMemExportToShareableHandle(void *out, CUmemHandle handle, int type, uint64_t flags) try {
    check_not_lost();
    if (long planted = fault("no_handle"))
        return CUresult(planted);
    std::shared_lock<std::shared_mutex> locked(memory_lock);
    auto &physical = *handle_at(handle).physical;
    check(type == POSIX_DESCRIPTOR && !flags && (physical.handle_types & type));
    *static_cast<int *>(out) = fcntl(physical.fd, F_DUPFD_CLOEXEC, 0);
    return SUCCESS;
} FAILS

/* The caller keeps its descriptor. */
API cuMemImportFromShareableHandle(CUmemHandle *handle, void *descriptor, int type) try {
    check_not_lost();
    if (long planted = fault("no_open"))
        return CUresult(planted);
    check(type == POSIX_DESCRIPTOR);
    auto physical = open_physical(int(reinterpret_cast<intptr_t>(descriptor)));
    ordinal_of(physical->gpu);
    Unique locked(memory_lock);
    *handle = new_handle(physical);
    return SUCCESS;
} FAILS

API cuMemAddressReserve(CUdeviceptr *at, size_t bytes, size_t alignment, CUdeviceptr, uint64_t flags) try {
    check_not_lost();
    check(bytes && bytes % PAGE == 0 && alignment <= PAGE && !flags);
    Unique locked(memory_lock);
    *at = reserve_addresses(bytes);
    reservations[*at] = bytes;
    return SUCCESS;
} FAILS

API cuMemAddressFree(CUdeviceptr at, size_t bytes) try {
    check_not_lost();
    Unique locked(memory_lock);
    auto found = reservations.find(at);
    check(found != reservations.end() && found->second == bytes);
    for (Range *range : all_ranges())
        check(range->base < at || range->base >= at + bytes);
    reservations.erase(found);
    munmap(reinterpret_cast<void *>(at), bytes);
    return SUCCESS;
} FAILS

API cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemHandle handle, uint64_t flags) try {
    check_not_lost();
    Unique locked(memory_lock);
    auto physical = handle_at(handle).physical;
    check(bytes && bytes % PAGE == 0 && at % PAGE == 0 && bytes <= physical->bytes && !offset && !flags);
    auto [base, reserved] = reservation_of(at, bytes);
    for (Range *range : all_ranges())
        check(range->base + range->bytes <= at || range->base >= at + bytes);
    map_physical(at, bytes, *physical, PROT_NONE);
    auto &range = add_range({at, bytes, Kind::MAPPED, physical, nullptr});
    range.reserved_base = base, range.reserved_bytes = reserved;
    return SUCCESS;
} FAILS

API cuMemUnmap(CUdeviceptr at, size_t bytes) try {
    check_not_lost();
    Unique locked(memory_lock);
    for (Range *range : mappings_in(at, bytes))
        remove_range(range->base);
    return SUCCESS;
} FAILS

API cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *wanted, size_t num) try {
    check_not_lost();
    Unique locked(memory_lock);
    for (Range *range : mappings_in(at, bytes)) {
        for (size_t which = 0; which < num; which++) {
            check(wanted[which].location.type == DEVICE_LOCATION);
            auto &context = context_of(wanted[which].location.id);
            check(context.gpu == range->physical->gpu || !fault("no_peer"), INVALID_DEVICE);
            range->access[context.ordinal] = wanted[which].flags;
        }
        mprotect(reinterpret_cast<void *>(range->base), range->bytes, protection_of(*range));
    }
    return SUCCESS;
} FAILS

#define REFUSED(name) API name() { return NOT_SUPPORTED; }
REFUSED(cuMemPoolDestroy)
REFUSED(cuMemPoolExportPointer)
REFUSED(cuMemPoolExportToShareableHandle)
REFUSED(cuMemPoolImportFromShareableHandle)
REFUSED(cuMemPoolImportPointer)
REFUSED(cuMemPoolSetAccess)
