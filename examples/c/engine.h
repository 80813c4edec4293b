/* A small engine that speaks kvbus: the interfaces of its parts.
 *
 *   prefill.c, decode.c   a role: lines of stdin, notices of the agent
 *   engine.c              the loop: both sessions, and the loss of the agent
 *   client.h, client.c    one session: attach, requests and replies, notices
 *   message.c             maps of msgpack
 *   cache.c               KV memory that the agent maps, and its blocks
 *   ticket.c              tickets as JSON
 *   protocol.h            names and limits of the protocol, generated
 */
#pragma once

#include "client.h"

/* cache.c: one rank, one group; block, layer, part, token, head, dim in the order of the strides */

enum { CELLS_BYTES = 4096 };
enum { NUM_BLOCKS = 32, NUM_LAYERS = 2, NUM_PARTS = 2, NUM_HEADS = 2, HEAD_DIM = 8, ITEM_BYTES = 2 };
enum { MAX_TOKENS = 512, MAX_JOB_BLOCKS = MAX_TOKENS };

extern const char *const ENGINE_ID;    /* of the role */
extern const unsigned BLOCK_SIZE;      /* tokens */
extern const bool HEADS_BEFORE_TOKENS; /* HND, or NHD */

typedef struct {
    uint32_t ids[MAX_JOB_BLOCKS];
    unsigned count;
    unsigned first; /* block of the request that ids[0] is */
} blocks;

void *shared_memory(const char *name, size_t size, int *fd); /* sealed, all zeros */
int cache_open(void);            /* new memory, all blocks free; its descriptor */
size_t cache_bytes(void);
void cache_pack_rank(msgpack_packer *pk);
void cache_pack_engine(msgpack_packer *pk);
bool blocks_take(blocks *table, unsigned count); /* more of them; false when there are too few */
void blocks_free(blocks *table);
void blocks_pack(msgpack_packer *pk, const blocks *table, unsigned from);
void numbers_write(long name, const blocks *table, unsigned start, unsigned stop);
size_t numbers_wrong(long name, const blocks *table, unsigned start, unsigned stop);

/* ticket.c: a flat map of strings and integers */

void ticket_print(const msgpack_object *ticket);
bool ticket_pack(msgpack_packer *pk, const char *json);

/* engine.c */

extern kvbus_session *control;
void tell(const char *word, long name, const char *rest);
void log_failure(const char *what, long name, const msgpack_object *reason); /* with `code` and `message` */
void ask(const char *op, const msgpack_sbuffer *body, kvbus_on_reply then, long name); /* control session */

/* of the role */

void on_line(char *line); /* only while the engine is registered */
void on_agent_notice(const char *op, const msgpack_object *body);
int cells_open(void); /* descriptor of its page of cells; -1: it has none */
void on_lost(void); /* all offers and fetches of the agent are over */
