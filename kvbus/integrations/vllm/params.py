"""Options of a user, ``kv_transfer_params`` of a router, and request ids.

scheduler: build_connector_meta ──StepResults──▶ worker: get_transfer_results
scheduler: update_connector_output ◀──StepDone── worker: build_connector_worker_meta
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from kvbus.engine import AgentRanks, PageName, prompt_digest
from kvbus.errors import ConfigError, GeometryError, ProtocolError, reason_of
from kvbus.geometry import EngineSpec
from kvbus.protocol.engine import AgentRole, Park
from kvbus.protocol.message import Readers, Secret
from kvbus.protocol.ticket import Ticket
from kvbus.protocol.tools import known_trace

if TYPE_CHECKING:
    from vllm.v1.request import Request

ASKS_TO_OFFER = "do_remote_decode"
ASKS_TO_FETCH = "do_remote_prefill"
TICKET = "ticket"
TRANSFER_ID = "transfer_id"
RENDEZVOUS = "rendezvous"
TRACEPARENT = "traceparent"

AttachSocket = Annotated[str, msgspec.Meta(min_length=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Endpoints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefill: AttachSocket
    decode: AttachSocket


class ConnectorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of ``kv_connector_extra_config``; see docs/vllm-reference.md."""

    endpoint: AttachSocket | Endpoints
    model_id: str = ""
    attach_timeout_s: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    fetch_timeout_s: Seconds | None = None
    offer_ttl_s: Seconds | None = None
    park: Park = Park.WHEN_FULL
    bidirectional_kv_xfer: bool = False
    decoder_kv_blocks_ttl: Seconds = 480.0
    decoder_kv_blocks_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    kv_recompute_threshold: Annotated[int, msgspec.Meta(ge=0)] = 64
    min_load_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def agents(self) -> tuple[tuple[Path, AgentRole | None], ...]:
        """The first offers, the last loads."""
        if isinstance(self.endpoint, str):
            return ((_path(self.endpoint), None),)
        return (
            (_path(self.endpoint.prefill), AgentRole.PREFILL),
            (_path(self.endpoint.decode), AgentRole.DECODE),
        )


def read_options(extra_config: Mapping[str, Any], kv_role: str = "kv_both") -> ConnectorOptions:
    try:
        options = msgspec.convert(dict(extra_config), ConnectorOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"kv_connector_extra_config: {reason_of(error)}; it needs 'endpoint', the path "
            "of the agent's attach socket, or one for 'prefill' and one for 'decode', and knows "
            + ", ".join(ConnectorOptions.__struct_fields__)
        ) from error
    paths = [path for path, _ in options.agents]
    if len(paths) == 1:
        _require(
            not options.bidirectional_kv_xfer,
            "bidirectional_kv_xfer needs both agents beside this vLLM: give endpoint as "
            '{"prefill": "…/attach.sock", "decode": "…/attach.sock"}',
        )
        return options
    _require(
        paths[0] != paths[1],
        f"endpoint: prefill and decode are both {paths[0]}, but an agent is of one kind: "
        "start a kvbus-prefill and a kvbus-decode, each with a runtime_dir of its own",
    )
    _require(
        kv_role == "kv_both",
        f"endpoint names both agents, but kv_role is {kv_role}: set it to kv_both",
    )
    return options


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"kv_connector_extra_config: {message}")


def require(condition: bool, field: str, message: str) -> None:
    """Refuse what kvbus does not hand off."""
    if not condition:
        raise GeometryError(f"vLLM cannot be served by kvbus: {message}", field=field)


def _path(endpoint: str) -> Path:
    return Path(endpoint.removeprefix("unix://"))


class HandoffParams(msgspec.Struct, frozen=True):
    """A ticket, and the tokens that its digests cover.

    Unless ``whole_blocks``, the first block of a window has a gap at its beginning.
    """

    ticket: dict[str, Any]
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    prompt_digest: str
    images: str = ""
    whole_blocks: bool = True
    adapter: str = ""

    def to_params(self, *, next_turn: bool = False) -> dict[str, Any]:
        asks = {ASKS_TO_FETCH: not next_turn, ASKS_TO_OFFER: next_turn}
        return {**asks, **msgspec.to_builtins(self)}


class OfferParams(msgspec.Struct, frozen=True):
    transfer_id: Secret | None = None
    readers: Readers = 1


def read_params(params: Mapping[str, Any]) -> HandoffParams:
    try:
        handoff = msgspec.convert(dict(params), HandoffParams)
    except msgspec.ValidationError as error:
        raise ProtocolError(
            f"kv_transfer_params: {reason_of(error)}; pass those of the engine's response "
            "on unchanged"
        ) from error
    Ticket.from_json(handoff.ticket)
    return handoff


def read_offer_params(params: Mapping[str, Any]) -> OfferParams:
    try:
        return msgspec.convert(dict(params), OfferParams)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"kv_transfer_params: {reason_of(error)}") from error


def read_trace(params: Mapping[str, Any], headers: Mapping[str, str] | None) -> str:
    """vLLM keeps headers only with ``--otlp-traces-endpoint``."""
    return known_trace((headers or {}).get(TRACEPARENT, ""), str(params.get(TRACEPARENT, "")))


MAX_ID_CHARACTERS = 200
"""Agents accept 256; routers and clients may send longer ids."""
_KEPT_AT_AN_END = 80


