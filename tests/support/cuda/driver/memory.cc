/* Memory of GPUs and pinned memory of the host, as this process has it mapped. */
#include "fake.h"

#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

std::shared_mutex &memory_lock = *new std::shared_mutex;

namespace {
constexpr const char *NAME = "fake-vram:%d:%d"; /* the GPU, and the types of handles */
constexpr size_t POISONED = 8 << 20;
constexpr unsigned REGISTER_READ_ONLY = 8;
auto &ranges = *new std::map<uint64_t, Range>;
uint64_t next_id = 1;

void *pointer(uint64_t at) { return reinterpret_cast<void *>(at); }

void map_at(uint64_t at, size_t bytes, int protection, int flags, int fd) {
    check(mmap(pointer(at), bytes, protection, flags | MAP_FIXED, fd, 0) != MAP_FAILED, OUT_OF_MEMORY);
}

void hide(uint64_t at, size_t bytes) { map_at(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1); }

/* A process must not rely on zeros in new memory. */
void poison(uint64_t at, size_t bytes) { memset(pointer(at), 0xA5, std::min(bytes, POISONED)); }

bool grants(const Context &context, const Range &range, bool writes, bool is_kernel) {
    int needed = writes ? CAN_READ_AND_WRITE : CAN_READ;
    switch (range.kind) {
    case Kind::MAPPED: return (range.access[context.ordinal] & needed) == needed;
    case Kind::ALLOCATED:
    case Kind::IMPORTED:
        return !is_kernel || range.context == &context || context.peers.count(range.context->ordinal);
    default: return true;
    }
}

/* Calls `visit` for each range, in order, that [at, at + bytes) lies in; false if there is a gap. */
template <typename Visit> bool each_range(uint64_t at, size_t bytes, Visit visit) {
    for (uint64_t end = at + bytes; at < end;) {
        Range *range = find_range(at);
        if (!range || !visit(*range))
            return false;
        at = range->base + range->bytes;
    }
    return true;
}

Range &known(uint64_t at) {
    Range *range = find_range(at);
    check(range);
    return *range;
}

Range &of_gpu(uint64_t at) {
    Range &range = known(at);
    check(!range.is_host());
    return range;
}

Range &starting_at(uint64_t at, Kind kind, CUresult otherwise) {
    Range *range = find_range(at);
    check(range && range->base == at && range->kind == kind, otherwise);
    return *range;
}

/* Whether this process has all of it mapped, and may write it. */
bool is_mapped(uint64_t at, size_t bytes, bool writable) {
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512], rights[5];
    for (unsigned long long first, last; fgets(line, sizeof line, maps) && bytes;) {
        if (sscanf(line, "%llx-%llx %4s", &first, &last, rights) != 3 || at < first || at >= last)
            continue;
        if (rights[0] != 'r' || (writable && rights[1] != 'w'))
            break;
        bytes -= std::min<size_t>(bytes, last - at);
        at = last;
    }
    fclose(maps);
    return !bytes;
}

template <typename T> void put(void *data, T value) { memcpy(data, &value, sizeof value); }

void put_attribute(void *data, int attribute, const Range &range, uint64_t at) {
    bool has_no_range = range.kind == Kind::IMPORTED && fault("no_range");
    int ordinal = range.context ? range.context->ordinal : ordinal_of(range.physical->gpu);
    switch (attribute) {
    case CONTEXT: return put<void *>(data, range.context);
    case MEMORY_TYPE: return put<unsigned>(data, range.is_host() ? HOST_MEMORY : DEVICE_MEMORY);
    case DEVICE_POINTER: return put<uint64_t>(data, at);
    case HOST_POINTER: check(range.is_host()); return put<uint64_t>(data, at);
    case SYNC_MEMOPS: case IS_MANAGED: case IS_RDMA_CAPABLE: return put<int>(data, 0);
    case BUFFER_ID: return put<uint64_t>(data, range.id);
    case DEVICE_ORDINAL: return put<int>(data, ordinal);
    case IS_LEGACY_IPC_CAPABLE: return put<int>(data, range.kind == Kind::ALLOCATED);
    case RANGE_START:
        check(!has_no_range);
        return put<uint64_t>(data, range.reserved_bytes ? range.reserved_base : range.base);
    case RANGE_SIZE:
        check(!has_no_range);
        return put<uint64_t>(data, range.reserved_bytes ? range.reserved_bytes : range.bytes);
    case IS_MAPPED: return put<int>(data, 1);
    case HANDLE_TYPES: return put<uint64_t>(data, range.physical ? range.physical->handle_types : 0);
    case ACCESS_FLAGS: return put<int>(data, grants(current(), range, true, true) ? CAN_READ_AND_WRITE : 0);
    case MEMPOOL_HANDLE: return put<void *>(data, nullptr);
    case MAPPING_SIZE: check(!has_no_range); return put<uint64_t>(data, range.bytes);
    case MAPPING_BASE: check(!has_no_range); return put<uint64_t>(data, range.base);
    default: fail(INVALID_VALUE);
    }
}
}

