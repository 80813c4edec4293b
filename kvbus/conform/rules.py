"""What is checked: each rule with its name, where the protocol page has it, and what it says.

Names stay the same; anchors are headings of docs/protocol.md.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that an engine must do; ``anchor`` is a heading of docs/protocol.md."""

    name: str
    anchor: str
    text: str


ATTACH = (
    Rule("attach.framing", "attach-socket", "A message is its length and one msgpack map."),
    Rule("attach.first_byte", "attach-socket", "A descriptor comes on the first byte, alone."),
    Rule("attach.hello", "hello", "`hello` comes first, once, and speaks this version."),
    Rule("attach.boot", "boot-ids", "Each connection has a boot id of its own, never used again."),
    Rule("attach.messages", "attach-socket", "Messages have the fields and types of the page."),
    Rule("attach.size", "segment", "The file has the size that `segment` says."),
    Rule("attach.seals", "attach-socket", "The file is sealed against growing and shrinking."),
    Rule("attach.inheritance", "attach-socket", "No child process inherits the connection."),
)
FRAMES = (
    Rule("frames.one", "frames", "A message is one frame, without a delimiter."),
    Rule("frames.maps", "frames", "Maps have strings as keys, none twice; no extension types."),
    Rule("frames.envelope", "the-envelope", "A request has v, op, id, boot and body."),
    Rule("frames.boot", "boot-ids", "The boot id is that of a live attach connection."),
    Rule("frames.secret", "the-envelope", "A session has one secret, which nobody else has."),
    Rule("frames.body", "engine-socket", "The body has the fields and types of the page."),
)
REQUESTS = (
    Rule("requests.ids", "the-envelope", "Ids start at random and rise."),
    Rule("requests.same_frame", "requests-retries-replies", "A repeat is the same frame."),
    Rule("requests.repeats", "requests-retries-replies", "Repeats come at the told times."),
    Rule("requests.late_reply", "requests-retries-replies", "A late reply is taken, and once."),
    Rule("requests.order", "requests-retries-replies", "Replies may come in another order."),
    Rule("requests.unknown_field", "versions", "Unknown fields are ignored."),
    Rule("requests.unknown_code", "errors", "An unknown code is an error like others."),
    Rule("requests.busy", "error-codes", "After `busy` it is asked again, not at once."),
    Rule("requests.ping", "boot-ids", "A silent agent is pinged."),
)
NOTICES = (
    Rule("notices.once", "notices", "Each notice is delivered once, however often it comes."),
    Rule("notices.before_reply", "notices", "A notice is taken before the reply to its request."),
    Rule("notices.order", "notices", "Notices are delivered in the order of `seq`."),
    Rule("notices.ack", "notices", "Notices are acknowledged soon, unknown ones too."),
    Rule("notices.honest_ack", "ack", "Only what has arrived is acknowledged."),
)
REGISTERING = (
    Rule("register.sessions", "registering", "All ranks and one control session register."),
    Rule("register.same_engine", "register", "Every session states the same engine."),
    Rule("register.memory", "memory", "Regions lie in their segments, and do not overlap."),
)
ENDS = (
    Rule(
        "ends.silence", "requests-retries-replies", "A stopped agent that goes on is gone on with."
    ),
    Rule(
        "ends.hang_up",
        "when-the-attach-connection-ends",
        "After a lost connection it comes back with new boot ids.",
    ),
    Rule("ends.new_agent", "reconnecting", "It registers anew with an agent that was restarted."),
    Rule(
        "ends.told",
        "when-the-attach-connection-ends",
        "What a lost agent had is ended, not waited for.",
    ),
    Rule("ends.stop", "attach-socket", "It ends when it is told to, with exit status 0."),
)
PREFILL = (
    Rule("offer.tables", "block-tables", "An offer has the blocks of all of its tokens."),
    Rule("offer.numbers", "memory", "The KV lies where the regions say, before it is announced."),
    Rule("offer.extend", "extend", "`extend` has only new blocks, and none where none are new."),
    Rule("offer.sealed", "seal", "An open offer is sealed after its last tokens."),
    Rule("offer.unchanged", "offer", "Offered blocks stay as they are until `released`."),
    Rule("offer.reused", "released", "Blocks are used again after `released`."),
    Rule("offer.ticket", "ticket", "The ticket is passed on unchanged, unknown fields too."),
    Rule("offer.answered", "offer", "Every request is offered, or its refusal is told."),
)
DECODE = (
    Rule("fetch.answered", "fetch", "Every request is fetched, or its refusal is told."),
    Rule("fetch.tables", "block-tables", "A fetch has exactly the blocks of its positions."),
    Rule("fetch.tokens", "fetch", "A fetch names the tokens that are wanted."),
    Rule("fetch.id", "fetch", "A fetch id is used once."),
    Rule("fetch.ticket", "ticket", "The ticket arrives unchanged, unknown fields too."),
    Rule("fetch.numbers", "memory", "The KV is read where the regions say."),
    Rule("fetch.completed", "fetched", "KV is used after `completed`, and not before."),
    Rule("fetch.failed", "fetched", "A fetch that failed is told as failed, once."),
    Rule("fetch.cancel", "cancel", "A fetch that is given up is cancelled, and waited for."),
    Rule("fetch.blocks", "fetched", "Blocks are not used again before they are free."),
    Rule(
        "fetch.lost_blocks",
        "when-the-attach-connection-ends",
        "Blocks of a lost fetch wait until the agent's process has ended.",
    ),
    Rule("fetch.reused", "blocks_freed", "Blocks are used again once they are free."),
)
BOTH = (*ATTACH, *FRAMES, *REQUESTS, *NOTICES, *REGISTERING, *ENDS)
RULES = {rule.name: rule for rule in (*BOTH, *PREFILL, *DECODE)}
