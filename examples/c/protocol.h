/* Names of docs/protocol-engine.md. Generated: python docs/generate_header.py */
#pragma once

enum {
    KVBUS_PROTOCOL_VERSION = 1,
    KVBUS_TICKET_VERSION = 1,
    KVBUS_MAX_FRAME_BYTES = 16777216,
    KVBUS_MAX_ITEMS = 262144,
};

/* Attach socket: requests and replies */

/* min_protocol, max_protocol, engine_id, boot -> protocol, agent_id, agent_boot, role, engine_endpoint,
   peer_endpoint, events_endpoint, [server_key] */
#define KVBUS_OP_HELLO "hello"
/* segment_id, size_bytes, [direct], [kind] -> sealed */
#define KVBUS_OP_SEGMENT "segment"
/* segment_id, device, size_bytes, offset_bytes, [handle], [parts] -> nothing */
#define KVBUS_OP_CUDA "cuda"

/* Engine socket, of all agents: requests and replies */

/* engine, [rank], [remote_ranks], [rank_secret], [role], [instance], [republishes] -> nothing */
#define KVBUS_OP_REGISTER "register"
/* nothing -> memory */
#define KVBUS_OP_READY "ready"
/* nothing -> nothing */
#define KVBUS_OP_DETACH "detach"
/* nothing -> nothing */
#define KVBUS_OP_PING "ping"

/* Engine socket of a prefill agent: requests and replies */

/* request_id, num_tokens, tables, [sealed], [ttl_s], [audience], [prompt_digest], [transfer_id], [readers],
   [traceparent], [sent_s], [cell], [offer_id], [secret], [left_s], [after], [park] -> offer_id, ticket,
   [ticket_blocks], [ttl_s] */
#define KVBUS_OP_OFFER "offer"
/* offer_id, num_tokens, [tables], [after] -> nothing */
#define KVBUS_OP_EXTEND "extend"
/* offer_id, [after] -> nothing */
#define KVBUS_OP_SEAL "seal"
/* offer_id -> nothing */
#define KVBUS_OP_PARK "park"
/* short -> nothing */
#define KVBUS_OP_BLOCKS "blocks"
/* offer_id -> nothing */
#define KVBUS_OP_WITHDRAW "withdraw"
/* [ended] -> nothing */
#define KVBUS_OP_REPUBLISHED "republished"

/* Engine socket of a decode agent: requests and replies */

/* fetch_id, ticket, num_tokens, tables, [first_token], [timeout_s], [zero_tail], [chunk_tokens],
   [prompt_digest], [priority], [traceparent], [sent_s], [wanted_s], [token], [repeated], [at_most], [after]
   -> fetch_id, request_id, outcome, stage, blocks_free, [code], [message], [num_bytes], [path], [stages_s],
   [whole_blocks], [num_tokens], [attempts] */
#define KVBUS_OP_FETCH "fetch"
/* ticket -> nothing */
#define KVBUS_OP_HOLD "hold"
/* fetch_id, [release_offer] -> nothing */
#define KVBUS_OP_CANCEL "cancel"

/* Notices of the agent */

/* offer_id, request_id, outcome, [commits] */
#define KVBUS_NOTICE_RELEASED "released"
/* fetch_id, num_tokens */
#define KVBUS_NOTICE_LANDED "landed"
/* fetch_id */
#define KVBUS_NOTICE_BLOCKS_FREED "blocks_freed"
/* nothing */
#define KVBUS_NOTICE_LEAVING "leaving"

/* Error codes */

/* The frame is not an envelope of this protocol. */
#define KVBUS_CODE_MALFORMED "malformed"
/* The message exceeds a limit. */
#define KVBUS_CODE_TOO_LARGE "too_large"
/* The two sides, or the ticket, have different protocol versions. */
#define KVBUS_CODE_UNSUPPORTED_VERSION "unsupported_version"
/* This socket does not support the operation. */
#define KVBUS_CODE_UNKNOWN_OP "unknown_op"
/* A field is missing or wrong, or the current state does not allow the request. */
#define KVBUS_CODE_INVALID "invalid"
/* A limit is reached, or another reader has the lease. */
#define KVBUS_CODE_BUSY "busy"
/* The agent is shutting down. */
#define KVBUS_CODE_DRAINING "draining"
/* The message names an old boot id, engine or lease epoch. */
#define KVBUS_CODE_STALE "stale"
/* A credential is missing or invalid: ticket secret, lease token, `rank_secret`, or a key with the right
   role. */
