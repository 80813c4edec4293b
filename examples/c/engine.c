/* The loop of the engine: two sessions, lines of stdin, and the loss of the agent. */
#define _GNU_SOURCE
#include "engine.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

enum { MAX_LINE = 1 << 16, TICK_MS = 20, FIRST_TRIES = 20 };

kvbus_session *control;
static kvbus_session *rank_session;
static bool is_registered;

void tell(const char *word, long name, const char *rest) { printf("%s %ld %s\n", word, name, rest); }

static void request_or_exit(kvbus_session *s, const char *op, const msgpack_sbuffer *body, kvbus_on_reply then,
                            long name) {
    if (!kvbus_request(s, op, body, then, name)) {
        fprintf(stderr, "too many requests\n");
        exit(1);
    }
}

void ask(const char *op, const msgpack_sbuffer *body, kvbus_on_reply then, long name) {
    request_or_exit(control, op, body, then, name);
}

void log_failure(const char *what, long name, const msgpack_object *reason) {
    char code[64], message[1024];
    kvbus_copy_text(kvbus_get(reason, "code"), code, sizeof code);
    kvbus_copy_text(kvbus_get(reason, "message"), message, sizeof message);
    fprintf(stderr, "%s %ld: %s: %s\n", what, name, code, message);
}

/* Register the rank, then the control session: its reply means that offers and fetches are accepted. */

static void on_registered(intptr_t is_control, const msgpack_object *ok, const msgpack_object *error);

static void register_session(kvbus_session *s) {
    msgpack_sbuffer body;
    msgpack_packer pk;
    kvbus_begin(&body, &pk);
    msgpack_pack_map(&pk, s == control ? 1 : 2);
    kvbus_pack_text(&pk, "engine"), cache_pack_engine(&pk);
    if (s != control)
        kvbus_pack_text(&pk, "rank"), cache_pack_rank(&pk);
    request_or_exit(s, KVBUS_OP_REGISTER, &body, on_registered, s == control);
    msgpack_sbuffer_destroy(&body);
}

static void on_registered(intptr_t is_control, const msgpack_object *ok, const msgpack_object *error) {
    (void)ok;
    if (error) {
        log_failure("register", 0, error);
        exit(1);
    }
    if (is_control)
        is_registered = true;
    else
        register_session(control);
}

static kvbus_session *open_or_exit(const char *path, const kvbus_segment *segments, unsigned count) {
    char refusal[KVBUS_REFUSAL_CHARS];
    kvbus_session *s = kvbus_open(path, ENGINE_ID, segments, count, refusal);
    if (*refusal) {
        fprintf(stderr, "the agent refuses to attach: %s\n", refusal);
        exit(1);
    }
    return s;
}

static void notice(void *context, const char *op, const msgpack_object *body) {
    (void)context;
    on_agent_notice(op, body);
}

/* Connect to an agent, with new memory and new boot ids, and retry until there is one. */
static void connect_to_agent(const char *path) {
    int memory = cache_open(), cells = cells_open();
    kvbus_segment segments[] = {{"kv", "kv", cache_bytes(), memory}, {"cells", "cells", CELLS_BYTES, cells}};
    for (unsigned tries = 0;; tries++) {
        rank_session = open_or_exit(path, segments, cells < 0 ? 1 : 2);
        control = rank_session ? open_or_exit(path, NULL, 0) : NULL;
        if (control)
            break;
        if (rank_session)
            kvbus_close(rank_session);
        if (!tries)
            fprintf(stderr, "waiting for an agent at %s\n", path);
        usleep(tries < FIRST_TRIES ? 100000 : 1000000);
    }
    kvbus_set_on_notice(control, notice, NULL);
    register_session(rank_session);
}

static void disconnect(void) {
    kvbus_close(control);
    kvbus_close(rank_session);
    control = rank_session = NULL;
    is_registered = false;
}

/* Pass each whole line of stdin on; false at its end. */
static bool read_lines(void) {
    static char text[MAX_LINE];
    static size_t size;
    ssize_t got = read(STDIN_FILENO, text + size, sizeof text - 1 - size);
    if (got <= 0)
        return false;
    size += (size_t)got, text[size] = 0;
    char *line = text, *end;
    while ((end = strchr(line, '\n'))) {
        *end = 0;
        on_line(line);
        line = end + 1;
    }
    size -= (size_t)(line - text);
    memmove(text, line, size);
    return true;
}

int main(void) {
    const char *path = getenv("KVBUS_ATTACH");
    if (!path) {
        fprintf(stderr, "KVBUS_ATTACH must name the attach socket of an agent\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    connect_to_agent(path);
    for (;;) {
        zmq_pollitem_t items[] = {
            {kvbus_socket(control), 0, ZMQ_POLLIN, 0},
            {kvbus_socket(rank_session), 0, ZMQ_POLLIN, 0},
            {NULL, kvbus_attach_fd(control), ZMQ_POLLIN, 0},
            {NULL, kvbus_attach_fd(rank_session), ZMQ_POLLIN, 0},
            {NULL, STDIN_FILENO, ZMQ_POLLIN, 0},
        };
        zmq_poll(items, is_registered ? 5 : 4, TICK_MS);
        bool is_lost = kvbus_is_lost(control) || kvbus_is_lost(rank_session);
        kvbus_work(control);
        kvbus_work(rank_session);
        if (is_lost) {
            disconnect();
            on_lost();
            connect_to_agent(path);
        } else if (items[4].revents && !read_lines())
            return 0;
    }
}
