/* The words of docs/protocol-engine.md. Generated: python docs/generate_header.py */
#pragma once

enum {
    KVBUS_PROTOCOL_VERSION = 1,
    KVBUS_TICKET_VERSION = 1,
    KVBUS_MAX_FRAME_BYTES = 16777216,
    KVBUS_MAX_ITEMS = 262144,
};

/* Attach socket: what is asked, and what the answer has */

/* min_protocol, max_protocol, engine_id, boot -> protocol, agent_id, agent_boot, role, engine_endpoint,
   peer_endpoint, events_endpoint, [server_key] */
#define KVBUS_OP_HELLO "hello"
/* segment_id, size_bytes, [direct], [words] -> sealed */
#define KVBUS_OP_SEGMENT "segment"
/* segment_id, device, handle, offset_bytes, size_bytes, [event] -> nothing */
#define KVBUS_OP_CUDA "cuda"

/* Engine socket, of all agents: what is asked, and what the answer has */

/* engine, [rank], [others], [access], [role], [instance], [republishes] -> nothing */
#define KVBUS_OP_REGISTER "register"
/* nothing -> memory */
#define KVBUS_OP_READY "ready"
/* nothing -> nothing */
#define KVBUS_OP_DETACH "detach"
/* nothing -> nothing */
#define KVBUS_OP_PING "ping"

/* Engine socket of a prefill agent: what is asked, and what the answer has */

/* request_id, num_tokens, tables, [sealed], [ttl_s], [audience], [prompt_digest], [transfer_id], [readers],
   [traceparent], [asked_s], [word], [offer_id], [secret], [left_s] -> offer_id, ticket, [ticket_blocks],
   [ttl_s] */
#define KVBUS_OP_OFFER "offer"
/* offer_id, num_tokens, [tables] -> nothing */
#define KVBUS_OP_EXTEND "extend"
/* offer_id -> nothing */
#define KVBUS_OP_SEAL "seal"
/* offer_id -> nothing */
#define KVBUS_OP_WITHDRAW "withdraw"
/* [ended] -> nothing */
#define KVBUS_OP_REPUBLISHED "republished"

/* Engine socket of a decode agent: what is asked, and what the answer has */

/* fetch_id, ticket, num_tokens, tables, [first_token], [timeout_s], [zero_tail], [chunk_tokens],
   [prompt_digest], [priority], [traceparent], [asked_s], [wanted_s], [token], [repeated], [at_most] ->
   fetch_id, request_id, outcome, stage, blocks_free, [code], [message], [num_bytes], [path], [stages_s],
   [whole_blocks], [num_tokens], [attempts] */
#define KVBUS_OP_FETCH "fetch"
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
/* The frame is over the limit. */
#define KVBUS_CODE_TOO_LARGE "too_large"
/* No version is spoken by both, or the ticket is of another version. */
#define KVBUS_CODE_UNSUPPORTED_VERSION "unsupported_version"
/* This socket does not know the operation. */
#define KVBUS_CODE_UNKNOWN_OP "unknown_op"
/* A field is missing, has a wrong type or is out of range, or the request makes no sense now. */
#define KVBUS_CODE_INVALID "invalid"
/* A bound is reached, or another reader has the lease. */
#define KVBUS_CODE_BUSY "busy"
/* The side is about to stop and takes nothing new. */
#define KVBUS_CODE_DRAINING "draining"
/* The message names a boot id, an engine or a lease epoch that is not the current one. */
#define KVBUS_CODE_STALE "stale"
/* The right to it was not shown: the ticket's secret, the lease's token, the access to the memory, or a key
   of the right role. */
#define KVBUS_CODE_FORBIDDEN "forbidden"
/* The ticket is of another prompt than the fetch, or names no prompt where tickets are signed. */
#define KVBUS_CODE_PROMPT_MISMATCH "prompt_mismatch"
/* It was not done in time. */
#define KVBUS_CODE_TIMEOUT "timeout"
/* The engine cancelled it. */
#define KVBUS_CODE_CANCELLED "cancelled"
/* The side is closing its sockets. */
#define KVBUS_CODE_CLOSED "closed"
/* A defect of the side that answers; its log says more. */
#define KVBUS_CODE_INTERNAL "internal"
/* A process is configured wrongly, or not for what was asked. */
#define KVBUS_CODE_CONFIG "config"
/* A description of memory, a block table or a box is impossible. */
#define KVBUS_CODE_GEOMETRY "geometry"
/* KV of one engine cannot be used by the other; the detail has `field`, `prefill` and `decode`. */
#define KVBUS_CODE_INCOMPATIBLE "incompatible"
/* Shared memory cannot be mapped, or was not passed. */
#define KVBUS_CODE_SEGMENT "segment"
/* The session has not said `hello` or `register`. */
#define KVBUS_CODE_NOT_REGISTERED "not_registered"
/* The agent has no engine of that name. */
#define KVBUS_CODE_ENGINE_UNKNOWN "engine_unknown"
/* Another live process has that engine id or rank, or the specs of two sessions differ. */
#define KVBUS_CODE_ENGINE_CONFLICT "engine_conflict"
/* Not all ranks of the engine are registered, or the agent has no engine that could make the offer. */
#define KVBUS_CODE_ENGINE_NOT_READY "engine_not_ready"
/* The engine's process is gone. */
#define KVBUS_CODE_ENGINE_LOST "engine_lost"
/* No such offer, or it ended so long ago that it is forgotten. */
#define KVBUS_CODE_OFFER_UNKNOWN "offer_unknown"
/* The request has a live offer. */
#define KVBUS_CODE_OFFER_EXISTS "offer_exists"
/* The offer is not sealed, so it cannot be taken, and has no states yet. */
#define KVBUS_CODE_OFFER_OPEN "offer_open"
/* The offer is sealed, so it cannot change. */
#define KVBUS_CODE_OFFER_SEALED "offer_sealed"
/* The offer was withdrawn. */
#define KVBUS_CODE_OFFER_WITHDRAWN "offer_withdrawn"
/* The offer was not read in time. */
#define KVBUS_CODE_OFFER_EXPIRED "offer_expired"
/* The offer was read and taken. */
#define KVBUS_CODE_OFFER_COMPLETED "offer_completed"
/* The lease, or that of a staging slot, ended before the bytes had been read. */
#define KVBUS_CODE_LEASE_EXPIRED "lease_expired"
/* No such fetch, or it ended so long ago that it is forgotten. */
#define KVBUS_CODE_FETCH_UNKNOWN "fetch_unknown"
/* The fetch id was used already. */
#define KVBUS_CODE_FETCH_EXISTS "fetch_exists"
/* The other agent cannot be reached. */
#define KVBUS_CODE_PEER_UNREACHABLE "peer_unreachable"
/* The other agent was lost until the deadline. */
#define KVBUS_CODE_PEER_LOST "peer_lost"
/* A READ or a copy failed; a fetch repeats it until its deadline. */
#define KVBUS_CODE_TRANSFER_FAILED "transfer_failed"
/* What was read has other bytes than the prefill engine: a layer, a head and tokens are named. */
#define KVBUS_CODE_DIGEST_MISMATCH "digest_mismatch"
