/* KV memory that the agent maps, its description, its blocks, and the known numbers in it.
 *
 * The numbers are those of docs/conformance.md; an engine with a model would compute KV instead. */
#define _GNU_SOURCE
#include "engine.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ROW_BYTES = HEAD_DIM * ITEM_BYTES };

static uint8_t *memory;
static uint32_t free_ids[NUM_BLOCKS];
static unsigned num_free;

static size_t token_stride(void) { return HEADS_BEFORE_TOKENS ? ROW_BYTES : NUM_HEADS * ROW_BYTES; }
static size_t head_stride(void) { return HEADS_BEFORE_TOKENS ? BLOCK_SIZE * ROW_BYTES : ROW_BYTES; }
static size_t part_stride(void) { return (size_t)BLOCK_SIZE * NUM_HEADS * ROW_BYTES; }
static size_t layer_stride(void) { return NUM_PARTS * part_stride(); }
static size_t block_stride(void) { return NUM_LAYERS * layer_stride(); }

size_t cache_bytes(void) { return NUM_BLOCKS * block_stride(); }

void *shared_memory(const char *name, size_t size, int *fd) {
    *fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (*fd < 0 || posix_fallocate(*fd, 0, (off_t)size) ||
        fcntl(*fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK)) {
        perror("cannot make shared memory");
        exit(1);
    }
    void *mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    if (mapped == MAP_FAILED) {
        perror("cannot map shared memory");
        exit(1);
    }
    return mapped;
}

/* New memory each time: nobody knows what an agent that is gone may still write into the old. */
int cache_open(void) {
    static int fd = -1;
    if (memory) {
        munmap(memory, cache_bytes());
        close(fd);
    }
    memory = shared_memory("kv", cache_bytes(), &fd);
    for (num_free = 0; num_free < NUM_BLOCKS; num_free++)
        free_ids[num_free] = NUM_BLOCKS - 1 - num_free;
    return fd;
}

static void pack_axis(msgpack_packer *pk, const char *name, unsigned size, size_t stride) {
    msgpack_pack_map(pk, 3);
    kvbus_pack_text(pk, "name"), kvbus_pack_text(pk, name);
    kvbus_pack_text(pk, "size"), msgpack_pack_uint32(pk, size);
    kvbus_pack_text(pk, "stride_bytes"), msgpack_pack_uint64(pk, stride);
}

static void pack_layers(msgpack_packer *pk) {
    kvbus_pack_text(pk, "layers"), msgpack_pack_array(pk, NUM_LAYERS);
    for (unsigned layer = 0; layer < NUM_LAYERS; layer++)
        msgpack_pack_uint32(pk, layer);
}

static void pack_region(msgpack_packer *pk) {
    msgpack_pack_map(pk, 8);
    kvbus_pack_text(pk, "segment_id"), kvbus_pack_text(pk, "kv");
    kvbus_pack_text(pk, "offset_bytes"), msgpack_pack_uint32(pk, 0);
    kvbus_pack_text(pk, "group"), kvbus_pack_text(pk, "full");
    pack_layers(pk);
    kvbus_pack_text(pk, "parts"), msgpack_pack_array(pk, NUM_PARTS);
    kvbus_pack_text(pk, "k"), kvbus_pack_text(pk, "v");
    kvbus_pack_text(pk, "first_head"), msgpack_pack_uint32(pk, 0);
    kvbus_pack_text(pk, "num_heads"), msgpack_pack_uint32(pk, NUM_HEADS);
    kvbus_pack_text(pk, "axes"), msgpack_pack_array(pk, 6);
    pack_axis(pk, "block", NUM_BLOCKS, block_stride());
    pack_axis(pk, "layer", NUM_LAYERS, layer_stride());
    pack_axis(pk, "kv", NUM_PARTS, part_stride());
    pack_axis(pk, "token", BLOCK_SIZE, token_stride());
    pack_axis(pk, "head", NUM_HEADS, head_stride());
    pack_axis(pk, "dim", HEAD_DIM, ITEM_BYTES);
}

