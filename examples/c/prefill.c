/* The prefill role: offers what it is told to, and gets the blocks back when they are released. */
#include "engine.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_JOBS = 64, MAX_COUNTS = 16, MAX_ID = 300 };

const char *const ENGINE_ID = "c-prefill";
const unsigned BLOCK_SIZE = 16;
const bool HEADS_BEFORE_TOKENS = false;

typedef struct {
    long name; /* 0: this place is free */
    unsigned counts[MAX_COUNTS], num_counts, step, ready;
    blocks table;
    char offer_id[MAX_ID];
    uint64_t cell; /* 0: it has none */
} job;

static job jobs[MAX_JOBS];

/* The page of cells: a decode agent of this machine commits an offer by its cell, without a request.
 * Each job has the cell of its own number, and a new name for each offer. */

enum { NUM_CELLS = 512 };
static _Atomic uint64_t *cells;

int cells_open(void) {
    static int fd = -1;
    if (!cells)
        cells = shared_memory("cells", CELLS_BYTES, &fd);
    return fd;
}

static uint64_t cell_open(const job *j) {
    static uint64_t round;
    uint64_t name = ++round * NUM_CELLS + (uint64_t)(j - jobs);
    atomic_exchange(&cells[name % NUM_CELLS], 4 * name + 3);
    return name;
}

/* Nobody takes the offer from now on: its blocks may be written to. */
static void cell_close(const job *j) {
    if (j->cell)
        atomic_exchange(&cells[j->cell % NUM_CELLS], 0);
}

static void end(job *j, const char *word, const char *rest) {
    cell_close(j);
    tell(word, j->name, rest);
    blocks_free(&j->table);
    j->name = 0;
}

static job *find(long name) {
    for (job *j = jobs; j < jobs + MAX_JOBS; j++)
        if (j->name == name)
            return j;
    return NULL;
}

/* Compute the next tokens of a request: their KV is in the blocks when this returns. */
static bool compute(job *j) {
    unsigned count = j->counts[j->step];
    unsigned wanted = (count + BLOCK_SIZE - 1) / BLOCK_SIZE;
    if (count > MAX_TOKENS || !blocks_take(&j->table, wanted - j->table.count))
        return false;
    numbers_write(j->name, &j->table, j->ready, count);
    j->ready = count;
    return true;
}

static void go_on(job *j);

static void on_extended(intptr_t name, const msgpack_object *ok, const msgpack_object *error) {
    job *j = find(name);
    (void)ok;
    if (error)
        log_failure("extend", name, error);
    else if (j)
        go_on(j);
}

/* `released` tells how the offer ends. */
static void on_ended(intptr_t name, const msgpack_object *ok, const msgpack_object *error) {
    (void)ok;
    if (error)
        log_failure("seal or withdraw", name, error);
}

/* Announce what comes after the first tokens, one step after the reply to the other. */
static void go_on(job *j) {
    unsigned before = j->table.count;
    if (j->num_counts == 1)
        return;
    msgpack_sbuffer body;
    msgpack_packer pk;
    kvbus_begin(&body, &pk);
    if (++j->step < j->num_counts && compute(j)) {
        bool has_new = j->table.count > before;
        msgpack_pack_map(&pk, has_new ? 3 : 2);
        kvbus_pack_text(&pk, "offer_id"), kvbus_pack_text(&pk, j->offer_id);
        kvbus_pack_text(&pk, "num_tokens"), msgpack_pack_uint32(&pk, j->ready);
        if (has_new)
            kvbus_pack_text(&pk, "tables"), blocks_pack(&pk, &j->table, before);
        ask(KVBUS_OP_EXTEND, &body, on_extended, j->name);
    } else {
        msgpack_pack_map(&pk, 1);
        kvbus_pack_text(&pk, "offer_id"), kvbus_pack_text(&pk, j->offer_id);
        ask(KVBUS_OP_SEAL, &body, on_ended, j->name);
    }
    msgpack_sbuffer_destroy(&body);
}

static void on_offered(intptr_t name, const msgpack_object *ok, const msgpack_object *error) {
    char code[64];
    job *j = find(name);
    if (!j)
        return;
    if (error) {
        log_failure("offer", name, error);
        kvbus_copy_text(kvbus_get(error, "code"), code, sizeof code);
        end(j, "refused", code);
        return;
    }
    kvbus_copy_text(kvbus_get(ok, "offer_id"), j->offer_id, MAX_ID);
    printf("ticket %ld ", j->name);
    ticket_print(kvbus_get(ok, "ticket"));
    go_on(j);
}

static void offer(long name, char *rest) {
    job *j = find(0);
    char request_id[32], *end_of_number;
    if (!j) {
        tell("refused", name, "busy");
        return;
    }
    memset(j, 0, sizeof *j);
    j->name = name;
    for (unsigned long count; j->num_counts < MAX_COUNTS; rest = end_of_number) {
        count = strtoul(rest, &end_of_number, 10);
        if (end_of_number == rest)
            break;
        j->counts[j->num_counts++] = (unsigned)count;
    }
    if (!compute(j)) {
        end(j, "refused", "too_few_blocks");
        return;
    }
    snprintf(request_id, sizeof request_id, "%ld", name);
    msgpack_sbuffer body;
    msgpack_packer pk;
    kvbus_begin(&body, &pk);
    bool sealed = j->num_counts == 1;
    if (sealed)
        j->cell = cell_open(j);
    msgpack_pack_map(&pk, 5);
    kvbus_pack_text(&pk, "cell"), msgpack_pack_uint64(&pk, j->cell);
    kvbus_pack_text(&pk, "request_id"), kvbus_pack_text(&pk, request_id);
    kvbus_pack_text(&pk, "num_tokens"), msgpack_pack_uint32(&pk, j->ready);
    kvbus_pack_text(&pk, "tables"), blocks_pack(&pk, &j->table, 0);
    kvbus_pack_text(&pk, "sealed");
    sealed ? msgpack_pack_true(&pk) : msgpack_pack_false(&pk);
    ask(KVBUS_OP_OFFER, &body, on_offered, name);
    msgpack_sbuffer_destroy(&body);
}

static void withdraw(long name) {
    job *j = find(name);
    if (!j)
        return;
    msgpack_sbuffer body;
    msgpack_packer pk;
    kvbus_begin(&body, &pk);
    msgpack_pack_map(&pk, 1);
    kvbus_pack_text(&pk, "offer_id"), kvbus_pack_text(&pk, j->offer_id);
    ask(KVBUS_OP_WITHDRAW, &body, on_ended, name);
    msgpack_sbuffer_destroy(&body);
}

void on_line(char *line) {
    char word[16];
    long name;
    int used = 0;
    if (sscanf(line, "%15s %ld%n", word, &name, &used) < 2)
        return;
    if (!strcmp(word, "offer"))
        offer(name, line + used);
    else if (!strcmp(word, "withdraw"))
        withdraw(name);
}

void on_agent_notice(const char *op, const msgpack_object *body) {
    if (strcmp(op, KVBUS_NOTICE_RELEASED))
        return;
    char outcome[32], request_id[32];
    kvbus_copy_text(kvbus_get(body, "outcome"), outcome, sizeof outcome);
    kvbus_copy_text(kvbus_get(body, "request_id"), request_id, sizeof request_id);
    long name = strtol(request_id, NULL, 10);
    job *j = name ? find(name) : NULL;
    if (j)
        end(j, "released", outcome);
}

void on_lost(void) {
    for (job *j = jobs; j < jobs + MAX_JOBS; j++)
        if (j->name)
            end(j, "released", "lost");
}
