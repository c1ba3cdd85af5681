"""Ahead-of-time estimates of the attention kernels: libtpu compiles for a TPU topology on any machine, and the final
instruction schedule it dumps says how many cycles each part of the kernel takes (one bundle is one cycle).

  case.py      what to compile: kernel, shape, tiles, topology
  schedule.py  the dumped bundles as a tree of loops and predicated regions
  compile.py   the child process that compiles (libtpu reads its flags before jax starts)
  parts.py     which region is which part of the kernel, and how often it runs
  estimate.py  bundles x executions / clock
  beside.py    the work beside the kernel: routing and permutations
  progress.py  lines on screen while compiling
  search.py    tiles that fit vector memory, ranked by a model

What an estimate does not see: waits for HBM, bank conflicts, instruction fetch, power. Numbers from here are always
labelled "AOT estimate".
"""
