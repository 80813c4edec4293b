"""vLLM's own offloading to host memory, as far as it runs on CPUs: all but its copies.

vLLM copies with CUDA or XPU alone. `OffloadingConnector` finds `Spec` by its name.
"""

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

Place = tuple[list[torch.Tensor], Any]
"""Tensors of blocks, and vLLM's names of some."""


class Copies(OffloadingWorker):
    """Copies whole blocks at once; a chunk of host memory is one block."""

    def __init__(self, caches: CanonicalKVCaches, num_chunks: int) -> None:
        self._caches = [one.tensor for one in caches.tensors]
        self._kept = [one.new_zeros((num_chunks, *one.shape[1:])) for one in self._caches]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, (self._caches, src_spec), (self._kept, dst_spec))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, (self._kept, src_spec), (self._caches, dst_spec))

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Return: nothing is left to do."""

    def _copy(self, job_id: int, source: Place, target: Place) -> bool:
        here, there = (torch.from_numpy(spec.block_ids).long() for _, spec in (source, target))
        for tensor, copied in zip(source[0], target[0], strict=True):
            copied[there] = tensor[here]
        self._done.append(TransferResult(job_id, success=True))
        return True


class Spec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return Copies(kv_caches, self.num_chunks)
