"""Worker memory: measures where each layer puts K and V in the KV cache, and shares the cache.

States have their own tensors, which need no measurement.

A layer writes marks into scratch blocks of the same strides. Shapes: cache [block, ...]; rows
[token, head, dim].
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.kv_cache_interface import MambaSpec

from kvbus.engine import RankMemory, describe_tensors
from kvbus.errors import GeometryError
from kvbus.geometry import GroupSpec, KvPart
from kvbus.integrations.vllm.describe import caches_of, layer_number
from kvbus.integrations.vllm.params import Description
from kvbus.integrations.vllm.states import state_views

NUM_BLOCKS = 3
MAX_SCRATCH_BYTES = 1 << 30

Rows = Mapping[str, torch.Tensor]
Layout = tuple[int, list[int]]
"""Offset of a part's first element, and the stride of each axis, in elements."""


def share_rank(
    described: Description,
    rank: int,
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
) -> RankMemory:
    """Share ``kv_caches``; raise `GeometryError` before anything moves, or `SegmentError`.

    Layers that use another's cache are in no group. On a CPU, the tensors move, in place, and need
    twice their memory meanwhile; no request may run.
    """
    modules = vllm_config.compilation_config.static_forward_context
    views: dict[tuple[int, str], torch.Tensor] = {}
    pairs = [*zip(described.engine.groups, described.sources, strict=True)]
    for at, theirs in enumerate(kv_cache_config.transfer_groups):
        for name, spec in caches_of(theirs).items():
            number, cache = layer_number(name, vllm_config), kv_caches[name]
            if isinstance(spec, MambaSpec):
                found = state_views(spec, modules[name].kv_cache, vllm_config)
            else:
                groups = [
                    group
                    for group, source in pairs
                    if source.transfer_group == at and number in group.layers
                ]
                probe = LayerProbe(
                    name,
                    modules[name],
                    cache,
                    groups=groups,
                    num_heads=spec.num_kv_heads,
                    dtype=vllm_config.model_config.dtype,
                )
                found = probe.views()
            views |= {(number, part): view for part, view in found.items()}
    axes = {
        group.name: "block head dim" if group.state else "block token head dim"
        for group in described.engine.groups
    }
    return describe_tensors(views, axes, engine=described.engine, rank=rank)