def agents_id(request_id: str) -> str:
    if len(request_id) <= MAX_ID_CHARACTERS:
        return request_id
    digest = blake2b(request_id.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{request_id[:_KEPT_AT_AN_END]}~{digest}~{request_id[-_KEPT_AT_AN_END:]}"


# For each prompt of a completion, vLLM makes a request `cmpl-NAME-INDEX-RANDOM`. If a prompt has
# several sequences, it makes `SEQUENCE_cmpl-NAME-INDEX-RANDOM` for each of them. A chat has one
# prompt.
_SEQUENCE = re.compile(r"\d+_(?P<prompt>.+)", re.DOTALL)
_LATER_PROMPT = re.compile(r"(\d+_)?cmpl-.*-[1-9]\d*-[0-9a-f]{8}", re.DOTALL)


def is_of_later_prompt(request_id: str) -> bool:
    """vLLM responds with the `kv_transfer_params` of the first prompt only."""
    return _LATER_PROMPT.fullmatch(request_id) is not None


def is_later_sequence(request_id: str) -> bool:
    return prompt_of_sequence(request_id) is not None and not request_id.startswith("0_")


def prompt_of_sequence(request_id: str) -> str | None:
    match = _SEQUENCE.fullmatch(request_id)
    return match["prompt"] if match is not None else None


def has_tokens(request: "Request") -> bool:
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def digest_of(request: "Request", num_tokens: int) -> str:
    """Hash tokens (prompt, then answer), LoRA and images.

    Slow for long prompts, and the scheduler waits: call once per request.
    """
    lora = request.lora_request
    conditions = [lora.lora_name if lora is not None else ""]
    return prompt_digest(
        request.all_token_ids[:num_tokens], [*conditions, *_images_in(request, num_tokens)]
    )


def images_of(request: "Request", num_tokens: int) -> str:
    identifiers = _images_in(request, num_tokens)
    return prompt_digest([], identifiers) if identifiers else ""


def _images_in(request: "Request", num_tokens: int) -> list[str]:
    return [one.identifier for one in request.mm_features if one.mm_position.offset < num_tokens]


ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""In vLLM's order."""
ADAPTER_SCALING = ("lora_alpha", "use_rslora", "use_dora")
"""Fields that change results and not the weights; others may name folders."""
NUM_SAMPLES, SAMPLE_BYTES = 16, 1 << 16


# A server may load new weights under the name of an adapter. Names do not tell the weights apart,
# and the folders of two servers may differ.
def adapter_of(request: "Request") -> str:
    """Return a digest of the LoRA adapter, or "" if its files are not on this machine."""
    if request.lora_request is None:
        return ""
    folder = Path(request.lora_request.lora_path).expanduser()
    try:
        for path in (folder / name for name in ADAPTER_FILES):
            if path.exists():
                config = (folder / "adapter_config.json").read_bytes()
                return _digest(path, config, path.stat().st_size, path.stat().st_mtime_ns)
    except (OSError, ValueError):
        pass
    return ""


# A file may have gigabytes, and the scheduler waits. Training changes weights everywhere, so some
# samples tell two files apart.
@lru_cache(maxsize=1024)
def _digest(path: Path, config: bytes, size_bytes: int, changed_ns: int) -> str:  # noqa: ARG001 - another file then
    fields = msgspec.json.decode(config, type=dict[str, Any])
    scaling = [fields.get(name) for name in ADAPTER_SCALING]
    digest = blake2b(msgspec.json.encode([size_bytes, scaling]), digest_size=16)
    with path.open("rb") as file:
        for sample in range(NUM_SAMPLES):
            file.seek(sample * size_bytes // NUM_SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


class StepResults(NamedTuple):
    """Requests with a failed load, and with a failed load that is over.

    Workers record ``number`` behind the step. They report the end of ``step``, unless it is 0.
    """

    failed: tuple[str, ...] = ()
    received: tuple[str, ...] = ()
    step: int = 0
    number: int = 0


NOTHING = StepResults()


@dataclass(frozen=True, slots=True)
class StepDone:
    step: int

    def aggregate(self, other: "StepDone") -> "StepDone":
        return StepDone(min(self.step, other.step))


class GroupSource(NamedTuple):
    """The block table of vLLM that lists a group's blocks.

    Attention kernels may split each of its blocks into ``num_kernel_blocks``.
    """

    transfer_group: int
    num_kernel_blocks: int = 1


class Description(NamedTuple):
    """``sources`` has an item for each group of ``engine``."""

    engine: EngineSpec
    sources: tuple[GroupSource, ...]


class WorkerPlaces(NamedTuple):
    """Agents in the options' order. An ``endpoint`` is empty until an agent attaches."""

    places: tuple[AgentRanks, ...]
    described: Description
    pages: tuple[PageName, ...] = ()


def ranks_elsewhere(workers: Sequence[AgentRanks]) -> list[AgentRanks]:
    """Return the ranks with another agent than the first, merged by agent."""
    home = workers[0].endpoint if workers else ""
    found: dict[str, AgentRanks] = {}
    for worker in workers if home else ():
        if worker.endpoint not in ("", home):
            before = found.get(worker.endpoint)
            ranks = (*(before.ranks if before else ()), *worker.ranks)
            found[worker.endpoint] = msgspec.structs.replace(before or worker, ranks=ranks)
    return list(found.values())
