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

enum { MAX_REQUESTS = 256, MAX_TEXT = KVBUS_REFUSAL_CHARS, ID_CHARS = 33, ATTACH_TIMEOUT_S = 10 };

/* Waits after `busy`: at least the agent's, and twice as long each time; times 1 to 2, at random. */
static const double FIRST_WAIT_S = 0.1, MAX_WAIT_S = 2.0, BUSY_S = 30.0;

typedef struct {
    uint64_t id; /* 0: free */
    char op[16];
    char *body;
    size_t body_size;
    double begun, wait_s;
    double again; /* time of the retry after `busy`; 0: it waits for its reply */
    kvbus_on_reply then;
    intptr_t of; /* of the caller */
} request;

struct kvbus_session {
    char boot[ID_CHARS], secret[ID_CHARS], agent_boot[MAX_TEXT];
    int attach, lifeline;
    bool is_working, is_closed; /* closed by a callback, and freed after it */
    void *socket;
    uint64_t next_id;
    double heard;
    kvbus_on_notice notice;
    void *notice_context;
    request requests[MAX_REQUESTS];
};

static const char EMPTY_MAP[1] = {'\x80'};
static void *context;

double kvbus_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void random_bytes(void *to, size_t size) {
    if (getrandom(to, size, 0) != (ssize_t)size)
        abort();
}

static void *allocate(size_t size) {
    void *memory = calloc(1, size);
    if (!memory)
        abort();
    return memory;
}

static void random_id(char to[ID_CHARS]) {
    uint8_t bytes[16];
    random_bytes(bytes, sizeof bytes);
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

/* The descriptor that came with a message, into `fd` if that has none yet. */
static void keep_descriptor(struct msghdr *header, int *fd) {
    struct cmsghdr *rights = CMSG_FIRSTHDR(header);
    if (!rights || rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS)
        return;
    int received;
    memcpy(&received, CMSG_DATA(rights), sizeof received);
    if (*fd >= 0)
        close(received);
    else
        *fd = received;
}

static bool receive(int attach, void *to, size_t size, int *fd) {
    for (size_t done = 0; done < size;) {
        char control[CMSG_SPACE(sizeof *fd)];
        struct iovec part = {(char *)to + done, size - done};
        struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control};
        header.msg_controllen = sizeof control;
        ssize_t got = recvmsg(attach, &header, MSG_CMSG_CLOEXEC);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        keep_descriptor(&header, fd);
        done += (size_t)got;
    }
    return true;
}

/* Send a message and unpack the reply; false if the agent is gone, or refuses with this message. */
static bool call(kvbus_session *s, const msgpack_sbuffer *message, int fd, msgpack_unpacked *reply,
                 char *refusal) {
    char body[65536];
    uint8_t length[4];
    msgpack_unpacked_init(reply);
    if (!send_attach(s->attach, message, fd) || !receive(s->attach, length, 4, &s->lifeline))
        return false;
    size_t size = length[0] | (size_t)length[1] << 8 | (size_t)length[2] << 16;
    if (size > sizeof body || !receive(s->attach, body, size, &s->lifeline))
        return false;
    if (msgpack_unpack_next(reply, body, size, NULL) != MSGPACK_UNPACK_SUCCESS)
        return false;
    if (kvbus_get(&reply->data, "ok"))
        return true;
    const msgpack_object *error = kvbus_get(&reply->data, "error");
    kvbus_copy_text(kvbus_get(error, "message"), refusal, KVBUS_REFUSAL_CHARS);
    return false;
}

static void begin_attach(msgpack_sbuffer *message, msgpack_packer *pk, const char *op, size_t fields) {
    kvbus_begin(message, pk);
    msgpack_pack_map(pk, 2);
    kvbus_pack_text(pk, "op"), kvbus_pack_text(pk, op);
    kvbus_pack_text(pk, "body"), msgpack_pack_map(pk, fields);
}

