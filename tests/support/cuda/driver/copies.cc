/* Copies and fills of memory: operations of streams. */
#include "fake.h"

#include <cstring>

namespace {
enum class Place { GPU, PINNED, PAGEABLE };

Place place_of(uint64_t at, size_t bytes) {
    std::shared_lock<std::shared_mutex> locked(memory_lock);
    Range *range = find_range(at);
    check(!range || is_covered(at, bytes));
    return !range ? Place::PAGEABLE : range->is_host() ? Place::PINNED : Place::GPU;
}

void need(const Context &context, uint64_t at, size_t bytes, bool writes) {
    check(can_reach(context, at, bytes, writes, false), ILLEGAL_ADDRESS);
}

void *pointer(uint64_t at) { return reinterpret_cast<void *>(at); }

/* CUDA reads pageable memory before the call returns; it returns when pageable memory is written. */
void copy(uint64_t to, uint64_t from, size_t bytes, void *stream) {
    Place source = place_of(from, bytes), target = place_of(to, bytes);
    auto staged = std::make_shared<std::vector<char>>();
    if (source == Place::PAGEABLE) {
        auto *first = static_cast<char *>(pointer(from));
        staged->assign(first, first + bytes);
    }
    auto mark = enqueue(stream, [=](Context &context) {
        std::shared_lock<std::shared_mutex> locked(memory_lock);
        if (target != Place::PAGEABLE)
            need(context, to, bytes, true);
        if (source != Place::PAGEABLE)
            need(context, from, bytes, false);
        memmove(pointer(to), source == Place::PAGEABLE ? staged->data() : pointer(from), bytes);
        count(COPIES);
    });
    if (target == Place::PAGEABLE)
        wait_for(mark);
}

void check_on_gpu(uint64_t at, size_t bytes) { check(place_of(at, bytes) != Place::PAGEABLE); }

void set_bytes(uint64_t at, unsigned char value, size_t bytes, void *stream) {
    check_on_gpu(at, bytes);
    enqueue(stream, [=](Context &context) {
        std::shared_lock<std::shared_mutex> locked(memory_lock);
        need(context, at, bytes, true);
        memset(pointer(at), value, bytes);
    });
}
}

API cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, void *stream) try {
    copy(to, from, bytes, stream);
    return SUCCESS;
} FAILS

API cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, void *stream) try {
    check_on_gpu(to, bytes);
    check_on_gpu(from, bytes);
    copy(to, from, bytes, stream);
    return SUCCESS;
} FAILS

API cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, void *stream) try {
    check_on_gpu(to, bytes);
    copy(to, reinterpret_cast<uint64_t>(from), bytes, stream);
    return SUCCESS;
} FAILS

API cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, void *stream) try {
    check_on_gpu(from, bytes);
    copy(reinterpret_cast<uint64_t>(to), from, bytes, stream);
    return SUCCESS;
} FAILS

API cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) try {
    check_on_gpu(from, bytes);
    copy(reinterpret_cast<uint64_t>(to), from, bytes, nullptr);
    wait_for(enqueue(nullptr, [](Context &) {}));
    return SUCCESS;
} FAILS

/* It returns once the host may be written again, as CUDA does: other streams may still read old bytes. */
API cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) try {
    check_on_gpu(to, bytes);
    auto source = reinterpret_cast<uint64_t>(from);
    bool is_pageable = place_of(source, bytes) == Place::PAGEABLE;
    wait_for(enqueue(nullptr, [](Context &) {}));
    copy(to, source, bytes, nullptr);
    if (!is_pageable)
        wait_for(enqueue(nullptr, [](Context &) {}));
    return SUCCESS;
} FAILS

/* It does not wait for the copy, as CUDA does not. */
API cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) try {
    check_on_gpu(to, bytes);
    check_on_gpu(from, bytes);
    copy(to, from, bytes, nullptr);
    return SUCCESS;
} FAILS

API cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t bytes, void *stream) try {
    set_bytes(at, value, bytes, stream);
    return SUCCESS;
} FAILS

API cuMemsetD8_v2(CUdeviceptr at, unsigned char value, size_t bytes) try {
    set_bytes(at, value, bytes, nullptr);
    return SUCCESS;
} FAILS

namespace {
/* It runs the copies backwards: their order is open. */
void copy_batch(uint64_t *to, uint64_t *from, size_t *sizes, size_t num, CUmemcpyAttributes *attributes,
                size_t *first_of, size_t num_attributes, void *stream) {
    current();
    check(!fault("no_batch"), NOT_SUPPORTED);
    check(reinterpret_cast<uint64_t>(stream) > 1 && num && num_attributes && num_attributes <= num && !first_of[0]);
    for (size_t which = 0; which < num_attributes; which++)
        check(attributes[which].order >= 1 && attributes[which].order <= 3);
    for (size_t which = num; which--;) {
        check(sizes[which]);
        copy(to[which], from[which], sizes[which], stream);
    }
    count(BATCHES);
}
}

API cuMemcpyBatchAsync(uint64_t *to, uint64_t *from, size_t *sizes, size_t num, CUmemcpyAttributes *attributes,
                       size_t *first_of, size_t num_attributes, size_t *failed, void *stream) try {
    *failed = SIZE_MAX;
    copy_batch(to, from, sizes, num, attributes, first_of, num_attributes, stream);
    return SUCCESS;
} FAILS

API cuMemcpyBatchAsync_v2(uint64_t *to, uint64_t *from, size_t *sizes, size_t num, CUmemcpyAttributes *attributes,
                          size_t *first_of, size_t num_attributes, void *stream) try {
    copy_batch(to, from, sizes, num, attributes, first_of, num_attributes, stream);
    return SUCCESS;
} FAILS
