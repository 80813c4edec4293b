// A user of kvbus.hpp: prints what becomes of exceptions, of the lost agent, and of its lifeline.
#include "kvbus.hpp"

#include <iostream>
#include <optional>
#include <poll.h>
#include <unistd.h>

namespace {

kvbus_session *closed_by_its_callback;
bool is_closed;

void close_it(intptr_t, kvbus::Object, kvbus::Object) {
    kvbus_close(closed_by_its_callback);
    is_closed = true;
}

bool is_readable(int fd, int timeout_ms) {
    pollfd item{fd, POLLIN, 0};
    return ::poll(&item, 1, timeout_ms) == 1;
}

// Poll until an exception, and print that.
void poll_to_end(kvbus::Session &session) {
    try {
        for (;;)
            kvbus::Session::poll({&session}, 50);
    } catch (const kvbus::AgentLost &) {
        std::cout << "lost" << std::endl;
    } catch (const std::exception &error) {
        std::cout << error.what() << std::endl;
    }
}

} // namespace

int main(int, char **argv) {
    alarm(60);
    char refusal[KVBUS_REFUSAL_CHARS];
    closed_by_its_callback = kvbus_open(argv[1], "closed", nullptr, 0, refusal);
    for (int i = 0; i < 2; i++)
        kvbus_request(closed_by_its_callback, KVBUS_OP_PING, nullptr, close_it, 0);
    while (!is_closed)
        kvbus_work(closed_by_its_callback);

    kvbus::Body nothing([](msgpack_packer *pk) { msgpack_pack_map(pk, 0); });
    std::optional<kvbus::Session> session(std::in_place, argv[1], "client");
    int lifeline = session->take_lifeline();
    session->request(KVBUS_OP_PING, nothing, {});
    session->request(KVBUS_OP_PING, nothing, [](auto, auto) { throw kvbus::Error("thrown by a callback"); });
    poll_to_end(*session);
    session->request(KVBUS_OP_READY, nothing, [](auto, kvbus::Object error) {
        std::cout << kvbus::text(error, "code") << ": " << kvbus::text(error, "message") << std::endl;
    });
    poll_to_end(*session);
    session.reset();
    std::cout << (is_readable(lifeline, 10000) ? "ended" : "lives") << std::endl;
}
