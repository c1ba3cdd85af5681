"""Weights that cannot lie in memory are refused before anything is loaded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from MaxText import decode, train
from MaxText.parallel import memory

ABSURD = ["model_name=wan-test", "init_random_weights=true", "override_model_config=true", "num_layers=1000000000"]


def weights(mesh, gib, spec=()):
  shape = (int(gib * 2**28),)
  return {"w": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))}


@pytest.mark.parametrize("count", [1, 4])
def test_a_device_has_its_part_of_the_hosts_memory(count, monkeypatch):
  monkeypatch.setattr(memory, "host_bytes", lambda: 16 * memory.GIB)
  mesh = Mesh(np.array(jax.devices()[:count]), ("fsdp",))
  most = 16 / count
  assert memory.device_bytes(weights(mesh, 3.0)) == 3 * memory.GIB
  memory.check_fits({"transformer": weights(mesh, most)}, mesh, "")
  memory.check_fits({"transformer": weights(mesh, 16, ["fsdp"])}, mesh, "")  # split, it fits on any number
  with pytest.raises(ValueError, match=rf"transformer {most:.1f}, VAE 0.5 GiB, .*has {most:.1f} GiB.*; buy more"):
    memory.check_fits({"transformer": weights(mesh, most), "VAE": weights(mesh, 0.5)}, mesh, "buy more")


def test_a_container_has_its_own_limit(tmp_path, monkeypatch):
  file = tmp_path / "memory.max"
  monkeypatch.setattr(memory, "_CGROUP", file)
  machine = memory.host_bytes()
  for text, expected in (("max", machine), (str(2**30), 2**30), (str(2**62), machine)):
    file.write_text(text + "\n")
    assert memory.host_bytes() == expected


def test_decode_and_train_refuse_a_model_that_memory_cannot_hold(tmp_path, capsys):
  out = [f"base_output_directory={tmp_path}", "run_name=r"]
  assert decode.main(["configs/video.yml", *ABSURD, "prompt=x", *out]) == 2
  assert "error: too large: transformer" in (error := capsys.readouterr().err) and "weight_dtype=bfloat16" in error
  assert train.main(["configs/train_video.yml", *ABSURD, "dataset_type=synthetic", *out]) == 2
  assert "error: too large: weights" in (error := capsys.readouterr().err) and "lora_rank=32" in error
  assert not list(tmp_path.iterdir())
