"""vLLM's own offloading to host memory, as far as it runs on CPUs: all but its copies.

vLLM copies with CUDA or XPU alone. `OffloadingConnector` finds `Spec` by its name.
"""

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

Place = tuple[list[torch.Tensor], Any]
"""Tensors of blocks, and vLLM's names of some."""


class Spec(CPUOffloadingSpec, OffloadingWorker):  # type: ignore[misc]
    """Is its own worker, which copies at once; a chunk of host memory is one block."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        self.caches = [one.tensor for one in kv_caches.tensors]
        self.kept = [one.new_zeros((self.num_chunks, *one.shape[1:])) for one in self.caches]
        self.done: list[TransferResult] = []
        return self

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, (self.caches, src_spec), (self.kept, dst_spec))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, (self.kept, src_spec), (self.caches, dst_spec))

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Return: nothing is left to do."""

    def _copy(self, job_id: int, source: Place, target: Place) -> bool:
        here, there = (torch.from_numpy(spec.block_ids).long() for _, spec in (source, target))
        for tensor, copied in zip(source[0], target[0], strict=True):
            copied[there] = tensor[here]
        self.done.append(TransferResult(job_id, success=True))
        return True
