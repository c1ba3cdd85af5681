"""What a compiled program sends between devices: its collectives, read from the text of the optimised HLO.

An instruction in a loop body or a branch stands once in the text, however often it runs: counts here are of instructions.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re

KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%?(\S+) = (.*?) ({'|'.join(KINDS)})(-start)?\(", re.MULTILINE)
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective instruction.

  Attributes:
    kind: one of KINDS.
    shapes: (dtype, dimensions) of its results on one device.
    op_name: the path of named scopes it was traced in, as far as the compiler kept it.
  """

  kind: str
  shapes: tuple[tuple[str, tuple[int, ...]], ...]
  op_name: str

  @property
  def elements(self) -> int:
    return sum(math.prod(dims) for _, dims in self.shapes)

  def __str__(self):
    return f"{self.kind} {' '.join(f'{dtype}{list(dims)}' for dtype, dims in self.shapes)} ({self.op_name})"


def collectives(text: str) -> list[Collective]:
  """All collectives in `compiled.as_text()`."""
  found = []
  for match in _INSTRUCTION.finditer(text):
    shapes = [(dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in _SHAPE.findall(match[2])]
    if match[4]:  # An asynchronous start returns its operands too; the result of a gather is the larger.
      shapes = [max(shapes, key=lambda shape: math.prod(shape[1]))]
    line = text[match.start() : text.find("\n", match.end())]
    op_name = _OP_NAME.search(line)
    found.append(Collective(match[3], tuple(shapes), op_name[1] if op_name else ""))
  return found


def count(found: list[Collective]) -> dict[str, int]:
  """Instructions of each kind."""
  return dict(collections.Counter(c.kind for c in found))


def token_gathers(found: list[Collective], num_tokens: int, min_elements: int) -> list[Collective]:
  """Collectives that put whole sequences on a device other than by exchanging them for heads.

  Such a result holds all tokens, so its size is a multiple of num_tokens, and every head of a sample, so it has at least
  min_elements (tokens × heads × head dim of a device's tensor share). All-to-alls keep the size and are what Ulysses is
  for. num_tokens must not divide the size of a weight, or a gathered weight looks the same.
  """
  return [c for c in found if c.kind != "all-to-all" and c.elements >= min_elements and c.elements % num_tokens == 0]
