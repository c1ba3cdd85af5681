"""decode dry_run=true compile_topology=…: the denoising steps are compiled for a TPU topology, and nothing runs."""

import jax
import pytest

from MaxText import decode
from MaxText.parallel import topology

SMALL = ["configs/video.yml", "model_name=wan-test", "init_random_weights=true", "prompt=x", "dry_run=true",
         "attention=svg", "svg_density=0.5", "num_frames=5"]  # fmt: skip


def test_dry_run_compiles_one_program_a_kind_of_step(tmp_path, monkeypatch, capsys):
  """On the devices here in a topology's place: every kind of step once, with the bytes that it holds."""
  monkeypatch.setattr(topology, "topology_devices", lambda name: jax.devices()[:1])
  assert decode.main([*SMALL, "compile_topology=v6e:2x4", "height=64", "width=64",
                      f"base_output_directory={tmp_path}"]) == 0
  lines = [line for line in capsys.readouterr().out.splitlines() if "compiled for v6e:2x4" in line]
  assert len(lines) == 2 and "(dense)" in lines[0] and "(density 0.5)" in lines[1]
  assert all("not run" in line and "peak memory a device" in line and "kernels: none" in line for line in lines)
  assert not list(tmp_path.iterdir())


def test_topologies_are_refused_clearly(tmp_path, capsys):
  assert decode.main([*SMALL[:4], "compile_topology=v6e:2x4", f"base_output_directory={tmp_path}"]) == 2
  assert "add dry_run=true" in capsys.readouterr().err


@pytest.mark.slow
def test_small_model_compiles_for_v6e_with_its_kernels(tmp_path, capsys):
  pytest.importorskip("libtpu")
  mesh = ["compile_topology=v6e:2x4", "ici_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_context_parallelism=2",
          "context_parallel_strategy=ulysses", "height=256", "width=256"]  # fmt: skip
  assert decode.main([*SMALL, *mesh, f"base_output_directory={tmp_path}"]) == 0
  lines = [line for line in capsys.readouterr().out.splitlines() if "compiled for" in line]
  assert "dense_attention" in lines[0] and "svg_route" in lines[1] and "svg_aligned_attention" in lines[1]
