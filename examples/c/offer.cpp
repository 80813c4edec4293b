// A prefill engine in C++ that hands over one prompt: offer NAME TOKENS. It prints the ticket, and ends after `released`.
#include "kvbus.hpp"
extern "C" {
#include "engine.h"
}

#include <cstdio>
#include <cstdlib>

extern "C" {
const char *const ENGINE_ID = "cpp-prefill";
const unsigned BLOCK_SIZE = 16;
const bool HEADS_BEFORE_TOKENS = false;
}

namespace {

kvbus::Body registration(bool with_rank) {
    return kvbus::Body([with_rank](msgpack_packer *pk) {
        msgpack_pack_map(pk, with_rank ? 2 : 1);
        kvbus_pack_text(pk, "engine"), cache_pack_engine(pk);
        if (with_rank)
            kvbus_pack_text(pk, "rank"), cache_pack_rank(pk);
    });
}

void check(kvbus::Object error) {
    if (error)
        throw kvbus::Error("the agent refuses: " + kvbus::text(error, "code") + ": " + kvbus::text(error, "message"));
}

void run(const char *path, const char *request_id, unsigned tokens) {
    long name = std::atol(request_id);
    int memory = cache_open();
    kvbus::Session rank(path, ENGINE_ID, {{"kv", "kv", cache_bytes(), memory}});
    kvbus::Session control(path, ENGINE_ID);
    std::string outcome;
    control.on_notice([&](const std::string &op, kvbus::Object body) {
        if (op == KVBUS_NOTICE_RELEASED)
            outcome = kvbus::text(body, "outcome");
    });

    blocks table{};
    if (!blocks_take(&table, (tokens + BLOCK_SIZE - 1) / BLOCK_SIZE))
        throw kvbus::Error("too few blocks");
    numbers_write(name, &table, 0, tokens);
    kvbus::Body offer([&](msgpack_packer *pk) {
        msgpack_pack_map(pk, 3);
        kvbus_pack_text(pk, "request_id"), kvbus_pack_text(pk, request_id);
        kvbus_pack_text(pk, "num_tokens"), msgpack_pack_uint32(pk, tokens);
        kvbus_pack_text(pk, "tables"), blocks_pack(pk, &table, 0);
    });

    auto on_offered = [&](kvbus::Object ok, kvbus::Object error) {
        check(error);
        std::printf("ticket %ld ", name);
        ticket_print(kvbus_get(ok, "ticket"));
    };
    auto on_control = [&](kvbus::Object, kvbus::Object error) { // the engine is ready
        check(error);
        control.request(KVBUS_OP_OFFER, offer, on_offered);
    };
    auto on_rank = [&](kvbus::Object, kvbus::Object error) {
        check(error);
        control.request(KVBUS_OP_REGISTER, registration(false), on_control);
    };
    rank.request(KVBUS_OP_REGISTER, registration(true), on_rank);
    while (outcome.empty())
        kvbus::Session::poll({&rank, &control}, 50);
    std::printf("released %ld %s\n", name, outcome.c_str());
}

} // namespace

int main(int argc, char **argv) {
    const char *path = std::getenv("KVBUS_ATTACH");
    if (argc != 3 || !path) {
        std::fprintf(stderr, "usage: KVBUS_ATTACH=ATTACH.SOCK offer NAME TOKENS\n");
        return 2;
    }
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    try {
        run(path, argv[1], static_cast<unsigned>(std::atoi(argv[2])));
    } catch (const std::exception &error) {
        std::fprintf(stderr, "offer: %s\n", error.what());
        return 1;
    }
}