class LayerProbe:
    """``groups`` have the layer's parts; ``dtype`` is that of the model's rows.

    ``num_heads`` counts this rank's heads.
    """

    def __init__(
        self,
        name: str,
        layer: Any,
        cache: torch.Tensor,
        *,
        groups: Sequence[GroupSpec],
        num_heads: int,
        dtype: torch.dtype,
    ) -> None:
        self._name, self._layer, self._dtype = name, layer, dtype
        self._cache, self._num_heads = cache, num_heads
        self._block_size, self._cache_dtype = groups[0].block_size, groups[0].dtype
        self._head_dims = {part: group.head_dim for group in groups for part in group.parts}
        self._scratch = self._scratch_like(cache)

    @torch.no_grad()
    def views(self) -> dict[str, torch.Tensor]:
        """Return each part of the cache as [block, token, head, dim]."""
        with _unscaled(self._layer):
            layouts = {part: self._measure(part) for part in self._head_dims}
            self._check(layouts)
        return {part: self._view(self._cache, part, one) for part, one in layouts.items()}

    def _measure(self, part: str) -> Layout:
        start = self._locate(part, (0, 0, 0, 0))
        strides = [
            self._locate(part, [int(axis == one) for one in range(4)]) - start if size > 1 else 0
            for axis, size in enumerate((NUM_BLOCKS, *self._sizes(part)))
        ]
        if min(strides) < 0:
            raise self._refusal(f"'{part}' runs backwards in memory")
        return start, strides

    def _check(self, layouts: Mapping[str, Layout]) -> None:
        rows = {part: self._random_rows(part, seed) for seed, part in enumerate(layouts)}
        num_slots = NUM_BLOCKS * self._block_size
        slots = torch.randperm(num_slots, generator=_generator(len(rows)))
        self._scratch.zero_()
        self._write({part: whole[slots] for part, whole in rows.items()}, slots)
        views = {part: self._view(self._scratch, part, one) for part, one in layouts.items()}
        for part, view in views.items():
            wanted = rows[part].to(getattr(torch, self._cache_dtype)).view(view.shape)
            if not torch.equal(view.cpu().view(wanted.dtype).float(), wanted.float()):
                raise self._refusal(f"no strides describe where '{part}' is")
        for view in views.values():
            view.zero_()
        if bool(_bits(self._scratch).any()):
            raise self._refusal("it holds more than the KV itself, such as scales")

    def _locate(self, part: str, at: Sequence[int]) -> int:
        block, token, head, dim = at
        rows = {
            one: torch.zeros((1, self._num_heads, head_dim), dtype=self._dtype)
            for one, head_dim in self._head_dims.items()
        }
        rows[part][0, head, dim] = 1
        self._scratch.zero_()
        self._write(rows, torch.tensor([block * self._block_size + token]))
        found = _bits(self._scratch).nonzero()
        if len(found) != 1:
            raise self._refusal(f"one number of '{part}' is written to {len(found)} places")
        steps = zip(found[0].tolist(), self._scratch.stride(), strict=True)
        return sum(number * stride for number, stride in steps)

    def _write(self, rows: Rows, slots: torch.Tensor) -> None:
        device, impl = self._scratch.device, self._layer.impl
        slots = slots.to(device=device, dtype=torch.int64)
        rows = {part: row.to(device) for part, row in rows.items()}
        if not hasattr(impl, "do_kv_cache_update"):
            raise self._refusal(f"{type(impl).__name__} writes its cache only while it attends")
        try:
            if KvPart.LATENT in rows:
                self._write_latent(rows[KvPart.LATENT], slots)
            else:
                key, value = rows[KvPart.KEY], rows[KvPart.VALUE]
                impl.do_kv_cache_update(self._layer, key, value, self._scratch, slots)
        except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError) as error:
            raise self._refusal(f"{type(impl).__name__} does not write it: {error}") from error

    def _write_latent(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Rows of MLA have the compressed KV, then the rotated part of K."""
        rank = self._layer.kv_lora_rank
        self._layer.impl.do_kv_cache_update(
            rows[:, 0, :rank].contiguous(),
            rows[:, :, rank:].contiguous(),
            self._scratch.squeeze(1),
            slots,
            self._layer.kv_cache_dtype,
            self._layer._k_scale,
        )

    def _scratch_like(self, cache: torch.Tensor) -> torch.Tensor:
        shape = (NUM_BLOCKS, *cache.shape[1:])
        steps = zip(shape, cache.stride(), strict=True)
        num_elements = 1 + sum((size - 1) * stride for size, stride in steps)
        if num_elements * cache.element_size() > MAX_SCRATCH_BYTES:
            raise self._refusal(f"{NUM_BLOCKS} blocks of it span {num_elements} elements")
        flat = torch.zeros(num_elements, dtype=cache.dtype, device=cache.device)
        return flat.as_strided(shape, cache.stride())

    def _view(self, cache: torch.Tensor, part: str, layout: Layout) -> torch.Tensor:
        shape, (offset, strides) = (cache.shape[0], *self._sizes(part)), layout
        try:
            return cache.as_strided(shape, strides, cache.storage_offset() + offset)
        except RuntimeError as error:
            raise self._refusal(f"the strides of '{part}' leave the cache") from error

    def _random_rows(self, part: str, seed: int) -> torch.Tensor:
        """Return small non-zero integers, exact in every KV dtype."""
        shape, stop = (NUM_BLOCKS * self._block_size, *self._sizes(part)[1:]), 128
        if self._cache.element_size() == 1:
            stop = 9  # the largest that float8_e5m2 has, with all below it
        return torch.randint(1, stop, shape, generator=_generator(seed)).to(self._dtype)

    def _sizes(self, part: str) -> tuple[int, int, int]:
        """Return the sizes of the axes token, head and dim."""
        return self._block_size, self._num_heads, self._head_dims[part]

    def _refusal(self, what: str) -> GeometryError:
        return GeometryError(
            f"vLLM cannot be served by kvbus: the KV cache of layer '{self._name}' cannot be "
            f"described: {what}. On a CPU with AMX, bfloat16 is laid out in tiles: start vLLM "
            "with --dtype float16 or float32. Otherwise choose another attention backend",
            field="layout",
            layer=self._name,
        )


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return one-byte floats as integers, as torch compares no float8 with zero."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


@contextmanager
def _unscaled(layer: Any) -> Iterator[None]:
    """Set the scales of a quantised cache to 1 meanwhile."""
    names = ("_k_scale", "_v_scale", "_k_scale_float", "_v_scale_float")
    scales = {name: getattr(layer, name) for name in names if hasattr(layer, name)}
    for name, scale in scales.items():
        setattr(layer, name, torch.ones_like(scale) if torch.is_tensor(scale) else 1.0)
    try:
        yield
    finally:
        for name, scale in scales.items():
            setattr(layer, name, scale)
