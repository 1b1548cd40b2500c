"""The calculator of ``graphprobe account``: what memory buys, and whether a larger batch is worth it."""

from __future__ import annotations

import json as jsons
from typing import Any

from graphprobe.buckets import as_size
from graphprobe.cli import values
from graphprobe.errors import ConfigError
from graphprobe.tools.memory import kv_bytes_per_token, mib, tokens
from graphprobe.tools.throughput import compare_steps, fills, load_line


def spelt(name: str) -> str:
    """A parameter as the option that it is."""
    return name if name.isupper() else "--" + name.replace("_", "-")


def per_token(cache: dict[str, int | None], dtype: str) -> float | None:
    """Bytes of KV cache per token; None where nothing of the model is given."""
    given = {name: value for name, value in cache.items() if value is not None}
    if not given:
        return None
    if len(given) < len(cache):
        missing = ", ".join(spelt(name) for name in cache if name not in given)
        raise ConfigError(f"the KV cache of a token is not known without {missing}", "all three are in config.json")
    return kv_bytes_per_token(**given, dtype=dtype)


def calculated(load: dict[str, Any], kv_token: float | None, capacity: int | None, json: bool) -> str:
    """The answers of the calculator, below each other."""
    answers = {**_worth(load), **_bought(load["mib"], kv_token, capacity)}
    if not answers:
        raise ConfigError("nothing to do: no TARGET, no --trace and nothing to calculate", "graphprobe account --help")
    told = {name: data for name, (data, _) in answers.items()}
    return jsons.dumps(told) if json else "\n".join(text for _, text in answers.values())


def _worth(load: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Whether a larger batch is worth it, and whether the load fills the KV cache."""
    before, after, concurrent, room = (load[name] for name in ("before", "after", "concurrent", "room"))
    for one, other in (("before", "after"), ("concurrent", "room")):
        if (load[one] is None) != (load[other] is None):
            raise ConfigError(f"--{one} and --{other} say something together only", "give both")
    if before is not None:
        found = compare_steps(_pair(before, "--before"), _pair(after, "--after"), concurrent=concurrent, room=room)
        return {"comparison": (found.as_dict(), str(found))}
    if concurrent is None:
        return {}
    data = {"concurrent": concurrent, "room": room, "fills": fills(concurrent, room)}
    return {"load": (data, load_line(concurrent, room))}


def _bought(much: float | None, kv_token: float | None, capacity: int | None) -> dict[str, tuple[Any, str]]:
    """What a token of KV cache takes, and how many of them some memory buys."""
    if kv_token is None:
        if much is not None or capacity is not None:
            raise ConfigError("how large a token of KV cache is was not said", "--layers, --kv-heads and --head-size")
        return {}
    data: dict[str, Any] = {"bytes_per_token": kv_token}
    lines = [f"a token of KV cache takes {kv_token:,.0f} bytes"]
    if much is not None:
        data["tokens"] = tokens(much * 2**20, kv_token)
        lines.append(f"{mib(much * 2**20)} hold {data['tokens']:,} tokens")
    if capacity is not None:
        data["kv_capacity"] = as_size(capacity, "--kv-capacity")
        lines.append(f"the {capacity:,} tokens that the engine reports take {mib(capacity * kv_token)}")
    return {"kv": (data, "\n".join(lines))}


def _pair(text: str, option: str) -> tuple[int, float]:
    found = values.times(text, option)
    if len(found) != 1:
        raise ConfigError(f"{option} is one batch and its step time, got {text!r}", "write 80:10ms")
    return next(iter(found.items()))
