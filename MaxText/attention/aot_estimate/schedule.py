"""Reads libtpu's final instruction schedule: bundles, and the loops and predicated regions that its branches make.

In the dump every bundle is one line group "address [labels] : > > { op ;; op }"; a branch names a region, and a region's
start is marked in a comment. A backward branch closes a loop, a forward one jumps over a predicated region. Branches take
effect after four further bundles.
"""

import collections
import dataclasses
import pathlib
import re

DELAY = 5  # the branch's own bundle and its four delay slots

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|\d+)\s+(?:[A-Z][A-Z, ]*)?\s*:[\s>]*\{", re.M)
_COMMENT = re.compile(r"/\*.*?\*/", re.S)
_OP = re.compile(r"= ([a-z][\w.]*)")
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"= sbr\.\w+ (?:\(!?%\w+\) )?target = \$region(\d+)")
# Classes of operations that tell the parts of a kernel apart.
_CLASSES = {"matmul": "vmatmul", "exp": ("vexp2", "vpow2"), "reciprocal": "vrcp", "vst": "vst"}


@dataclasses.dataclass
class Region:
  """A loop body or a predicated stretch of code.

  Attributes:
    kind: "root", "loop" or "if".
    start, end: bundle indices, end exclusive.
    bundles: bundles of its own, those of nested regions excluded.
    ops: how many operations of each class its own bundles hold.
  """

  kind: str
  start: int
  end: int
  parent: "Region | None" = None
  children: list["Region"] = dataclasses.field(default_factory=list)
  bundles: int = 0
  ops: collections.Counter = dataclasses.field(default_factory=collections.Counter)

  def walk(self):
    yield self
    for child in self.children:
      yield from child.walk()


def read_schedule(path: pathlib.Path) -> Region:
  """The region tree of one dumped kernel.

  Raises:
    ValueError: the dump does not look like a schedule (another libtpu may write another format).
  """
  text = path.read_text(errors="replace")
  heads = list(_BUNDLE.finditer(text))
  if len(heads) < 10:
    raise ValueError(f"{path.name} holds {len(heads)} instruction bundles: not a schedule this reader knows")
  bodies = [text[a.end() : b.start()] for a, b in zip(heads, heads[1:], strict=False)] + [text[heads[-1].end() :]]
  starts = {}
  for i, body in enumerate(bodies):
    for region in _START.findall(body):
      starts.setdefault(region, i)
  spans = []
  for i, body in enumerate(bodies):
    for region in _BRANCH.findall(body):
      target = starts.get(region)
      if target is None:
        continue  # the end of the program
      after = min(i + DELAY, len(bodies))
      if target <= i:
        spans.append(Region("loop", target, after))
      elif target > after:
        spans.append(Region("if", after, target))
  root = _nest(spans, len(bodies))
  _count(root, [_COMMENT.sub("", body) for body in bodies])
  return root


def _nest(spans: list[Region], length: int) -> Region:
  spans.sort(key=lambda r: (r.start, -r.end, r.kind != "loop"))
  root = Region("root", 0, length)
  open_regions = [root]
  for span in spans:
    while span.start >= open_regions[-1].end:
      open_regions.pop()
    span.end = min(span.end, open_regions[-1].end)  # delay slots may reach past the enclosing region
    span.parent = open_regions[-1]
    span.parent.children.append(span)
    open_regions.append(span)
  return root


def _count(root: Region, bodies: list[str]) -> None:
  owner = [root] * len(bodies)
  for region in root.walk():  # parents before children, so the innermost region wins
    owner[region.start : region.end] = [region] * (region.end - region.start)
  for region, body in zip(owner, bodies, strict=True):
    region.bundles += 1
    for op in _OP.findall(body):
      for name, prefix in _CLASSES.items():
        if op.startswith(prefix):
          region.ops[name] += 1
