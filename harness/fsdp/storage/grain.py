"""The grain of a parameter: how many of its rows stay together on one rank. Plain values, no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

_BLOCK = re.compile(r"block\(\s*(\d+)\s*\)")


@dataclass(frozen=True)
class Grain:
    """What no rank boundary cuts.

    | text       | what stays on one rank                             | who needs it                                  |
    |------------|----------------------------------------------------|-----------------------------------------------|
    | `row`      | each row                                           | any optimizer that works element by element   |
    | `block(m)` | m rows, counted from the parameter's own first row | blockwise scales, optimizers with 8-bit state |
    | `whole`    | all rows: the parameter has one owner              | matrix optimizers, such as Muon               |

    A row is one index of dimension 0. The last block of a parameter may have fewer than m rows; it is a block too.

    Args:
        rows: rows that stay together, at least 1; None: all of them.

    Raises:
        ValueError: rows is below 1.
    """

    rows: int | None = 1

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"grain block({self.rows}): a block has at least 1 row; None means the whole parameter")

    @property
    def is_whole(self) -> bool:
        """Whether one rank owns all of the parameter."""
        return self.rows is None

    @classmethod
    def parse(cls, text: str) -> Grain:
        """Read what `str` of a grain wrote: "row", "block(128)" or "whole".

        Raises:
            ValueError: the text is none of these, or a block of fewer than 2 rows.
        """
        named = {"row": ROW, "whole": WHOLE}.get(text.strip())
        if named is not None:
            return named
        block = _BLOCK.fullmatch(text.strip())
        if block is None:
            raise ValueError(f"grain={text!r}: write row, block(m) with m rows kept together, as block(128), or whole")
        rows = int(block[1])
        if rows < 2:
            raise ValueError(f"grain={text!r}: a block has at least 2 rows; a block of one row is written row")
        return cls(rows)

    def __str__(self) -> str:
        if self.rows is None:
            return "whole"
        return "row" if self.rows == 1 else f"block({self.rows})"


ROW = Grain(1)
"""Each row stays together; the grain of a parameter that asks for none."""
WHOLE = Grain(None)
"""The whole parameter stays together, on the rank that owns it."""
