"""MaxText-style training and inference of video diffusion transformers, with Sparse VideoGen attention."""

import glob
import importlib.metadata
import os

# libtpu is installed on machines without a TPU too, because it compiles ahead of time there. Without these settings it
# asks a metadata server that does not exist and prints a page of warnings before JAX falls back to the CPU.
if not glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*"):
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
  if not glob.glob("/dev/nvidia[0-9]*"):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

# On CPUs this JAX hands matrix products and reductions to a library (YNNPACK) that is slow at attention's tiles and at
# sums over tokens: without it a block's forward and backward take 0.8 times as long (compare_block_with_torch.py in
# end_to_end). The flag is set for the version it was tried with: XLA ends the process over one that it does not know.
_FLAG = "xla_cpu_experimental_ynn_fusion_type"
_flags = os.environ.get("XLA_FLAGS", "")
if importlib.metadata.version("jaxlib") == "0.10.2" and _FLAG not in _flags:
  os.environ["XLA_FLAGS"] = f"{_flags} --{_FLAG}=".strip()
