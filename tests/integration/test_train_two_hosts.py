"""Two processes of `python -m MaxText.train` on this machine, joined by jax.distributed, against one."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from MaxText import pyconfig, train
from MaxText.input_pipeline import grain_source, records
from MaxText.input_pipeline.records import Bucket, Dataset
from MaxText.parallel import mesh as mesh_lib
from MaxText.parallel import sharding

REPOSITORY = pathlib.Path(__file__).parent.parent.parent
SHAPE, COUNT, BATCH = (2, 4, 4, 16), 12, 4  # three steps see every clip once
# Hosts share the batch alone. With the weights split too (fsdp), XLA's all-gathers over gloo overtook one another (jaxlib
# 0.10.2, "Received data size doesn't match expected size"); TPUs have collectives of their own.
SIZE = ["height=32", "width=32", "num_frames=5", f"global_batch_size={BATCH}", "dataset_type=latents",
        "ici_fsdp_parallelism=1", "ici_data_parallelism=-1"]


def write_shards(path, damaged=()):
  """COUNT random clips; those whose numbers are `damaged` hold NaN."""
  path.mkdir(parents=True)
  random, name = np.random.default_rng(0), records.shard_name("train", "32x32", 0, 1)
  writer = records.ShardWriter(path / name)
  for number in range(COUNT):
    latents, text = random.standard_normal(SHAPE, np.float32), random.standard_normal((7, 64), np.float32)
    latents = np.full_like(latents, np.nan) if number in damaged else latents
    writer.write(records.pack({"latents": latents, "text": text}, "float32"))
  writer.finish([])
  records.replace_file(path / records.EMPTY_TEXT, records.pack({"text": np.ones((1, 64), np.float32)}, "float32"))
  buckets = (Bucket(32, 32, SHAPE, {"train": ((name, COUNT),)}),)
  Dataset(path, 5, 16.0, 64, "float32", {"vae": "v", "text_encoder": "t"}, buckets).write()
  return path


def numbers_of_rows(shards):
  """Which clip is in which row of which batch: int [batches, BATCH]."""
  clips = {float(records.unpack(record)["latents"][0, 0, 0, 0]): n for n, record in enumerate(raw(shards))}
  config = pyconfig.initialize(["configs/train_video.yml", f"dataset_path={shards}", *SIZE], "train", {})
  placement = sharding.Placement(mesh_lib.make_mesh(config), sharding.parse_rules(config.logical_axis_rules))
  iterator = grain_source.make_iterator(config, placement)
  return np.array([[clips[float(x)] for x in next(iterator)["latents"][:, 0, 0, 0, 0]] for _ in range(COUNT // BATCH)])


def raw(shards):
  source = grain_source.grain.sources.ArrayRecordDataSource([str(next(shards.glob("*.arrayrecord")))])
  return [source[n] for n in range(COUNT)]


def arguments(output, shards, *more):
  return ["configs/train_video.yml", *SIZE, f"dataset_path={shards}", f"base_output_directory={output}", "run_name=run",
          "ema_decay=0.5", "checkpoint_period=2", *more]


def losses(run):
  return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def quick_compilation(tmp_path, monkeypatch):
  """Programs are compiled without optimisation, and those that both hosts or both runs need once."""
  monkeypatch.setenv("M_JAX_CACHE_DIR", str(tmp_path / "cache"))
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


def start(arguments, **environment):
  quick = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **environment}
  return subprocess.Popen([sys.executable, "-m", "MaxText.train", *arguments], cwd=REPOSITORY, env=quick, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def two_hosts(output, shards_of_hosts, *more):
  """What each of two joined processes prints; both end well."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"
  hosts = [
    start(arguments(output, shards, *more), JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(i))
    for i, shards in enumerate(shards_of_hosts)]
  try:
    printed = [host.communicate(timeout=400)[0] for host in hosts]
  finally:
    for host in hosts:
      host.kill()
  assert [host.returncode for host in hosts] == [0, 0], "\n".join(printed)
  return printed


def test_two_hosts_train_as_one(tmp_path):
  whole = write_shards(tmp_path / "whole" / "shards")
  assert train.main(arguments(tmp_path / "one", whole, "steps=3")) == 0
  one = losses(tmp_path / "one" / "run")

  # What a host should not read is broken in its copy of the dataset.
  rows = numbers_of_rows(whole)
  foreign = [set(rows[:, 2:].flat), set(rows[:, :2].flat)]
  copies = [write_shards(tmp_path / f"host{i}" / "shards", damaged=foreign[i]) for i in (0, 1)]
  printed = two_hosts(tmp_path / "two", copies, "steps=3")
  run = tmp_path / "two" / "run"
  assert losses(run) == pytest.approx(one, rel=1e-4) and len(one) == 3
  assert "2 devices (cpu): data 2" in printed[0]
  assert "completed step: 3" in printed[0] and "completed step" not in printed[1]
  assert sorted(os.listdir(run)) == sorted(os.listdir(tmp_path / "one" / "run"))
  assert sorted(os.listdir(run / "checkpoints")) == ["2", "3"]

  # One process continues what two have written.
  continued = tmp_path / "continued" / "run"
  shutil.copytree(run / "checkpoints" / "2", continued / "checkpoints" / "2")
  assert train.main(arguments(tmp_path / "continued", whole, "steps=3")) == 0
  assert losses(continued) == pytest.approx(one[2:], rel=1e-4)


def test_a_coordinator_alone_is_not_enough():
  process = start(["configs/train_video.yml", "log_format=quiet"], JAX_COORDINATOR_ADDRESS="localhost:1")
  printed = process.communicate(timeout=120)[0]
  assert process.returncode == 2 and "JAX_NUM_PROCESSES" in printed and "Traceback" not in printed