Physical::Physical(int fd, int gpu, int handle_types) : fd(fd), gpu(gpu), handle_types(handle_types) {
    struct stat file;
    fstat(fd, &file);
    inode = file.st_ino, bytes = file.st_size;
    try {
        slot = enter_memory(inode, bytes, gpu);
    } catch (CUresult) {
        close(fd);
        throw;
    }
}

Physical::~Physical() {
    leave_memory(slot);
    close(fd);
}

PhysicalPtr make_physical(int gpu, size_t bytes, int handle_types) {
    check(!fault("out_of_memory"), OUT_OF_MEMORY);
    char name[64];
    snprintf(name, sizeof name, NAME, gpu, handle_types);
    int fd = memfd_create(name, MFD_CLOEXEC);
    check(fd >= 0, OUT_OF_MEMORY);
    (void)!ftruncate(fd, round_up(bytes));
    return std::make_shared<Physical>(fd, gpu, handle_types);
}

PhysicalPtr open_physical(int fd) {
    char link[64], name[128] = {};
    int gpu, handle_types;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    bool is_ours = readlink(link, name, sizeof name - 1) > 0 && !strncmp(name, "/memfd:", 7)
        && sscanf(name + 7, NAME, &gpu, &handle_types) == 2;
    check(is_ours);
    return std::make_shared<Physical>(fcntl(fd, F_DUPFD_CLOEXEC, 0), gpu, handle_types);
}

uint64_t reserve_addresses(size_t bytes) {
    void *made = mmap(nullptr, bytes + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    check(made != MAP_FAILED, OUT_OF_MEMORY);
    return round_up(reinterpret_cast<uint64_t>(made));
}

void map_physical(uint64_t at, size_t bytes, const Physical &physical, int protection) {
    map_at(at, bytes, protection, MAP_SHARED, physical.fd);
}

Range &add_range(Range range) {
    range.id = next_id++;
    return ranges[range.base] = range;
}

Range *find_range(uint64_t at) {
    auto next = ranges.upper_bound(at);
    if (next == ranges.begin())
        return nullptr;
    Range &range = std::prev(next)->second;
    return at < range.base + range.bytes ? &range : nullptr;
}

std::vector<Range *> all_ranges() {
    std::vector<Range *> found;
    for (auto &[base, range] : ranges)
        found.push_back(&range);
    return found;
}

void remove_range(uint64_t base) {
    Range range = ranges.at(base);
    ranges.erase(base);
    if (range.kind == Kind::PINNED)
        munmap(pointer(base), range.bytes);
    else if (range.kind != Kind::REGISTERED)
        hide(base, round_up(range.bytes));
}

bool is_covered(uint64_t at, size_t bytes) {
    return each_range(at, bytes, [](Range &) { return true; });
}

bool can_reach(const Context &context, uint64_t at, size_t bytes, bool writes, bool is_kernel) {
    return each_range(at, bytes, [&](Range &range) { return grants(context, range, writes, is_kernel); });
}

void drop_memory(Context &context) {
    std::unique_lock<std::shared_mutex> locked(memory_lock);
    for (Range *range : all_ranges())
        if (range->context == &context)
            remove_range(range->base);
}

API cuMemGetInfo_v2(size_t *free, size_t *total) try {
    *total = total_bytes();
    *free = *total - used_bytes(current().gpu);
    return SUCCESS;
} FAILS

API cuMemAlloc_v2(CUdeviceptr *at, size_t bytes) try {
    auto &context = current();
    check(bytes);
    auto physical = make_physical(context.gpu, bytes, 0);
    std::unique_lock<std::shared_mutex> locked(memory_lock);
    *at = reserve_addresses(physical->bytes);
    map_physical(*at, physical->bytes, *physical, PROT_READ | PROT_WRITE);
    poison(*at, bytes);
    add_range({*at, bytes, Kind::ALLOCATED, physical, &context});
    return SUCCESS;
} FAILS

/* It waits for the work of the context, as CUDA does. */
API cuMemFree_v2(CUdeviceptr at) try {
    auto &context = current();
    if (!at)
        return SUCCESS;
    synchronize(context);
    std::unique_lock<std::shared_mutex> locked(memory_lock);
    remove_range(starting_at(at, Kind::ALLOCATED, INVALID_VALUE).base);
    return SUCCESS;
} FAILS

API cuMemHostAlloc(void **at, size_t bytes, unsigned) try {
    auto &context = current();
    check(bytes);
    check(!fault("out_of_memory"), OUT_OF_MEMORY);
    *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    check(*at != MAP_FAILED, OUT_OF_MEMORY);
    poison(reinterpret_cast<uint64_t>(*at), bytes);
    std::unique_lock<std::shared_mutex> locked(memory_lock);
    add_range({reinterpret_cast<uint64_t>(*at), bytes, Kind::PINNED, nullptr, &context});
    return SUCCESS;
} FAILS

API cuMemFreeHost(void *at) try {
    synchronize(current());
    std::unique_lock<std::shared_mutex> locked(memory_lock);
    remove_range(starting_at(reinterpret_cast<uint64_t>(at), Kind::PINNED, INVALID_VALUE).base);
    return SUCCESS;
} FAILS

API cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned flags) try {
    auto &context = current();
    auto at = reinterpret_cast<uint64_t>(pointer);
    check(bytes && is_mapped(at, bytes, !(flags & REGISTER_READ_ONLY)));
    check(!fault("out_of_memory"), OUT_OF_MEMORY);
    std::unique_lock<std::shared_mutex> locked(memory_lock);
    for (Range *range : all_ranges())
        check(range->base >= at + bytes || range->base + range->bytes <= at, HOST_MEMORY_ALREADY_REGISTERED);
    add_range({at, bytes, Kind::REGISTERED, nullptr, &context});
    return SUCCESS;
} FAILS

