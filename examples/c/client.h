/* A small client of kvbus for engines: sessions with an agent, requests, notices, and maps of msgpack.
 *
 * All sessions belong to one thread. Only kvbus_open blocks. Without memory, the process aborts.
 * docs/minimal-engine.md has the order of the messages, protocol.h their names.
 * To use the client, copy client.h, client.c, message.c and protocol.h. */
#pragma once

#include "protocol.h"

#include <msgpack.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvbus_session kvbus_session;

/* The end of a request: the map `ok`, or else the map `error`, with `code`, `message` and `detail`. Both
 * live until the callback returns. `of` is that of the request. A callback may close its session. */
typedef void (*kvbus_on_reply)(intptr_t of, const msgpack_object *ok, const msgpack_object *error);
typedef void (*kvbus_on_notice)(void *context, const char *op, const msgpack_object *body);

/* Shared memory for the agent, of the kind "kv", "cells" or "sequence". The caller keeps `fd`, and may close
 * it after kvbus_open. */
typedef struct {
    const char *id, *kind;
    size_t size;
    int fd;
} kvbus_segment;

enum { KVBUS_REFUSAL_CHARS = 300 };

/* Attach to the agent at this path, and pass `count` segments. Returns NULL on failure. Then `refusal` has a
 * message, or is empty if no agent replies within 10 s: retry. */
kvbus_session *kvbus_open(const char *path, const char *engine_id, const kvbus_segment *segments,
                          unsigned count, char refusal[KVBUS_REFUSAL_CHARS]);
void kvbus_set_on_notice(kvbus_session *s, kvbus_on_notice then, void *context);
void kvbus_close(kvbus_session *s);          /* without the callbacks of pending requests */
int kvbus_attach_fd(const kvbus_session *s); /* readable: the agent is lost */
void *kvbus_socket(const kvbus_session *s);  /* ZeroMQ socket to poll; kvbus_work drains it */
bool kvbus_is_lost(const kvbus_session *s);

/* Call the callbacks of received messages, and retry requests that were `busy`: growing, random waits, for
 * 30 s. Call it when the socket is readable, and every 50 ms. */
void kvbus_work(kvbus_session *s);

/* The lifeline: a descriptor that is readable when no process of the agent can access memory any longer.
 * The caller owns it: it outlives the session. Any session with the agent has one. -1: taken before. */
int kvbus_take_lifeline(kvbus_session *s);

/* Send a request. `body` may be NULL, for an empty map; `then` may be NULL. False: 256 are pending. */
bool kvbus_request(kvbus_session *s, const char *op, const msgpack_sbuffer *body, kvbus_on_reply then,
                   intptr_t of);

double kvbus_now(void); /* seconds of CLOCK_MONOTONIC */

/* message.c */

const msgpack_object *kvbus_get(const msgpack_object *map, const char *key); /* NULL: absent */
bool kvbus_is_text(const msgpack_object *value, const char *text);
void kvbus_copy_text(const msgpack_object *value, char *to, size_t size); /* cut if it does not fit */
double kvbus_number(const msgpack_object *value, double otherwise);
void kvbus_begin(msgpack_sbuffer *message, msgpack_packer *pk);
void kvbus_pack_text(msgpack_packer *pk, const char *text);

#ifdef __cplusplus
}
#endif
