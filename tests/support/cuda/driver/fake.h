/* A CUDA driver without a GPU: memory files stand for VRAM, and threads for streams.

   world     what all processes of a test share: memory in use, planted faults, counts
   devices   GPUs, their UUIDs, contexts
   memory    allocations, registered host memory, attributes of pointers
   sharing   CUDA IPC, and virtual memory management
   streams   queues of operations, events
   copies    operations that copy and fill
   kernels   host builds of kernels

   It refuses what CUDA refuses, and fails in kernels and copies where a GPU would. Where CUDA leaves an
   order open, it chooses an unusual one. It cannot show what the documentation of CUDA does not say. */
#pragma once
#include "cuda_types.h"

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <set>
#include <shared_mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default"))) CUresult
#define FAILS catch (CUresult code) { return code; }

constexpr size_t PAGE = 2 << 20;
constexpr int MAX_GPUS = 16;
constexpr size_t round_up(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }
[[noreturn]] inline void fail(CUresult code) { throw code; }
inline void check(bool is_so, CUresult code = INVALID_VALUE) { if (!is_so) fail(code); }

/* world */
enum Counted { KERNELS, COPIES, BATCHES, NUM_COUNTED };
void open_world();
long fault(const char *name, long if_bare = 1); /* 0 if it is not planted for this process */
void count(Counted what);
int enter_memory(uint64_t inode, size_t bytes, int gpu); /* its slot; fails if the GPU is full */
void leave_memory(int slot);
size_t used_bytes(int gpu);
size_t total_bytes();

/* devices */
struct Stream;
struct Context {
    int ordinal, gpu; /* as this process numbers it, and as the machine does */
    std::atomic<int> retained = 0;
    int slot = -1; /* of the memory that it takes */
    std::atomic<CUresult> lost = SUCCESS; /* for good, once it is */
    std::set<int> peers; /* ordinals */
    std::shared_ptr<Stream> legacy;
};
void check_initialized();
Context &current(); /* of this thread; fails without one, and if it is lost */
Context &context_of(int ordinal);
int ordinal_of(int gpu); /* fails if this process does not see the GPU */
void check_not_lost(); /* for calls that need no context */

/* memory */
struct Physical { /* of a GPU; in use while any process refers to it */
    int fd, gpu, handle_types, slot;
    uint64_t inode;
    size_t bytes;
    Physical(int fd, int gpu, int handle_types); /* takes the descriptor, even if it fails */
    ~Physical();
    Physical(const Physical &) = delete;
};
using PhysicalPtr = std::shared_ptr<Physical>;
PhysicalPtr make_physical(int gpu, size_t bytes, int handle_types);
PhysicalPtr open_physical(int fd); /* fails if the descriptor is none of this driver */

enum class Kind { ALLOCATED, IMPORTED, MAPPED, PINNED, REGISTERED };
struct Range {
    uint64_t base;
    size_t bytes;
    Kind kind;
    PhysicalPtr physical;
    Context *context; /* none of mapped memory */
    uint64_t id = 0;
    std::array<uint8_t, MAX_GPUS> access{}; /* of mapped memory, by ordinal */
    int num_opened = 0; /* of imported memory */
    uint64_t reserved_base = 0, reserved_bytes = 0; /* of mapped memory */
    bool is_host() const { return kind == Kind::PINNED || kind == Kind::REGISTERED; }
};
extern std::shared_mutex &memory_lock; /* for what follows */
Range &add_range(Range range);
Range *find_range(uint64_t at);
std::vector<Range *> all_ranges();
void remove_range(uint64_t base); /* the address stays reserved */
uint64_t reserve_addresses(size_t bytes);
void map_physical(uint64_t at, size_t bytes, const Physical &physical, int protection);
bool is_covered(uint64_t at, size_t bytes);
bool can_reach(const Context &context, uint64_t at, size_t bytes, bool writes, bool is_kernel);
void drop_memory(Context &context);

/* streams */
struct Mark { /* a place in a stream's queue */
    std::shared_ptr<Stream> stream;
    uint64_t number = 0;
};
Mark enqueue(void *stream, std::function<void(Context &)> run, std::vector<Mark> after = {});
Context &context_of_stream(void *stream);
void wait_for(const Mark &mark); /* fails if the context is lost */
void synchronize(Context &context);
void drop_streams(Context &context);
