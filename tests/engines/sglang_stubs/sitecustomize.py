"""Makes SGLang run on a CPU: found on PYTHONPATH, so it is in each process of the engine, spawned ones included.

What the engine imports at its start and a small dense model never calls is made up here, if it is not installed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

import wrapt

MADE_UP = (
    "anthropic",
    "cuda",
    "cutlass",
    "decord",
    "gguf",
    "IPython",
    "openai_harmony",
    "quack",
    "sentencepiece",
    "sgl_kernel",
    "soundfile",
    "torchaudio",
    "torchvision",
    "triton",
    "tvm_ffi",
    "vllm",
    "xgrammar",
)


class Anything(type):
    """The type of what is made up: attributes are made up as well, a call with one function is a decorator."""

    def __getattr__(cls, name: str) -> Any:
        return made_up(name)

    def __or__(cls, other: object) -> Any:
        return cls

    __ror__ = __or__


def made_up(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    body = {"__init__": ignore, "__call__": decorate, "__class_getitem__": classmethod(same)}
    return Anything(name, (), body | {"__get_pydantic_core_schema__": classmethod(anything)})


def ignore(*args: object, **kwargs: object) -> None:
    """Takes whatever comes."""


def decorate(self: object, *args: object, **kwargs: object) -> object:
    return args[0] if len(args) == 1 and callable(args[0]) else self


def same(cls: object, item: object) -> object:
    return cls


def anything(cls: object, *_: object) -> dict[str, str]:
    """A field of such a type, in a request's schema, takes whatever comes."""
    return {"type": "any"}


class Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return made_up(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last: what is installed is taken."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in MADE_UP:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__, module.__version__ = [], "99"


def graphs_without_kernels(module: Any) -> None:
    """The engine's graphs of a CPU ask its attention for what only Intel's has; its plain one can do without."""
    attention = module.TorchNativeAttnBackend
    attention.init_cpu_graph_state = attention.init_forward_metadata_capture_cpu_graph = ignore
    attention.get_cpu_graph_seq_len_fill_value = one


def one(self: object) -> int:
    return 1


def nothing_to_compile(module: Any) -> None:
    """The compiler, which is off, has nothing to know of kernels that are not there."""
    module.register_fake_ops = module.set_torch_compile_config = ignore


sys.meta_path.append(Finder())
wrapt.register_post_import_hook(graphs_without_kernels, "sglang.srt.layers.attention.torch_native_backend")
wrapt.register_post_import_hook(nothing_to_compile, "sglang.srt.model_executor.cpu_graph_runner")