#define KVBUS_CODE_FORBIDDEN "forbidden"
/* The ticket is for another prompt, or is signed without a prompt digest. */
#define KVBUS_CODE_PROMPT_MISMATCH "prompt_mismatch"
/* The operation did not end in time. */
#define KVBUS_CODE_TIMEOUT "timeout"
/* The engine cancelled the operation. */
#define KVBUS_CODE_CANCELLED "cancelled"
/* The other side is closing its sockets. */
#define KVBUS_CODE_CLOSED "closed"
/* A bug of the replying side; its log has details. */
#define KVBUS_CODE_INTERNAL "internal"
/* The configuration is wrong, or does not allow the request. */
#define KVBUS_CODE_CONFIG "config"
/* A memory description, block table or tile is invalid. */
#define KVBUS_CODE_GEOMETRY "geometry"
/* One engine cannot use the KV of the other. The detail has `field`, `prefill` and `decode`. */
#define KVBUS_CODE_INCOMPATIBLE "incompatible"
/* Shared memory cannot be mapped, or was not passed. */
#define KVBUS_CODE_SEGMENT "segment"
/* The session has not sent `hello` or `register`. */
#define KVBUS_CODE_NOT_REGISTERED "not_registered"
/* The agent has no engine with this id. */
#define KVBUS_CODE_ENGINE_UNKNOWN "engine_unknown"
/* Another live process has this engine id or rank, or two sessions differ in their specs. */
#define KVBUS_CODE_ENGINE_CONFLICT "engine_conflict"
/* Some ranks of the engine are not registered, or no engine can make the offer yet. */
#define KVBUS_CODE_ENGINE_NOT_READY "engine_not_ready"
/* The engine's process has ended. */
#define KVBUS_CODE_ENGINE_LOST "engine_lost"
/* The offer does not exist, or its record is gone. */
#define KVBUS_CODE_OFFER_UNKNOWN "offer_unknown"
/* The request already has a live offer. */
#define KVBUS_CODE_OFFER_EXISTS "offer_exists"
/* The offer is not sealed: it cannot be committed, and its states cannot be read. */
#define KVBUS_CODE_OFFER_OPEN "offer_open"
/* The offer is sealed and cannot change. */
#define KVBUS_CODE_OFFER_SEALED "offer_sealed"
/* The offer is in the pool that `engine_id` and `engine_instance` of the detail name. */
#define KVBUS_CODE_OFFER_PARKED "offer_parked"
/* The offer was withdrawn. */
#define KVBUS_CODE_OFFER_WITHDRAWN "offer_withdrawn"
/* The offer was not read in time. */
#define KVBUS_CODE_OFFER_EXPIRED "offer_expired"
/* The offer was already read. */
#define KVBUS_CODE_OFFER_COMPLETED "offer_completed"
/* The lease of the offer or of a staging slot ended before the read. */
#define KVBUS_CODE_LEASE_EXPIRED "lease_expired"
/* The fetch does not exist, or its record is gone. */
#define KVBUS_CODE_FETCH_UNKNOWN "fetch_unknown"
/* The fetch id was used before. */
#define KVBUS_CODE_FETCH_EXISTS "fetch_exists"
/* The other agent cannot be reached. */
#define KVBUS_CODE_PEER_UNREACHABLE "peer_unreachable"
/* The other agent was lost. */
#define KVBUS_CODE_PEER_LOST "peer_lost"
/* A READ or a copy failed. */
#define KVBUS_CODE_TRANSFER_FAILED "transfer_failed"
/* The bytes read differ from the prefill engine's; the message names layer, head and tokens. */
#define KVBUS_CODE_DIGEST_MISMATCH "digest_mismatch"
