"""The child of the extract stage in which vLLM runs: token ids come in, states go to the spool.

    VLLM_PYTHON -m dflash.vllm_worker < lines

The first line is JSON with `engine` (arguments of vLLM's EngineArgs), `layers` (0-based decoder layers
whose outputs are wanted) and `spool` (a folder); then a line a document: `index`, `sample_id`, `ids`.
An empty file `ready` in the spool says that the model is loaded. The end of the input ends the child,
whatever it does: then the stage has all it wanted, or is gone.

Runs in an environment of its own: imports nothing but the standard library and vllm.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
from multiprocessing import active_children
from pathlib import Path
from typing import Any, TextIO

GRACE_S = 10.0  # for a step in progress to end
IDLE_S = 0.02


def engine_args(engine: dict[str, Any], layers: list[int], spool: str) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs for a prefill that keeps the outputs of these layers."""
    return {
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,  # states of a prefix are only there if it was computed
        "enable_chunked_prefill": True,
        "enforce_eager": True,  # prefill gains little from graphs, and each shard would capture them
        "async_scheduling": False,
        "disable_log_stats": True,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                # vLLM counts the embedding as 0, so layer i is i + 1.
                "hf_config": {"eagle_aux_hidden_state_layer_ids": [i + 1 for i in layers]}
            },
        },
        "kv_transfer_config": {
            "kv_connector": "SpoolConnector",
            "kv_connector_module_path": "dflash.vllm_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"spool": spool},
        },
        **engine,
    }


def receive(lines: TextIO, inbox: queue.Queue, spool: Path) -> None:
    """Put documents into the inbox, in a thread; at the end of the input None, then end everything."""
    for line in lines:
        inbox.put(json.loads(line))
    inbox.put(None)
    shutil.rmtree(spool, ignore_errors=True)  # the stage does so too, unless it was killed
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


def serve(engine: Any, inbox: queue.Queue) -> None:
    """Step the engine while documents come, until None does."""
    from vllm import SamplingParams

    workers = active_children()
    while True:
        try:
            document = inbox.get(timeout=0 if engine.has_unfinished_requests() else IDLE_S)
        except queue.Empty:
            # Also when idle: a finished request is handed to the connector with the next step.
            engine.step()
            if not all(worker.is_alive() for worker in workers):
                raise RuntimeError("a process of vLLM's ended") from None
            continue
        if document is None:
            return
        ids = document.pop("ids")
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            extra_args={"kv_transfer_params": document},
        )
        engine.add_request(document["sample_id"], {"prompt_token_ids": ids}, params)


def allow_pipeline() -> None:
    """Let vLLM's part that keeps the states run with a pipeline.

    Only the last stage has that part, and the models hand their layers' outputs on to there; yet vLLM 0.32
    asks whether it can be split as the target is, and would refuse.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.extract_hidden_states import ExtractHiddenStatesModel

    class Unsplit(ExtractHiddenStatesModel):
        supports_pp = True

        def make_empty_intermediate_tensors(self, *args: Any) -> None:
            raise NotImplementedError("only the last stage of a pipeline has this model")

        def forward(self, hidden_states: Any, intermediate_tensors: Any = None) -> None:
            super().forward(hidden_states)

    ModelRegistry.register_model("ExtractHiddenStatesModel", Unsplit)


def main() -> None:
    job = json.loads(sys.stdin.readline())
    spool = Path(job["spool"])
    inbox: queue.Queue = queue.Queue()
    threading.Thread(target=receive, args=(sys.stdin, inbox, spool), daemon=True).start()

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import EngineArgs, LLMEngine

    if job["engine"]["pipeline_parallel_size"] > 1:
        allow_pipeline()
    args = EngineArgs(**engine_args(job["engine"], job["layers"], job["spool"]))
    engine = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
    (spool / "ready").touch()
    serve(engine, inbox)


if __name__ == "__main__":
    main()
