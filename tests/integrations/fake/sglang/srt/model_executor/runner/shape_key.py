from dataclasses import dataclass


@dataclass(frozen=True)
class ShapeKey:
    size: int
