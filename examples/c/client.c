/* One session with the agent: the attach connection, requests and replies, notices. */
#define _GNU_SOURCE
#include "client.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include <zmq.h>

enum { MAX_REQUESTS = 256, MAX_TEXT = REFUSAL_CHARS, ID_CHARS = 33 };

typedef struct {
    uint64_t id; /* 0: free */
    char op[16];
    char *body;
    size_t body_size;
    double again; /* time of the retry after `busy`; 0: it waits for its reply */
    on_reply then;
    intptr_t of; /* of the caller */
} request;

struct session {
    char boot[ID_CHARS], secret[ID_CHARS], agent_boot[MAX_TEXT];
    int attach;
    void *socket;
    uint64_t next_id;
    double heard;
    on_notice notice;
    void *notice_context;
    request requests[MAX_REQUESTS];
};

static void *context;

double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void random_id(char to[ID_CHARS]) {
    uint8_t bytes[16];
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
        abort();
    for (unsigned i = 0; i < sizeof bytes; i++)
        sprintf(to + 2 * i, "%02x", bytes[i]);
}

/* Attach socket: a length of 4 bytes, then a map; a descriptor goes with the first byte. */

static bool send_attach(int attach, const msgpack_sbuffer *message, int fd) {
    char control[CMSG_SPACE(sizeof fd)] = {0}, frame[1024];
    size_t size = message->size;
    if (size + 4 > sizeof frame)
        return false;
    for (unsigned i = 0; i < 4; i++)
        frame[i] = (char)(size >> 8 * i);
    memcpy(frame + 4, message->data, size);
    struct iovec part = {frame, size + 4};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        header.msg_control = control, header.msg_controllen = sizeof control;
        struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET, rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    }
    ssize_t sent = sendmsg(attach, &header, MSG_NOSIGNAL);
    return sent > 0 && ((size_t)sent == size + 4 ||
                        send(attach, frame + sent, size + 4 - (size_t)sent, MSG_NOSIGNAL) > 0);
}

/* Send a message and unpack the reply; false if the agent is gone, or refuses with this message. */
static bool call(int attach, const msgpack_sbuffer *message, int fd, msgpack_unpacked *reply, char *refusal) {
    char body[65536];
    uint8_t length[4];
    msgpack_unpacked_init(reply);
    if (!send_attach(attach, message, fd) || recv(attach, length, 4, MSG_WAITALL) != 4)
        return false;
    size_t size = length[0] | (size_t)length[1] << 8 | (size_t)length[2] << 16;
    if (size > sizeof body || recv(attach, body, size, MSG_WAITALL) != (ssize_t)size)
        return false;
    if (msgpack_unpack_next(reply, body, size, NULL) != MSGPACK_UNPACK_SUCCESS)
        return false;
    if (get(&reply->data, "ok"))
        return true;
    copy_text(get(get(&reply->data, "error"), "message"), refusal, REFUSAL_CHARS);
    return false;
}

static bool say_hello(session *s, const char *engine_id, char *refusal) {
    msgpack_sbuffer message;
    msgpack_packer pk;
    begin(&message, &pk);
    msgpack_pack_map(&pk, 2);
    pack_text(&pk, "op"), pack_text(&pk, KVBUS_OP_HELLO);
    pack_text(&pk, "body"), msgpack_pack_map(&pk, 4);
    pack_text(&pk, "min_protocol"), msgpack_pack_int(&pk, KVBUS_PROTOCOL_VERSION);
    pack_text(&pk, "max_protocol"), msgpack_pack_int(&pk, KVBUS_PROTOCOL_VERSION);
    pack_text(&pk, "engine_id"), pack_text(&pk, engine_id);
    pack_text(&pk, "boot"), pack_text(&pk, s->boot);
    msgpack_unpacked welcome;
    bool done = call(s->attach, &message, -1, &welcome, refusal);
    if (done) {
        char endpoint[MAX_TEXT];
        int none = 0;
        copy_text(get(get(&welcome.data, "ok"), "agent_boot"), s->agent_boot, MAX_TEXT);
        copy_text(get(get(&welcome.data, "ok"), "engine_endpoint"), endpoint, MAX_TEXT);
        s->socket = zmq_socket(context, ZMQ_DEALER);
        zmq_setsockopt(s->socket, ZMQ_LINGER, &none, sizeof none);
        zmq_setsockopt(s->socket, ZMQ_RCVHWM, &none, sizeof none);
        zmq_setsockopt(s->socket, ZMQ_SNDHWM, &none, sizeof none); /* a request finds room */
        done = zmq_connect(s->socket, endpoint) == 0;
    }
    msgpack_unpacked_destroy(&welcome);
    msgpack_sbuffer_destroy(&message);
    return done;
}

static bool pass_memory(session *s, const segment *memory, char *refusal) {
    msgpack_sbuffer message;
    msgpack_packer pk;
    begin(&message, &pk);
    msgpack_pack_map(&pk, 2);
    pack_text(&pk, "op"), pack_text(&pk, KVBUS_OP_SEGMENT);
    pack_text(&pk, "body"), msgpack_pack_map(&pk, 3);
    pack_text(&pk, "segment_id"), pack_text(&pk, memory->id);
    pack_text(&pk, "size_bytes"), msgpack_pack_uint64(&pk, memory->size);
    pack_text(&pk, "kind"), pack_text(&pk, memory->kind);
    msgpack_unpacked reply;
    bool done = call(s->attach, &message, memory->fd, &reply, refusal);
    msgpack_unpacked_destroy(&reply);
    msgpack_sbuffer_destroy(&message);
    return done;
}

