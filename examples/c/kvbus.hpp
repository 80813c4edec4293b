// The client of client.h for C++17: sessions and bodies that close themselves, and std::function for replies.
//
// All sessions belong to one thread. A callback may throw: Session::work and Session::poll throw it on. It may not
// destroy its session. Objects of msgpack live until the callback returns.
#pragma once

#include "client.h"

#include <exception>
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

// No agent replies at the path: retry.
struct NoAgent : Error {
    using Error::Error;
};

// The agent is lost: destroy both sessions, then attach again; engine.c has the loop.
struct AgentLost : Error {
    AgentLost() : Error("the agent is lost") {}
};

using Object = const msgpack_object *;
using OnReply = std::function<void(Object ok, Object error)>; // one of both is null
using OnNotice = std::function<void(const std::string &op, Object body)>;

inline std::string text(Object map, const char *key) {
    Object value = kvbus_get(map, key);
    return value && value->type == MSGPACK_OBJECT_STR ? std::string(value->via.str.ptr, value->via.str.size) : "";
}

// A map of msgpack: Body body([](msgpack_packer *pk) { msgpack_pack_map(pk, 1); ... });
class Body {
  public:
    template <typename Pack> explicit Body(Pack pack) : Body() { pack(&packer_); }
    Body(const Body &) = delete;
    Body &operator=(const Body &) = delete;
    ~Body() { msgpack_sbuffer_destroy(&buffer_); }
    const msgpack_sbuffer *buffer() const { return &buffer_; }

  private:
    Body() { kvbus_begin(&buffer_, &packer_); }

    msgpack_sbuffer buffer_;
    msgpack_packer packer_;
};

// A session has one address for its life, and cannot move: to replace it, hold it in a std::optional.
class Session {
  public:
    // Throws NoAgent; Error if the agent refuses.
    Session(const std::string &path, const std::string &engine_id,
            const std::vector<kvbus_segment> &segments = {}) {
        char refusal[KVBUS_REFUSAL_CHARS];
        session_ = kvbus_open(path.c_str(), engine_id.c_str(), segments.data(),
                              static_cast<unsigned>(segments.size()), refusal);
        if (!session_ && !*refusal)
            throw NoAgent("no agent replies at " + path);
        if (!session_)
            throw Error(refusal);
        kvbus_set_on_notice(session_, &Session::noticed, this);
    }
    Session(const Session &) = delete;
    Session &operator=(const Session &) = delete;
    ~Session() { kvbus_close(session_); }

    void on_notice(OnNotice then) { notice_ = std::move(then); }

    void request(const char *op, const Body &body, OnReply then) {
        auto pending = std::make_unique<Pending>(Pending{this, std::move(then)});
        auto *key = pending.get();
        pending_.emplace(key, std::move(pending));
        if (!kvbus_request(session_, op, body.buffer(), &Session::replied, reinterpret_cast<intptr_t>(key))) {
            pending_.erase(key);
            throw Error("too many requests are pending");
        }
    }

    // For a loop of your own: wait for these, 50 ms at most, then call `work`; then check `is_lost`.
    void *socket() const { return kvbus_socket(session_); }
    int attach_fd() const { return kvbus_attach_fd(session_); }
    bool is_lost() const { return kvbus_is_lost(session_); }

    void work() {
        kvbus_work(session_);
        if (thrown_)
            std::rethrow_exception(std::exchange(thrown_, nullptr));
    }

    int take_lifeline() { return kvbus_take_lifeline(session_); } // the caller owns the descriptor

    // Wait up to `timeout_ms` for messages of these sessions or items of your own, and call the callbacks of all
    // messages. Throws AgentLost after these.
    static void poll(std::initializer_list<Session *> sessions, long timeout_ms,
                     std::vector<zmq_pollitem_t> *own = nullptr) {
        std::vector<zmq_pollitem_t> items = own ? *own : std::vector<zmq_pollitem_t>();
        bool is_any_lost = false;
        for (Session *one : sessions) {
            items.push_back({one->socket(), 0, ZMQ_POLLIN, 0});
            items.push_back({nullptr, one->attach_fd(), ZMQ_POLLIN, 0});
        }
        zmq_poll(items.data(), static_cast<int>(items.size()), timeout_ms);
        if (own)
            own->assign(items.begin(), items.begin() + static_cast<std::ptrdiff_t>(own->size()));
        for (Session *one : sessions)
            is_any_lost |= one->is_lost();
        for (Session *one : sessions)
            one->work();
        if (is_any_lost)
            throw AgentLost();
    }

  private:
    struct Pending {
        Session *session;
        OnReply then;
    };

    // Exceptions must not cross the frames of C: the first one waits for `work`.
    template <typename Call> void guard(Call call) {
        try {
            call();
        } catch (...) {
            if (!thrown_)
                thrown_ = std::current_exception();
        }
    }

    static void replied(intptr_t of, Object ok, Object error) {
        auto *key = reinterpret_cast<Pending *>(of);
        Session *session = key->session;
        session->guard([&] {
            auto node = session->pending_.extract(key);
            if (node.mapped()->then)
                node.mapped()->then(ok, error);
        });
    }

    static void noticed(void *self, const char *op, Object body) {
        auto *session = static_cast<Session *>(self);
        session->guard([&] {
            OnNotice then = session->notice_; // which may set another one
            if (then)
                then(op, body);
        });
    }

    kvbus_session *session_ = nullptr;
    OnNotice notice_;
    std::unordered_map<Pending *, std::unique_ptr<Pending>> pending_;
    std::exception_ptr thrown_;
};

} // namespace kvbus
