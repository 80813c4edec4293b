/* The loop of the engine: two sessions, lines of stdin, and what happens when the agent goes. */
#define _GNU_SOURCE
#include "engine.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <zmq.h>

enum { MAX_LINE = 1 << 16, TICK_MS = 20 };

session *control;
static session *rank_session;

double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

void tell(const char *word, long name, const char *rest) { printf("%s %ld %s\n", word, name, rest); }

static void on_registered(long name, const msgpack_object *ok, const char *refused) {
    (void)name, (void)ok;
    if (refused) {
        fprintf(stderr, "the agent refuses to register: %s\n", refused);
        exit(1);
    }
}

static void enroll(session *s) {
    msgpack_sbuffer body;
    msgpack_packer pk;
    begin(&body, &pk);
    msgpack_pack_map(&pk, s == control ? 1 : 2);
    pack_text(&pk, "engine"), msgpack_pack_map(&pk, 4);
    pack_text(&pk, "engine_id"), pack_text(&pk, ENGINE_ID);
    pack_text(&pk, "model"), pack_text(&pk, "known numbers");
    pack_text(&pk, "tp_size"), msgpack_pack_int(&pk, 1);
    pack_text(&pk, "groups"), cache_pack_groups(&pk);
    if (s != control)
        pack_text(&pk, "rank"), cache_pack_rank(&pk);
    ask(s, KVBUS_OP_REGISTER, &body, on_registered, 0);
    msgpack_sbuffer_destroy(&body);
}

/* Come to an agent, as often as it takes: with new memory and new boot ids each time. */
static void come(const char *path) {
    int memory = cache_open();
    for (bool told = false;; told = true) {
        rank_session = session_open(path, memory);
        control = rank_session ? session_open(path, -1) : NULL;
        if (control)
            break;
        if (rank_session)
            session_close(rank_session);
        if (!told)
            fprintf(stderr, "waiting for an agent at %s\n", path);
        usleep(50000);
    }
    enroll(rank_session);
    enroll(control);
}

static void go(void) {
    session_close(control);
    session_close(rank_session);
    control = rank_session = NULL;
}

/* Hand over the whole lines that stdin has; false at its end. */
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
    come(path);
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
            go();
            on_lost();
            come(path);
            continue;
        }
        session_work(control);
        session_work(rank_session);
        if (items[4].revents && !read_lines())
            return 0;
    }
}
