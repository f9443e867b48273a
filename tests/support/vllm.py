"""Stand-ins for what the KV connector uses of vLLM, and both its halves on one fake cache."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

BLOCK, LAYERS = 4, 3
CACHE = "cache_only_layers.4"


class FakeBase:
    """What the connector uses of vLLM's base class."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self.metadata = None

    def _get_connector_metadata(self):
        return self.metadata


class Connector:
    """Both halves of the connector on one fake cache, and the states that went into that."""

    def __init__(
        self, module: ModuleType, folder: Path, groups: list[list[str]], device: str = "cpu"
    ):
        layouts = [
            SimpleNamespace(layer_names=g, kv_cache_spec=SimpleNamespace(block_size=BLOCK))
            for g in groups
        ]
        options = SimpleNamespace(get_from_extra_config=lambda key, _: {"spool": str(folder)}[key])
        self.args = (
            SimpleNamespace(kv_transfer_config=options),
            None,
            SimpleNamespace(kv_cache_groups=layouts),
        )
        self.scheduler, self.worker = (module.SpoolConnector(*self.args) for _ in range(2))
        self.cache = torch.full((12, LAYERS, BLOCK, 8), 7.0, device=device)
        self.folder = folder

    def fill(self, name: str, blocks: list[int], start: int, states: Tensor) -> None:
        """One chunk of a prompt: its states go where the block table says, as vLLM does it."""
        at = torch.arange(start, start + len(states))
        slots = (torch.tensor(blocks)[at // BLOCK] * BLOCK + at % BLOCK).to(self.cache.device)
        self.cache[slots // BLOCK, :, slots % BLOCK] = states.to(self.cache.device)
        padded = torch.cat([slots, slots.new_tensor([-1, -1])])
        self.worker.save_kv_layer(name, self.cache, SimpleNamespace(slot_mapping=padded))

    def finish(
        self, index: int, ids: list[int], tables: tuple[list[int], ...], tokens: int = 4
    ) -> tuple[bool, set | None]:
        """The request ends; the next step's metadata goes to the worker."""
        request = SimpleNamespace(
            request_id=f"r{index}-x",
            prompt_token_ids=ids,
            kv_transfer_params={"index": index, "sample_id": f"{index:016x}"},
        )
        held, _ = self.scheduler.request_finished_all_groups(request, tables)
        return held, self.step(tokens)

    def step(self, tokens: int = 4) -> set | None:
        """One more step of the engine, over so many tokens: who is named as finished, all of them written."""
        scheduled = SimpleNamespace(total_num_scheduled_tokens=tokens)
        self.worker.metadata = self.scheduler.build_connector_meta(scheduled)
        done, _ = self.worker.get_finished(set())
        self.worker.writer.submit(lambda: None).result()  # its one thread has written
        return done


@contextmanager
def connector_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """dflash.vllm_connector, imported over stand-ins."""
    base, state = ModuleType("base"), ModuleType("state")
    base.KVConnectorBase_V1, base.KVConnectorMetadata = FakeBase, object
    base.SupportsHMA = type("SupportsHMA", (), {})
    state.get_tensor_model_parallel_rank = lambda: 0
    names = ["vllm", "vllm.distributed", "vllm.distributed.kv_transfer"]
    names += [f"{names[-1]}.kv_connector", f"{names[-1]}.kv_connector.v1"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, f"{names[-1]}.base", base)
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    monkeypatch.delitem(sys.modules, "dflash.vllm_connector", raising=False)
    yield importlib.import_module("dflash.vllm_connector")
    sys.modules.pop("dflash.vllm_connector", None)