void cache_pack_rank(msgpack_packer *pk) {
    msgpack_pack_map(pk, 3);
    kvbus_pack_text(pk, "rank"), msgpack_pack_uint32(pk, 0);
    kvbus_pack_text(pk, "segments"), msgpack_pack_array(pk, 1);
    msgpack_pack_map(pk, 2);
    kvbus_pack_text(pk, "segment_id"), kvbus_pack_text(pk, "kv");
    kvbus_pack_text(pk, "size_bytes"), msgpack_pack_uint64(pk, cache_bytes());
    kvbus_pack_text(pk, "regions"), msgpack_pack_array(pk, 1);
    pack_region(pk);
}

void cache_pack_engine(msgpack_packer *pk) {
    msgpack_pack_map(pk, 4);
    kvbus_pack_text(pk, "engine_id"), kvbus_pack_text(pk, ENGINE_ID);
    kvbus_pack_text(pk, "model"), kvbus_pack_text(pk, "known numbers");
    kvbus_pack_text(pk, "tp_size"), msgpack_pack_int(pk, 1);
    kvbus_pack_text(pk, "groups"), msgpack_pack_array(pk, 1);
    msgpack_pack_map(pk, 6);
    kvbus_pack_text(pk, "name"), kvbus_pack_text(pk, "full");
    pack_layers(pk);
    kvbus_pack_text(pk, "block_size"), msgpack_pack_uint32(pk, BLOCK_SIZE);
    kvbus_pack_text(pk, "num_kv_heads"), msgpack_pack_uint32(pk, NUM_HEADS);
    kvbus_pack_text(pk, "head_dim"), msgpack_pack_uint32(pk, HEAD_DIM);
    kvbus_pack_text(pk, "dtype"), kvbus_pack_text(pk, "float16");
}

bool blocks_take(blocks *table, unsigned count) {
    if (count > num_free || table->count + count > MAX_JOB_BLOCKS)
        return false;
    while (count--)
        table->ids[table->count++] = free_ids[--num_free];
    return true;
}

void blocks_free(blocks *table) {
    while (table->count)
        free_ids[num_free++] = table->ids[--table->count];
}

/* The table of the only group, with the blocks behind the first `from`. */
void blocks_pack(msgpack_packer *pk, const blocks *table, unsigned from) {
    uint8_t bytes[4 * MAX_JOB_BLOCKS];
    unsigned size = 0;
    for (unsigned i = from; i < table->count; i++)
        for (unsigned shift = 0; shift < 32; shift += 8)
            bytes[size++] = (uint8_t)(table->ids[i] >> shift);
    msgpack_pack_map(pk, 1);
    kvbus_pack_text(pk, "full"), msgpack_pack_map(pk, 2);
    kvbus_pack_text(pk, "ids"), msgpack_pack_bin_with_body(pk, bytes, size);
    kvbus_pack_text(pk, "first_block"), msgpack_pack_uint32(pk, table->first + from);
}

/* Write the numbers of these positions, or count how many bytes of them are others. */
static size_t numbers(long name, const blocks *table, unsigned start, unsigned stop, bool write) {
    size_t wrong = 0;
    for (unsigned position = start; position < stop; position++)
        for (unsigned layer = 0; layer < NUM_LAYERS; layer++)
            for (unsigned part = 0; part < NUM_PARTS; part++)
                for (unsigned head = 0; head < NUM_HEADS; head++) {
                    uint32_t block = table->ids[position / BLOCK_SIZE - table->first];
                    uint8_t *row = memory + block * block_stride() + layer * layer_stride() +
                                   part * part_stride() + position % BLOCK_SIZE * token_stride() +
                                   head * head_stride();
                    long base = 101 * name + 59 * layer + 37 * part + 7 * position + 23 * head;
                    for (unsigned i = 0; i < ROW_BYTES; i++) {
                        uint8_t number = (uint8_t)((base + 3 * i) % 251);
                        wrong += row[i] != number;
                        if (write)
                            row[i] = number;
                    }
                }
    return wrong;
}

void numbers_write(long name, const blocks *table, unsigned start, unsigned stop) {
    numbers(name, table, start, stop, true);
}

size_t numbers_wrong(long name, const blocks *table, unsigned start, unsigned stop) {
    return numbers(name, table, start, stop, false);
}
