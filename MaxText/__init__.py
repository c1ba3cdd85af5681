"""MaxText-style training and inference of video diffusion transformers, with Sparse VideoGen attention."""

import glob
import os

# libtpu is installed on machines without a TPU too, because it compiles ahead of time there. Without these settings it
# asks a metadata server that does not exist and prints a page of warnings before JAX falls back to the CPU.
if not glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*"):
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
  if not glob.glob("/dev/nvidia[0-9]*"):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
