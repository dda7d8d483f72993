"""Tiles of the matrix product by (N, K), one table per kind of card, stored and never tuned at start.

A tile fixes the order in which a row's terms are added, so it may depend on the weights' shape and on the card, but
never on the number of rows. A table is `tuned/<card>.json`, {"N,K,element size": [rows, columns, depth, splits, warps,
stages]}; `tools/gpu_check.py --tune` writes it. None has been measured yet: without one the defaults below are used.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

TABLES = Path(__file__).parent / "tuned"


class Tile(NamedTuple):
    """Output rows and columns of a program, terms per product, parts that K is cut into, warps, pipeline stages."""

    rows: int
    columns: int
    depth: int
    splits: int
    warps: int
    stages: int


CANDIDATES = tuple(
    Tile(rows, columns, depth, splits, warps, stages)
    for rows, columns, depth, warps, stages in (
        (64, 32, 128, 4, 4),
        (64, 64, 64, 4, 4),
        (64, 128, 64, 4, 4),
        (128, 64, 64, 4, 3),
        (128, 128, 64, 8, 3),
        (128, 256, 64, 8, 3),
    )
    for splits in (1, 2, 4)
)
"""What `--tune` tries."""
INTERPRETED = Tile(64, 256, 128, 1, 4, 1)
"""For Triton's interpreter, whose time goes by the number of programs."""


def default_tile(n: int, element_size: int) -> Tile:
    """A guess: narrow weights in narrow tiles, so that a decode step has programs for all processors of a card."""
    depth = 128 // element_size
    return Tile(64, 32 if n < 8192 else 64, depth, 1, 4, 4)


def tile_for(n: int, k: int, element_size: int, card: str) -> Tile:
    """The tile for weights [n, k] on a card ("" is the interpreter)."""
    if not card:
        return INTERPRETED
    return load(card).get((n, k, element_size)) or default_tile(n, element_size)


def table_path(card: str) -> Path:
    return TABLES / f"{'_'.join(card.split())}.json"


@functools.cache
def load(card: str) -> dict[tuple[int, int, int], Tile]:
    """The card's table; empty when none is stored."""
    path = table_path(card)
    if not path.is_file():
        return {}
    table: dict[tuple[int, int, int], Tile] = {}
    for key, values in json.loads(path.read_text()).items():
        n, k, size = (int(part) for part in key.split(","))
        table[n, k, size] = Tile(*values)
    return table


def save(card: str, table: dict[tuple[int, int, int], Tile]) -> Path:
    path = table_path(card)
    path.parent.mkdir(exist_ok=True)
    rows = [f'  "{n},{k},{size}": {json.dumps(list(tile))}' for (n, k, size), tile in sorted(table.items())]
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    load.cache_clear()
    return path