static bool say_hello(kvbus_session *s, const char *engine_id, char *refusal) {
    msgpack_sbuffer message;
    msgpack_packer pk;
    begin_attach(&message, &pk, KVBUS_OP_HELLO, 4);
    kvbus_pack_text(&pk, "min_protocol"), msgpack_pack_int(&pk, KVBUS_PROTOCOL_VERSION);
    kvbus_pack_text(&pk, "max_protocol"), msgpack_pack_int(&pk, KVBUS_PROTOCOL_VERSION);
    kvbus_pack_text(&pk, "engine_id"), kvbus_pack_text(&pk, engine_id);
    kvbus_pack_text(&pk, "boot"), kvbus_pack_text(&pk, s->boot);
    msgpack_unpacked welcome;
    bool done = call(s, &message, -1, &welcome, refusal);
    if (done) {
        char endpoint[MAX_TEXT];
        int none = 0;
        kvbus_copy_text(kvbus_get(kvbus_get(&welcome.data, "ok"), "agent_boot"), s->agent_boot, MAX_TEXT);
        kvbus_copy_text(kvbus_get(kvbus_get(&welcome.data, "ok"), "engine_endpoint"), endpoint, MAX_TEXT);
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

static bool pass_memory(kvbus_session *s, const kvbus_segment *memory, char *refusal) {
    msgpack_sbuffer message;
    msgpack_packer pk;
    begin_attach(&message, &pk, KVBUS_OP_SEGMENT, 3);
    kvbus_pack_text(&pk, "segment_id"), kvbus_pack_text(&pk, memory->id);
    kvbus_pack_text(&pk, "size_bytes"), msgpack_pack_uint64(&pk, memory->size);
    kvbus_pack_text(&pk, "kind"), kvbus_pack_text(&pk, memory->kind);
    msgpack_unpacked reply;
    bool done = call(s, &message, memory->fd, &reply, refusal);
    msgpack_unpacked_destroy(&reply);
    msgpack_sbuffer_destroy(&message);
    return done;
}

static int attach_socket(void) {
    struct timeval timeout = {.tv_sec = ATTACH_TIMEOUT_S};
    int attach = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(attach, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
    setsockopt(attach, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout); /* of connect, too */
    return attach;
}

static kvbus_session *new_session(void) {
    kvbus_session *s = allocate(sizeof *s);
    random_id(s->boot), random_id(s->secret);
    random_bytes(&s->next_id, sizeof s->next_id);
    s->next_id = 1 + (s->next_id >> 12), s->heard = kvbus_now();
    s->lifeline = -1, s->attach = attach_socket();
    return s;
}

kvbus_session *kvbus_open(const char *path, const char *engine_id, const kvbus_segment *segments,
                          unsigned count, char refusal[KVBUS_REFUSAL_CHARS]) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    refusal[0] = 0;
    if (strlen(path) >= sizeof address.sun_path) {
        snprintf(refusal, KVBUS_REFUSAL_CHARS, "%s has over %zu bytes: use a shorter runtime_dir", path,
                 sizeof address.sun_path - 1);
        return NULL;
    }
    strcpy(address.sun_path, path);
    if (!context && !(context = zmq_ctx_new()))
        abort();
    kvbus_session *s = new_session();
    bool done = !connect(s->attach, (struct sockaddr *)&address, sizeof address) &&
                say_hello(s, engine_id, refusal);
    for (unsigned i = 0; done && i < count; i++)
        done = pass_memory(s, &segments[i], refusal);
    if (done)
        return s;
    kvbus_close(s);
    return NULL;
}

void kvbus_set_on_notice(kvbus_session *s, kvbus_on_notice then, void *context) {
    s->notice = then, s->notice_context = context;
}

static void forget(request *r) {
    free(r->body);
    memset(r, 0, sizeof *r);
}

void kvbus_close(kvbus_session *s) {
    s->is_closed = true;
    if (s->is_working)
        return;
    for (unsigned i = 0; i < MAX_REQUESTS; i++)
        forget(&s->requests[i]);
    if (s->socket)
        zmq_close(s->socket);
    if (s->lifeline >= 0)
        close(s->lifeline);
    close(s->attach);
    free(s);
}

int kvbus_attach_fd(const kvbus_session *s) { return s->attach; }
void *kvbus_socket(const kvbus_session *s) { return s->socket; }

int kvbus_take_lifeline(kvbus_session *s) {
    int lifeline = s->lifeline;
    s->lifeline = -1;
    return lifeline;
}

bool kvbus_is_lost(const kvbus_session *s) {
    char byte;
    ssize_t got = recv(s->attach, &byte, 1, MSG_DONTWAIT);
    return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
}

/* Requests: each is sent once, and waits for its reply while the session lives. */

/* Send a request; returns its id. */
static uint64_t post(kvbus_session *s, const char *op, const char *body, size_t size) {
    msgpack_sbuffer frame;
    msgpack_packer pk;
    uint64_t id = s->next_id++;
    kvbus_begin(&frame, &pk);
    msgpack_pack_map(&pk, 6);
    kvbus_pack_text(&pk, "v"), msgpack_pack_int(&pk, KVBUS_PROTOCOL_VERSION);
    kvbus_pack_text(&pk, "op"), kvbus_pack_text(&pk, op);
    kvbus_pack_text(&pk, "id"), msgpack_pack_uint64(&pk, id);
    kvbus_pack_text(&pk, "boot"), kvbus_pack_text(&pk, s->boot);
    kvbus_pack_text(&pk, "secret"), kvbus_pack_text(&pk, s->secret);
    kvbus_pack_text(&pk, "body"), pk.callback(pk.data, body, size);
    zmq_send(s->socket, frame.data, frame.size, 0);
    msgpack_sbuffer_destroy(&frame);
    return id;
}

bool kvbus_request(kvbus_session *s, const char *op, const msgpack_sbuffer *body, kvbus_on_reply then,
                   intptr_t of) {
    request *r = s->requests;
    while (r->id)
        if (++r == s->requests + MAX_REQUESTS)
            return false;
    snprintf(r->op, sizeof r->op, "%s", op);
    r->body_size = body ? body->size : sizeof EMPTY_MAP;
    r->body = allocate(r->body_size);
    memcpy(r->body, body ? body->data : EMPTY_MAP, r->body_size);
    r->then = then, r->of = of;
    r->begun = kvbus_now(), r->wait_s = FIRST_WAIT_S;
    r->id = post(s, r->op, r->body, r->body_size);
    return true;
}

static bool is_retried(request *r, const msgpack_object *error) {
    if (!kvbus_is_text(kvbus_get(error, "code"), KVBUS_CODE_BUSY))
        return false;
    uint32_t random;
    random_bytes(&random, sizeof random);
    double wait_s = kvbus_number(kvbus_get(kvbus_get(error, "detail"), "retry_after_s"), 0);
    wait_s = (wait_s > r->wait_s ? wait_s : r->wait_s) * (1 + random / (double)UINT32_MAX);
    r->wait_s = r->wait_s < MAX_WAIT_S / 2 ? 2 * r->wait_s : MAX_WAIT_S;
    r->again = kvbus_now() + wait_s;
    return r->again < r->begun + BUSY_S;
}

static void take_reply(kvbus_session *s, uint64_t id, const msgpack_object *message) {
    request *r = s->requests;
    while (!id || r->id != id)
        if (++r >= s->requests + MAX_REQUESTS)
            return; /* reply to a ping */
    const msgpack_object *error = kvbus_get(message, "error");
    if (is_retried(r, error))
        return;
    kvbus_on_reply then = r->then;
    intptr_t of = r->of;
    forget(r);
    if (then)
        then(of, error ? NULL : kvbus_get(message, "ok"), error);
}

static void take(kvbus_session *s, const msgpack_object *message) {
    const msgpack_object *re = kvbus_get(message, "re");
    if (!kvbus_is_text(kvbus_get(message, "boot"), s->agent_boot))
        return; /* of an earlier agent, or of the next one: the attach connection ends then */
    s->heard = kvbus_now();
    if (re && re->type == MSGPACK_OBJECT_POSITIVE_INTEGER)
        take_reply(s, re->via.u64, message);
    else if (!re && s->notice) {
        char op[MAX_TEXT];
        kvbus_copy_text(kvbus_get(message, "op"), op, sizeof op);
        s->notice(s->notice_context, op, kvbus_get(message, "body"));
    }
}

static void take_all(kvbus_session *s) {
    zmq_msg_t frame;
    zmq_msg_init(&frame);
    while (!s->is_closed && zmq_msg_recv(&frame, s->socket, ZMQ_DONTWAIT) >= 0) {
        msgpack_unpacked message;
        msgpack_unpacked_init(&message);
        if (msgpack_unpack_next(&message, zmq_msg_data(&frame), zmq_msg_size(&frame), NULL) ==
            MSGPACK_UNPACK_SUCCESS)
            take(s, &message.data);
        msgpack_unpacked_destroy(&message);
    }
    zmq_msg_close(&frame);
}

static void send_due(kvbus_session *s) {
    for (request *r = s->requests; r < s->requests + MAX_REQUESTS; r++)
        if (r->again && kvbus_now() >= r->again) {
            r->again = 0;
            r->id = post(s, r->op, r->body, r->body_size);
        }
    if (kvbus_now() > s->heard + 1.0) {
        s->heard = kvbus_now();
        post(s, KVBUS_OP_PING, EMPTY_MAP, sizeof EMPTY_MAP); /* any message is a sign of life */
    }
}

void kvbus_work(kvbus_session *s) {
    s->is_working = true;
    take_all(s);
    s->is_working = false;
    if (s->is_closed)
        kvbus_close(s);
    else
        send_due(s);
}
