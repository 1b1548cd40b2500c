"""Prints docs/failures.md: published failures of other engines, and the tests that show how graphprobe takes them.

python docs/failures.py > docs/failures.md

The rows are the docstrings of the tests: a test of a published failure ends its docstring with the number that the
failure has here and with the report, as in "(H05, vllm-project/vllm#43145)".
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

KINDS = {
    (1, 11): "Silent fallback",
    (12, 25): "Wrong output",
    (26, 33): "Failed captures",
    (34, 41): "Memory",
    (42, 46): "Speculative decoding",
    (47, 51): "Shapes and arguments",
    (52, 56): "Ranks, streams, threads",
    (57, 60): "Weights and adapters",
    (61, 74): "Metrics",
    (75, 80): "Decorators and modules",
    (81, 85): "Timing",
    (86, 88): "Start-up",
    (89, 91): "Choice of buckets",
}

LATER: dict[int, str] = {}
"""Failures that ask for a part that graphprobe does not have yet, and which."""

REPORT = re.compile(r"[\w.-]+/[\w.-]+#\d+|[\w-]+#\d+|www\.[\w./-]+")


def tests() -> list[tuple[str, str, str]]:
    """(file, test, docstring) of every test."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.append((str(path.relative_to(ROOT)), node.name, ast.get_docstring(node) or ""))
    return found


def covered() -> dict[int, list[tuple[str, str, str]]]:
    """The tests of each failure, by its number."""
    rows: dict[int, list[tuple[str, str, str]]] = defaultdict(list)
    for file, name, text in tests():
        for number in dict.fromkeys(re.findall(r"\bH(\d\d)\b", text)):
            rows[int(number)].append((file, name, text))
    return rows


def report(texts: list[str], number: int) -> str:
    """The report that docstrings name behind a number; the longest form of it."""
    found = [m for text in texts for m in re.findall(rf"H{number:02}\b[ ,(]*([^\s,)]+#\d+|www\.[\w./-]+)", text)]
    return max(found, key=len, default="")


def main() -> None:
    """Print the page."""
    rows = covered()
    print(HEAD)
    for (first, last), kind in KINDS.items():
        print(f"\n## {kind}\n\n| # | report | what the tests say |\n| --- | --- | --- |")
        for number in range(first, last + 1):
            if number in LATER:
                print(f"| H{number:02} | - | not built yet: {LATER[number]} |")
                continue
            cell = "<br>".join(
                f"[{re.sub('^test_', '', name).replace('_', ' ')}](../{file})" for file, name, _ in rows[number]
            )
            print(f"| H{number:02} | {report([t for _, _, t in rows[number]], number)} | {cell} |")


HEAD = """# Published failures

Ninety-one incidents of other engines with CUDA graphs, as small cases, and the tests that show what graphprobe does.
Made by `docs/failures.py` from the docstrings of the tests; [hazards.md](hazards.md) goes by hazard instead.
The numbers are the project's own; the reports are public issues and pages."""


if __name__ == "__main__":
    sys.exit(main())
