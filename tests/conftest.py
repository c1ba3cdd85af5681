"""Every test sees eight CPU devices; commands still make their mesh of one unless the test is marked `devices(n)`.

A suite that ran everything on eight fake devices would compute everything eight times.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax  # noqa: E402
import pytest  # noqa: E402

NUM_DEVICES = 8
jax.config.update("jax_num_cpu_devices", NUM_DEVICES)


def pytest_configure(config):
  config.addinivalue_line("markers", "devices(n): commands of this test make their mesh of n of the eight fake devices")


@pytest.fixture(autouse=True)
def mesh_devices(request, monkeypatch):
  """What `MaxText.parallel.mesh.devices()` returns: one device, or as many as the mark says."""
  from MaxText.parallel import mesh

  mark = request.node.get_closest_marker("devices")
  count = mark.args[0] if mark else 1
  monkeypatch.setattr(mesh, "devices", lambda: jax.devices()[:count])
