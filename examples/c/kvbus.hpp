// The client of client.h for C++17: sessions and bodies that close themselves, and std::function for replies.
//
// Callbacks must not throw: C code calls them. Objects of msgpack live until the callback returns.
#pragma once

#include "client.h"

#include <functional>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>
#include <zmq.h>

namespace kvbus {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The agent is lost: close both sessions, and attach again with new memory.
struct AgentLost : Error {
    AgentLost() : Error("the agent is lost") {}
};

using Object = const msgpack_object *;
using OnReply = std::function<void(Object ok, const char *refused)>; // `refused` is an error code, or null
using OnNotice = std::function<void(const std::string &op, Object body)>;

inline std::string text(Object map, const char *key) {
    Object value = ::get(map, key);
    return value && value->type == MSGPACK_OBJECT_STR ? std::string(value->via.str.ptr, value->via.str.size) : "";
}

// A map of msgpack: Body body([](msgpack_packer *pk) { msgpack_pack_map(pk, 1); ... });
class Body {
  public:
    template <typename Pack> explicit Body(Pack pack) {
        msgpack_packer packer;
        ::begin(&buffer_, &packer);
        pack(&packer);
    }
    Body(const Body &) = delete;
    Body &operator=(const Body &) = delete;
    ~Body() { msgpack_sbuffer_destroy(&buffer_); }
    const msgpack_sbuffer *buffer() const { return &buffer_; }

  private:
    msgpack_sbuffer buffer_;
};

class Session {
  public:
    Session(const std::string &path, const std::string &engine_id, const std::vector<segment> &segments = {}) {
        char refusal[REFUSAL_CHARS];
        session_ = session_open(path.c_str(), engine_id.c_str(), segments.data(),
                                static_cast<unsigned>(segments.size()), refusal);
        if (!session_)
            throw Error(*refusal ? std::string(refusal) : "no agent at " + path);
        session_on_notice(session_, &Session::noticed, this);
    }
    Session(const Session &) = delete;
    Session &operator=(const Session &) = delete;
    ~Session() { session_close(session_); }

    void on_notice(OnNotice then) { notice_ = std::move(then); }

    void request(const char *op, const Body &body, OnReply then) {
        auto pending = std::make_unique<Pending>(Pending{this, std::move(then)});
        auto *key = pending.get();
        pending_.emplace(key, std::move(pending));
        if (!session_request(session_, op, body.buffer(), &Session::replied, reinterpret_cast<intptr_t>(key))) {
            pending_.erase(key);
            throw Error("too many requests are pending");
        }
    }

    // Wait up to `timeout_ms` for messages of these sessions, and call their callbacks.
    static void poll(std::initializer_list<Session *> sessions, long timeout_ms) {
        std::vector<zmq_pollitem_t> items;
        for (Session *one : sessions) {
            items.push_back({session_socket(one->session_), 0, ZMQ_POLLIN, 0});
            items.push_back({nullptr, session_attach_fd(one->session_), ZMQ_POLLIN, 0});
        }
        zmq_poll(items.data(), static_cast<int>(items.size()), timeout_ms);
        for (Session *one : sessions) {
            if (session_lost(one->session_))
                throw AgentLost();
            session_work(one->session_);
        }
    }

  private:
    struct Pending {
        Session *session;
        OnReply then;
    };

    static void replied(intptr_t of, Object ok, const char *refused) {
        auto *key = reinterpret_cast<Pending *>(of);
        auto node = key->session->pending_.extract(key);
        node.mapped()->then(ok, refused);
    }

    static void noticed(void *self, const char *op, Object body) {
        auto *session = static_cast<Session *>(self);
        if (session->notice_)
            session->notice_(op, body);
    }

    session *session_ = nullptr;
    OnNotice notice_;
    std::unordered_map<Pending *, std::unique_ptr<Pending>> pending_;
};

} // namespace kvbus
