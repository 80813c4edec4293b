/* What the processes of a test share, in the file that FAKE_CUDA_WORLD names.

   A process that refers to memory of a GPU holds a lock on the byte of its entry. The kernel releases the
   lock when the process ends, so memory of a killed process is free at once. */
#include "fake.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>

namespace {
struct Entry {
    uint64_t inode, bytes;
    int gpu, is_used;
};
constexpr int MAX_ENTRIES = 2048;
struct Shared {
    char faults[4096];
    std::atomic<uint64_t> counts[64];
    Entry entries[MAX_ENTRIES];
};

int file = -1;
Shared *shared;
int references[MAX_ENTRIES]; /* of this process */
std::mutex &mutex = *new std::mutex;

struct flock lock_at(int byte, int type) {
    struct flock lock{};
    lock.l_type = type, lock.l_whence = SEEK_SET, lock.l_start = byte, lock.l_len = 1;
    return lock;
}

void set_lock(int byte, int type) {
    auto lock = lock_at(byte, type);
    while (fcntl(file, F_OFD_SETLKW, &lock) && errno == EINTR)
        ;
}

struct Locked { /* the table, against threads and processes */
    std::lock_guard<std::mutex> threads{mutex};
    Locked() { set_lock(0, F_WRLCK); }
    ~Locked() { set_lock(0, F_UNLCK); }
};

bool is_held(int slot) {
    auto lock = lock_at(1 + slot, F_WRLCK);
    return references[slot] || (!fcntl(file, F_OFD_GETLK, &lock) && lock.l_type != F_UNLCK);
}

size_t count_used(int gpu) {
    size_t bytes = 0;
    for (int slot = 0; slot < MAX_ENTRIES; slot++) {
        auto &entry = shared->entries[slot];
        entry.is_used = entry.is_used && is_held(slot);
        bytes += entry.is_used && entry.gpu == gpu ? entry.bytes : 0;
    }
    return bytes;
}

int find_entry(uint64_t inode, bool is_used) {
    for (int slot = 0; slot < MAX_ENTRIES; slot++) {
        auto &entry = shared->entries[slot];
        if (entry.is_used == is_used && (!is_used || entry.inode == inode))
            return slot;
    }
    return -1;
}

/* "name name=value name=value@pid": the value of the name in this text, or 0. */
long fault_in(const char *text, const char *name, long if_bare) {
    for (size_t length = strlen(name); (text = strstr(text, name)); text += length) {
        char *rest = const_cast<char *>(text) + length;
        long value = *rest == '=' ? strtol(rest + 1, &rest, 10) : if_bare;
        long pid = *rest == '@' ? strtol(rest + 1, &rest, 10) : getpid();
        if ((!*rest || *rest == ' ') && pid == getpid())
            return value;
    }
    return 0;
}
}

void open_world() {
    if (shared)
        return;
    const char *path = getenv("FAKE_CUDA_WORLD");
    file = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : memfd_create("fake-cuda-world", MFD_CLOEXEC);
    check(file >= 0 && !ftruncate(file, sizeof(Shared)), UNKNOWN);
    void *at = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    check(at != MAP_FAILED, UNKNOWN);
    shared = static_cast<Shared *>(at);
}

long fault(const char *name, long if_bare) {
    const char *own = getenv("FAKE_CUDA_FAULTS");
    long planted = own ? fault_in(own, name, if_bare) : 0;
    return planted || !shared->faults[0] ? planted : fault_in(shared->faults, name, if_bare);
}

void count(Counted what) { shared->counts[what]++; }

size_t total_bytes() {
    const char *given = getenv("FAKE_CUDA_MEMORY");
    return given ? strtoull(given, nullptr, 10) : 80ull << 30;
}

size_t used_bytes(int gpu) {
    Locked locked;
    return count_used(gpu);
}

int enter_memory(uint64_t inode, size_t bytes, int gpu) {
    Locked locked;
    size_t used = count_used(gpu);
    int slot = find_entry(inode, true);
    if (slot < 0) {
        slot = find_entry(inode, false);
        check(slot >= 0 && used + bytes <= total_bytes(), OUT_OF_MEMORY);
        shared->entries[slot] = {inode, bytes, gpu, 1};
    }
    if (!references[slot]++)
        set_lock(1 + slot, F_RDLCK);
    return slot;
}

void leave_memory(int slot) {
    Locked locked;
    if (!--references[slot])
        set_lock(1 + slot, F_UNLCK);
}

/* For the fake of NVML, which needs no context. */
extern "C" __attribute__((visibility("default"))) void fakeReadMemory(int gpu, size_t *total, size_t *used) {
    open_world();
    *total = total_bytes(), *used = used_bytes(gpu);
}