API cuMemHostUnregister(void *pointer) try {
    current();
    std::unique_lock<std::shared_mutex> locked(memory_lock);
    auto at = reinterpret_cast<uint64_t>(pointer);
    remove_range(starting_at(at, Kind::REGISTERED, HOST_MEMORY_NOT_REGISTERED).base);
    return SUCCESS;
} FAILS

API cuMemHostGetDevicePointer_v2(CUdeviceptr *found, void *pointer, unsigned) try {
    current();
    std::shared_lock<std::shared_mutex> locked(memory_lock);
    auto at = reinterpret_cast<uint64_t>(pointer);
    check(known(at).is_host());
    *found = at;
    return SUCCESS;
} FAILS

/* Of memory that is mapped in parts: the part. */
API cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr at) try {
    current();
    std::shared_lock<std::shared_mutex> locked(memory_lock);
    Range *range = find_range(at);
    check(range && !range->is_host() && !(range->kind == Kind::IMPORTED && fault("no_range")), NOT_FOUND);
    if (base)
        *base = range->base;
    if (bytes)
        *bytes = range->bytes;
    return SUCCESS;
} FAILS

API cuPointerGetAttribute(void *data, int attribute, CUdeviceptr at) try {
    check_initialized();
    std::shared_lock<std::shared_mutex> locked(memory_lock);
    put_attribute(data, attribute, known(at), at);
    return SUCCESS;
} FAILS

/* What does not apply to the pointer is 0. */
API cuPointerGetAttributes(unsigned num, int *attributes, void **data, CUdeviceptr at) try {
    check_initialized();
    std::shared_lock<std::shared_mutex> locked(memory_lock);
    Range *range = find_range(at);
    for (unsigned which = 0; which < num; which++)
        try {
            check(range);
            put_attribute(data[which], attributes[which], *range, at);
        } catch (CUresult) {
            put<int>(data[which], 0);
        }
    return SUCCESS;
} FAILS

API cuPointerSetAttribute(const void *, int attribute, CUdeviceptr at) try {
    check_initialized();
    std::shared_lock<std::shared_mutex> locked(memory_lock);
    of_gpu(at);
    check(attribute == SYNC_MEMOPS);
    return SUCCESS;
} FAILS

API cuMemAllocManaged(CUdeviceptr *, size_t, unsigned) { return NOT_SUPPORTED; }
API cuMemRangeGetAttribute(void *, size_t, int, CUdeviceptr, size_t) { return INVALID_VALUE; }
