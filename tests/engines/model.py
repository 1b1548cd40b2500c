"""A model small enough to start on any machine: Qwen3 with two layers, without weights, and a token for each byte."""

from __future__ import annotations

import json
from pathlib import Path

END = "<|end|>"

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "vocab_size": 257,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 256,
}


def symbols() -> list[str]:
    """How a byte-level tokenizer spells each byte: itself where that can be seen, else a letter above 255."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in seen else next(hidden)) for byte in range(256)]


def tokenizer() -> dict[str, object]:
    special = {"id": 256, "content": END, "special": True}
    special |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {symbol: token for token, symbol in enumerate(symbols())}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def write(folder: Path) -> Path:
    """Everything that an engine reads, except weights, which it makes up (``load_format`` dummy)."""
    files = {
        "config.json": CONFIG,
        "generation_config.json": {"eos_token_id": 256},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END},
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder
