"""Compiling for a TPU topology without a TPU: its devices, and the compiler's account of a program. Nothing runs."""

from __future__ import annotations

import dataclasses
import os
import re

_PALLAS = re.compile(r'%([\w.-]+?)(?:\.\d+)* = .*custom_call_target="tpu_custom_call"')


@dataclasses.dataclass(frozen=True)
class Account:
  """What the compiler says of a program. Bytes are those of one device.

  Attributes:
    arguments: what the program is given. temporary: what it makes and drops on its way.
    peak: the most that is alive at once, arguments and results included.
    kernels: names of the Pallas kernels inside.
    text: the optimised HLO, for `parallel.hlo`.
  """

  arguments: int
  temporary: int
  peak: int
  kernels: tuple[str, ...]
  text: str = dataclasses.field(repr=False)


def topology_devices(topology: str) -> list:
  """Devices to compile for, such as those of 'v6e:2x4'.

  Raises:
    ValueError: libtpu is missing, or does not know the topology.
  """
  from jax.experimental import topologies

  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # compiling needs no chip, so nobody is locked out
  try:
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
  except Exception as error:  # libtpu raises whatever it likes
    raise ValueError(f"compile_topology={topology}: libtpu (pip install libtpu) cannot compile for it: "
                     f"{str(error).splitlines()[0][:200]}") from error


def account(program) -> Account:
  """The account of a compiled program, `jax.jit(…).lower(…).compile()`."""
  memory, text = program.memory_analysis(), program.as_text()
  held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
  return Account(
    arguments=memory.argument_size_in_bytes,
    temporary=memory.temp_size_in_bytes,
    peak=max(held + memory.temp_size_in_bytes, memory.peak_memory_in_bytes),
    kernels=tuple(sorted(set(_PALLAS.findall(text)))),
    text=text,
  )
