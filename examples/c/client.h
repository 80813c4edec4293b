/* A small client of kvbus for engines: sessions with an agent, requests, notices, and maps of msgpack.
 *
 * Only session_open blocks. All sessions belong to one thread. docs/minimal-engine.md has the order of the
 * messages, protocol.h their names. To use it, copy client.h, client.c, message.c and protocol.h. */
#pragma once

#include "protocol.h"

#include <msgpack.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct session session;

/* The end of a request: the map `ok`, or the code of its refusal. `of` is that of the request. */
typedef void (*on_reply)(intptr_t of, const msgpack_object *ok, const char *refused);
typedef void (*on_notice)(void *context, const char *op, const msgpack_object *body);

/* Shared memory for the agent, of the kind "kv", "cells" or "sequence". */
typedef struct {
    const char *id, *kind;
    size_t size;
    int fd;
} segment;

enum { REFUSAL_CHARS = 300 };

/* Attach to the agent at this path, and pass `count` segments. Returns NULL without an agent; if the agent
 * refuses, `refusal` has its message, else it is empty. */
session *session_open(const char *path, const char *engine_id, const segment *segments, unsigned count,
                      char refusal[REFUSAL_CHARS]);
void session_on_notice(session *s, on_notice then, void *context);
void session_close(session *s);          /* without the callbacks of pending requests */
int session_attach_fd(const session *s); /* readable: the agent is lost */
void *session_socket(const session *s);  /* ZeroMQ socket to poll; session_work drains it */
bool session_lost(const session *s);
void session_work(session *s); /* call the callbacks of received messages; retry what was `busy` */

/* Send a request. `body` may be NULL, for an empty map. False: too many requests are pending. */
bool session_request(session *s, const char *op, const msgpack_sbuffer *body, on_reply then, intptr_t of);

double now(void); /* seconds of CLOCK_MONOTONIC */

/* message.c */

const msgpack_object *get(const msgpack_object *map, const char *key); /* NULL: absent */
bool is_text(const msgpack_object *value, const char *text);
void copy_text(const msgpack_object *value, char *to, size_t size); /* "" if it does not fit */
double number(const msgpack_object *value, double otherwise);
void begin(msgpack_sbuffer *message, msgpack_packer *pk);
void pack_text(msgpack_packer *pk, const char *text);

#ifdef __cplusplus
}
#endif
