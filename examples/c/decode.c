/* The decode role: fetches what it is told to, looks at the KV, and gives the blocks back. */
#include "engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_JOBS = 64, MAX_ID = 64 };

const char *const ENGINE_ID = "c-decode";
const unsigned BLOCK_SIZE = 24;
const bool HEADS_BEFORE_TOKENS = true;

typedef struct {
    long name; /* 0: this place is free */
    unsigned first_token, num_tokens;
    bool is_over; /* told, but its blocks are not free yet */
    blocks table;
    char fetch_id[MAX_ID];
} job;

static job jobs[MAX_JOBS];

static job *find(long name) {
    for (job *j = jobs; j < jobs + MAX_JOBS; j++)
        if (j->name == name)
            return j;
    return NULL;
}

static void give_back(job *j) {
    blocks_free(&j->table);
    j->name = 0;
}

static void refuse(job *j, const char *code) {
    tell("refused", j->name, code);
    give_back(j);
}

/* The fetch has ended. Only now may the KV be used, and only when it is `completed`. */
static void on_fetched(intptr_t name, const msgpack_object *ok, const msgpack_object *error) {
    char outcome[64], rest[128];
    job *j = find(name);
    if (!j)
        return;
    if (error) { /* it was not begun */
        log_failure("fetch", name, error);
        kvbus_copy_text(kvbus_get(error, "code"), outcome, sizeof outcome);
        refuse(j, outcome);
        return;
    }
    kvbus_copy_text(kvbus_get(ok, "outcome"), outcome, sizeof outcome);
    if (strcmp(outcome, "completed"))
        log_failure("fetch", name, ok);
    snprintf(rest, sizeof rest, "%s", outcome);
    if (!strcmp(outcome, "completed"))
        snprintf(rest, sizeof rest, "%s %zu", outcome,
                 numbers_wrong(name, &j->table, j->first_token, j->num_tokens));
    tell("fetched", name, rest);
    const msgpack_object *are_free = kvbus_get(ok, "blocks_free");
    if (are_free && are_free->type == MSGPACK_OBJECT_BOOLEAN && are_free->via.boolean)
        give_back(j);
    else
        j->is_over = true;
}

static void fetch(long name, const char *rest) {
    job *j = find(0);
    int used = 0;
    if (!j) {
        tell("refused", name, "busy");
        return;
    }
    memset(j, 0, sizeof *j);
    j->name = name;
    if (sscanf(rest, "%u %u %n", &j->first_token, &j->num_tokens, &used) < 2 ||
        j->num_tokens > MAX_TOKENS) {
        refuse(j, "too_many_tokens");
        return;
    }
    /* Exactly the blocks that hold the positions, and none when there are no positions. */
    bool has_tokens = j->num_tokens > j->first_token;
    unsigned stop = (j->num_tokens + BLOCK_SIZE - 1) / BLOCK_SIZE;
    j->table.first = j->first_token / BLOCK_SIZE;
    if (has_tokens && !blocks_take(&j->table, stop - j->table.first)) {
        refuse(j, "too_few_blocks");
        return;
    }
    msgpack_sbuffer body;
    msgpack_packer pk;
    kvbus_begin(&body, &pk);
    snprintf(j->fetch_id, MAX_ID, "fetch-%ld-%.6f", name, kvbus_now()); /* never used again */
    msgpack_pack_map(&pk, 5);
    kvbus_pack_text(&pk, "fetch_id"), kvbus_pack_text(&pk, j->fetch_id);
    kvbus_pack_text(&pk, "first_token"), msgpack_pack_uint32(&pk, j->first_token);
    kvbus_pack_text(&pk, "num_tokens"), msgpack_pack_uint32(&pk, j->num_tokens);
    kvbus_pack_text(&pk, "tables"), blocks_pack(&pk, &j->table, 0);
    kvbus_pack_text(&pk, "ticket");
    if (ticket_pack(&pk, rest + used))
        ask(KVBUS_OP_FETCH, &body, on_fetched, name);
    else
        refuse(j, "bad_ticket");
    msgpack_sbuffer_destroy(&body);
}

static void cancel(long name) {
    job *j = find(name);
    if (!j)
        return;
    msgpack_sbuffer body;
    msgpack_packer pk;
    kvbus_begin(&body, &pk);
    msgpack_pack_map(&pk, 1);
    kvbus_pack_text(&pk, "fetch_id"), kvbus_pack_text(&pk, j->fetch_id);
    ask(KVBUS_OP_CANCEL, &body, NULL, name); /* the reply to `fetch` tells how it ends */
    msgpack_sbuffer_destroy(&body);
}

void on_line(char *line) {
    char word[16];
    long name;
    int used = 0;
    if (sscanf(line, "%15s %ld %n", word, &name, &used) < 2)
        return;
    if (!strcmp(word, "fetch"))
        fetch(name, line + used);
    else if (!strcmp(word, "cancel"))
        cancel(name);
}

void on_agent_notice(const char *op, const msgpack_object *body) {
    if (strcmp(op, KVBUS_NOTICE_BLOCKS_FREED))
        return;
    for (job *j = jobs; j < jobs + MAX_JOBS; j++)
        if (j->name && kvbus_is_text(kvbus_get(body, "fetch_id"), j->fetch_id))
            give_back(j);
}

int cells_open(void) { return -1; } /* they are for offers */

void on_lost(void) {
    for (job *j = jobs; j < jobs + MAX_JOBS; j++)
        if (j->name) {
            if (!j->is_over)
                tell("fetched", j->name, "lost");
            give_back(j);
        }
}
