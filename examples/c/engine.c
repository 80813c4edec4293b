/* The loop of the engine: two sessions, lines of stdin, and the loss of the agent. */
#define _GNU_SOURCE
#include "engine.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

enum { MAX_LINE = 1 << 16, TICK_MS = 20 };

session *control;
static session *rank_session;

void tell(const char *word, long name, const char *rest) { printf("%s %ld %s\n", word, name, rest); }

static void request_or_exit(session *s, const char *op, const msgpack_sbuffer *body, on_reply then,
                            long name) {
    if (!session_request(s, op, body, then, name)) {
        fprintf(stderr, "too many requests\n");
        exit(1);
    }
}

void ask(const char *op, const msgpack_sbuffer *body, on_reply then, long name) {
    request_or_exit(control, op, body, then, name);
}

static void on_registered(intptr_t name, const msgpack_object *ok, const char *refused) {
    (void)name, (void)ok;
    if (refused) {
        fprintf(stderr, "the agent refuses to register: %s\n", refused);
        exit(1);
    }
}

static void register_session(session *s) {
    msgpack_sbuffer body;
    msgpack_packer pk;
    begin(&body, &pk);
    msgpack_pack_map(&pk, s == control ? 1 : 2);
    pack_text(&pk, "engine"), cache_pack_engine(&pk);
    if (s != control)
        pack_text(&pk, "rank"), cache_pack_rank(&pk);
    request_or_exit(s, KVBUS_OP_REGISTER, &body, on_registered, 0);
    msgpack_sbuffer_destroy(&body);
}

static session *open_or_exit(const char *path, const segment *segments, unsigned count) {
    char refusal[REFUSAL_CHARS];
    session *s = session_open(path, ENGINE_ID, segments, count, refusal);
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
    segment segments[] = {{"kv", "kv", cache_bytes(), memory}, {"cells", "cells", CELLS_BYTES, cells}};
    for (bool told = false;; told = true) {
        rank_session = open_or_exit(path, segments, cells < 0 ? 1 : 2);
        control = rank_session ? open_or_exit(path, NULL, 0) : NULL;
        if (control)
            break;
        if (rank_session)
            session_close(rank_session);
        if (!told)
            fprintf(stderr, "waiting for an agent at %s\n", path);
        usleep(50000);
    }
    session_on_notice(control, notice, NULL);
    register_session(rank_session);
    register_session(control);
}

static void disconnect(void) {
    session_close(control);
    session_close(rank_session);
    control = rank_session = NULL;
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
            {session_socket(control), 0, ZMQ_POLLIN, 0},
            {session_socket(rank_session), 0, ZMQ_POLLIN, 0},
            {NULL, session_attach_fd(control), ZMQ_POLLIN, 0},
            {NULL, session_attach_fd(rank_session), ZMQ_POLLIN, 0},
            {NULL, STDIN_FILENO, ZMQ_POLLIN, 0},
        };
        zmq_poll(items, 5, TICK_MS);
        if (session_lost(control) || session_lost(rank_session)) {
            disconnect();
            on_lost();
            connect_to_agent(path);
            continue;
        }
        session_work(control);
        session_work(rank_session);
        if (items[4].revents && !read_lines())
            return 0;
    }
}
