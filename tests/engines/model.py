"""A model small enough for any machine: Qwen3 with two layers, random weights, and a token for each byte."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path

END = "<|end|>"

ONE = b"\x80\x3f"
"""1 as bfloat16."""

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


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """The weights by the names of the checkpoint; those of one dimension scale a norm."""
    yield "model.embed_tokens.weight", (257, 256)
    yield "model.norm.weight", (256,)
    for layer in ("model.layers.0", "model.layers.1"):
        yield f"{layer}.input_layernorm.weight", (256,)
        yield f"{layer}.post_attention_layernorm.weight", (256,)
        for name, rows in {"q": 256, "k": 128, "v": 128, "o": 256}.items():
            yield f"{layer}.self_attn.{name}_proj.weight", (rows, 256)
        for name in "qk":
            yield f"{layer}.self_attn.{name}_norm.weight", (64,)
        for name, shape in {"gate": (512, 256), "up": (512, 256), "down": (256, 512)}.items():
            yield f"{layer}.mlp.{name}_proj.weight", shape


def uniform(dice: random.Random, count: int) -> bytes:
    numbers = bytearray(dice.randbytes(2 * count))
    # The upper byte has the sign, which stays random, and all bits of the exponent but one.
    numbers[1::2] = bytes(byte & 0x80 | 0x3D for byte in numbers[1::2])
    return bytes(numbers)


def weights() -> bytes:
    """A safetensors file: the length of a table, the table, and numbers of bfloat16.

    Norms have ones; the rest is between 1/32 and 1/8, or the negative of that, so that an answer depends on each token
    before it. Those that an engine makes up itself are so small that it would not.
    """
    dice, table, data = random.Random(0), {}, b""
    for name, shape in shapes():
        numbers = ONE * shape[0] if len(shape) == 1 else uniform(dice, shape[0] * shape[1])
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(data), len(data) + len(numbers)]}
        data += numbers
    head = json.dumps(table).encode()
    return struct.pack("<Q", len(head)) + head + data


def write(folder: Path) -> Path:
    """Everything that an engine reads."""
    files = {
        "config.json": CONFIG,
        "generation_config.json": {"eos_token_id": 256},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END},
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(weights())
    return folder
