"""A KV connector for vLLM: hidden states of finished prompts leave its cache as files of a spool.

vLLM's method `extract_hidden_states` keeps the outputs of chosen layers in a paged cache of their own,
token by token as chunks of prompts are read. When a prompt is through, the scheduler's half of this
connector holds its blocks back and names them to the workers' half, which copies the states out: from a
GPU on a stream of its own into pinned memory, while the next steps run, and the request is reported
once that has ended. On a CPU nothing is pinned. Written against vLLM 0.32.0.

Loaded by vLLM in an environment of its own: imports nothing but torch, vllm and dflash.spool.

Legend: N blocks of the cache · L layers · B tokens of a block · H hidden width · S tokens of a prompt.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from dflash import spool

LAYER = "cache_only_layers"  # as vLLM's ExtractHiddenStatesModel calls it


@dataclass
class Finished:
    """A prompt that was read to its end, and the blocks that hold its states, in order."""

    request_id: str
    document: dict[str, Any]  # index, sample_id
    ids: list[int]
    block_ids: list[int]


@dataclass
class Copy:
    """The states of a finished prompt on their way to the host."""

    prompt: Finished
    states_SLH: Tensor
    filled_S: Tensor  # whether a step has filled each token's slot
    ended: torch.cuda.Event | None  # None: they are there


@dataclass
class Handover(KVConnectorMetadata):
    """What the scheduler tells the workers with a step."""

    finished: list[Finished]
    idle: bool  # no token is computed in this step


class SpoolConnector(KVConnectorBase_V1, SupportsHMA):
    """Writes the states of every finished request to the spool named in the extra config.

    A request carries `index` and `sample_id` in `kv_transfer_params`.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.spool = Path(self._kv_transfer_config.get_from_extra_config("spool", None))
        self.group = _group(kv_cache_config)
        self.layer: str | None = None
        self.finished: list[Finished] = []
        self.cache_NLBH: Tensor | None = None  # only where this rank has it and is the one to write
        self.filled_NB = torch.empty(0)
        self.stream: torch.cuda.Stream | None = None  # of the copies, on a GPU
        self.copies: deque[Copy] = deque()
        self.writer = ThreadPoolExecutor(1)

    # --- in the scheduler -----------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return 0, False  # nothing is ever loaded

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """Hold the blocks back (True) until a worker names the request in `get_finished`."""
        ids = list(request.prompt_token_ids)
        self.finished.append(
            Finished(
                request.request_id, request.kv_transfer_params, ids, list(block_ids[self.group])
            )
        )
        return True, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def build_connector_meta(self, scheduler_output: Any) -> Handover:
        finished, self.finished = self.finished, []
        return Handover(finished, idle=scheduler_output.total_num_scheduled_tokens == 0)

    def get_finished_count(self) -> int:
        return 1  # one rank writes, so one notice a request is all that will come

    # --- in the workers -------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Find the cache of states; the last pipeline stage has it, once on each tensor rank.

        Raises ValueError when its blocks are not those that the scheduler counts in.
        """
        layers = [name for name in kv_caches if LAYER in name]
        if not layers or get_tensor_model_parallel_rank() != 0:
            return
        (self.layer,) = layers
        cache_NLBH = kv_caches[self.layer]
        blocks, _, block, _ = cache_NLBH.shape
        scheduled = self._kv_cache_config.kv_cache_groups[self.group].kv_cache_spec.block_size
        if block != scheduled:
            raise ValueError(f"blocks of {block} tokens in the cache, {scheduled} in the scheduler")
        self.cache_NLBH = cache_NLBH
        self.filled_NB = torch.zeros(blocks, block, dtype=torch.bool, device=cache_NLBH.device)
        if cache_NLBH.device.type == "cuda":
            self.stream = torch.cuda.Stream(cache_NLBH.device)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Note which slots a step filled."""
        if layer_name == self.layer:
            # Padding is -1 and goes to block 0, which no request gets.
            self.filled_NB.view(-1)[attn_metadata.slot_mapping.clamp_min(0)] = True

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, None]:
        """Start copying out the states of the requests that the scheduler named with this step, and name
        those whose states have come: only then may their blocks be used again.

        A step without tokens waits for them: it has nothing else to do, and vLLM before it looked for
        requests that are held back (Scheduler.has_finished_requests) takes no other after it.
        Raises RuntimeError when a slot was not filled since it was last read.
        """
        if self.cache_NLBH is None:
            return None, None
        told = self._get_connector_metadata()
        self.copies += map(self._copy, told.finished)
        if told.idle and self.stream is not None:
            self.stream.synchronize()
        done = set()
        while self.copies and (self.copies[0].ended is None or self.copies[0].ended.query()):
            copy = self.copies.popleft()
            if not copy.filled_S.all():
                raise RuntimeError(
                    f"sample {copy.prompt.document['sample_id']}: vLLM kept the states of "
                    f"{int(copy.filled_S.sum())} of {len(copy.filled_S)} tokens"
                )
            self.writer.submit(self._write, copy.prompt, copy.states_SLH)
            done.add(copy.prompt.request_id)
        return done or None, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def _copy(self, f: Finished) -> Copy:
        """Copy the states of one request out of the blocks it still owns, and mark those as read."""
        block, device = self.cache_NLBH.shape[2], self.cache_NLBH.device
        at_S = torch.arange(len(f.ids))
        slot_S = torch.tensor(f.block_ids)[at_S // block] * block + at_S % block
        if self.stream is None:
            states_SLH, filled_S = self._take(slot_S)
            return Copy(f, states_SLH, filled_S, None)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            taken = self._take(slot_S.pin_memory().to(device, non_blocking=True))
            host = [x.to("cpu", non_blocking=True) for x in taken]
        return Copy(f, *host, self.stream.record_event())

    def _take(self, slot_S: Tensor) -> tuple[Tensor, Tensor]:
        """States [S, L, H] of some slots, and whether each was filled since it was last taken."""
        block = self.cache_NLBH.shape[2]
        block_S, offset_S = slot_S // block, slot_S % block
        filled_S = self.filled_NB[block_S, offset_S]
        self.filled_NB.view(-1).index_fill_(0, slot_S, False)
        return self.cache_NLBH[block_S, :, offset_S], filled_S

    def _write(self, f: Finished, states_SLH: Tensor) -> None:
        """In the writer's thread, where a failure would go unnoticed: it ends the process group."""
        try:
            path = spool.place(self.spool, f.document["index"])
            spool.put(path, f.document["sample_id"], f.ids, states_SLH)
        except BaseException:
            traceback.print_exc()
            os.killpg(0, signal.SIGKILL)


def _group(kv_cache_config: Any) -> int:
    """Which group of cached layers holds the states; each has block tables of its own."""
    groups = [group.layer_names for group in kv_cache_config.kv_cache_groups]
    found = [i for i, names in enumerate(groups) if any(LAYER in name for name in names)]
    if not found and len(groups) == 1:
        return 0  # the first stage of a pipeline, and the scheduler with it, list their own layers only
    if len(found) != 1:
        raise ValueError(f"{len(found)} groups of vLLM's cache hold {LAYER}, expected one")
    return found[0]