session *session_open(const char *path, const char *engine_id, const segment *segments, unsigned count,
                      char refusal[REFUSAL_CHARS]) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    session *s = calloc(1, sizeof *s);
    if (!context)
        context = zmq_ctx_new();
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    random_id(s->boot), random_id(s->secret);
    uint64_t first_id;
    if (getrandom(&first_id, sizeof first_id, 0) != sizeof first_id)
        abort();
    s->next_id = 1 + (first_id >> 12), s->heard = now();
    s->attach = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    refusal[0] = 0;
    bool done = !connect(s->attach, (struct sockaddr *)&address, sizeof address) &&
                say_hello(s, engine_id, refusal);
    for (unsigned i = 0; done && i < count; i++)
        done = pass_memory(s, &segments[i], refusal);
    if (done)
        return s;
    session_close(s);
    return NULL;
}

void session_on_notice(session *s, on_notice then, void *context) {
    s->notice = then, s->notice_context = context;
}

static void forget(request *r) {
    free(r->body);
    memset(r, 0, sizeof *r);
}

void session_close(session *s) {
    for (unsigned i = 0; i < MAX_REQUESTS; i++)
        forget(&s->requests[i]);
    if (s->socket)
        zmq_close(s->socket);
    close(s->attach);
    free(s);
}

int session_attach_fd(const session *s) { return s->attach; }
void *session_socket(const session *s) { return s->socket; }

bool session_lost(const session *s) {
    char byte;
    ssize_t got = recv(s->attach, &byte, 1, MSG_DONTWAIT);
    return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
}

/* Requests: each is sent once, and waits for its reply while the session lives. */

static void post(session *s, request *r) {
    msgpack_sbuffer frame;
    msgpack_packer pk;
    begin(&frame, &pk);
    msgpack_pack_map(&pk, 6);
    pack_text(&pk, "v"), msgpack_pack_int(&pk, KVBUS_PROTOCOL_VERSION);
    pack_text(&pk, "op"), pack_text(&pk, r->op);
    pack_text(&pk, "id"), msgpack_pack_uint64(&pk, r->id = s->next_id++);
    pack_text(&pk, "boot"), pack_text(&pk, s->boot);
    pack_text(&pk, "secret"), pack_text(&pk, s->secret);
    pack_text(&pk, "body"), msgpack_sbuffer_write(&frame, r->body, r->body_size);
    zmq_send(s->socket, frame.data, frame.size, 0);
    msgpack_sbuffer_destroy(&frame);
    r->again = 0;
}

bool session_request(session *s, const char *op, const msgpack_sbuffer *body, on_reply then, intptr_t of) {
    request *r = s->requests;
    while (r->id)
        if (++r == s->requests + MAX_REQUESTS)
            return false;
    snprintf(r->op, sizeof r->op, "%s", op);
    r->body_size = body ? body->size : 1;
    r->body = malloc(r->body_size);
    memcpy(r->body, body ? body->data : "\x80", r->body_size); /* an empty map */
    r->then = then, r->of = of;
    post(s, r);
    if (!then)
        forget(r); /* any message is a sign of life: the reply to a ping is not needed */
    return true;
}

static void take_reply(session *s, uint64_t id, const msgpack_object *message) {
    request *r = s->requests;
    while (r->id != id)
        if (++r == s->requests + MAX_REQUESTS)
            return; /* reply to a ping */
    const msgpack_object *error = get(message, "error");
    if (is_text(get(error, "code"), KVBUS_CODE_BUSY)) {
        r->again = now() + number(get(get(error, "detail"), "retry_after_s"), 0.2);
        return;
    }
    char code[MAX_TEXT] = "";
    if (error)
        copy_text(get(error, "code"), code, sizeof code);
    on_reply then = r->then;
    intptr_t of = r->of;
    forget(r);
    then(of, get(message, "ok"), error ? code : NULL);
}

static void take(session *s, const msgpack_object *message) {
    const msgpack_object *re = get(message, "re");
    if (!is_text(get(message, "boot"), s->agent_boot))
        return; /* of an earlier agent, or of the next one: the attach connection ends then */
    s->heard = now();
    if (re && re->type == MSGPACK_OBJECT_POSITIVE_INTEGER)
        take_reply(s, re->via.u64, message);
    else if (!re) {
        char op[MAX_TEXT];
        copy_text(get(message, "op"), op, sizeof op);
        if (s->notice)
            s->notice(s->notice_context, op, get(message, "body"));
    }
}

void session_work(session *s) {
    zmq_msg_t frame;
    zmq_msg_init(&frame);
    while (zmq_msg_recv(&frame, s->socket, ZMQ_DONTWAIT) >= 0) {
        msgpack_unpacked message;
        msgpack_unpacked_init(&message);
        if (msgpack_unpack_next(&message, zmq_msg_data(&frame), zmq_msg_size(&frame), NULL) ==
            MSGPACK_UNPACK_SUCCESS)
            take(s, &message.data);
        msgpack_unpacked_destroy(&message);
    }
    zmq_msg_close(&frame);
    for (request *r = s->requests; r < s->requests + MAX_REQUESTS; r++)
        if (r->again && now() >= r->again)
            post(s, r);
    if (now() > s->heard + 1.0) {
        s->heard = now();
        session_request(s, KVBUS_OP_PING, NULL, NULL, 0);
    }
}
