"""decode as a user types it: parity with the reference pipeline, files, resuming, interruption."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from MaxText import decode, pyconfig
from MaxText.diffusion.pipeline import Request, VideoPipeline
from MaxText.metrics.video_quality import yuv_psnr
from MaxText.video_io import read_video

REPOSITORY = pathlib.Path(__file__).parent.parent.parent
PIPELINES = REPOSITORY / "tests" / "golden" / "pipelines"
FLOAT32 = ["dtype=float32", "weight_dtype=float32"]


def golden_arguments(name):
  args = json.loads((PIPELINES / name / "args.json").read_text())
  guidance_2 = args.pop("guidance_scale_2", None)
  if guidance_2 is not None:
    args["guidance_scale"] = [args["guidance_scale"], guidance_2]
  return [
    f"load_parameters_path={PIPELINES / name / 'pipe'}",
    f"initial_noise_path={PIPELINES / name / 'noise.npy'}",
    *(f"{key}={value}" for key, value in args.items() if value is not None),
  ]


def run(tmp_path, *arguments, name="run", status=0):
  argv = [
    "tests/tiny.yml",
    f"base_output_directory={tmp_path}",
    f"run_name={name}",
    "log_format=quiet",
    *FLOAT32,
    *arguments,
  ]
  assert decode.main(argv) == status
  return tmp_path / name


@pytest.mark.parametrize("name", ["one_expert", "two_experts", "five_heads_euler", "one_frame"])
@pytest.mark.parametrize(
  "attention", [["attention=dot_product"], ["attention=svg", "svg_density=1.0"]], ids=["dense", "svg_all"]
)
def test_equals_the_reference_pipeline(tmp_path, name, attention):
  folder = run(tmp_path, *golden_arguments(name), *attention, "save_latents=true")
  latents, expected = np.load(folder / "latents.npy"), np.load(PIPELINES / name / "latents.npy")
  assert np.linalg.norm(latents - expected) <= 1e-3 * np.linalg.norm(expected)
  frames = np.rint(np.load(PIPELINES / name / "frames.npz")["frames"].astype(np.float32) * 255).astype(np.uint8)
  video = read_video(folder / "video.mp4")
  assert yuv_psnr(frames, video).y > 30  # H.264 halves the resolution of colour; the exact frames are compared below
  record = json.loads((folder / "run.json").read_text())
  assert record["status"] == "finished" and record["random_weights"] is False


@pytest.mark.parametrize("name", ["one_expert", "two_experts", "five_heads_euler", "one_frame"])
def test_frames_equal_the_reference_pipeline(name):
  config = pyconfig.initialize(["tests/tiny.yml", "attention=dot_product", *FLOAT32, *golden_arguments(name)])
  pipeline = VideoPipeline(config)
  request = Request(config.prompt, config.seed)
  for step, latents in pipeline.denoise([request], pipeline.encode_prompts([request.prompt])):  # noqa: B007
    assert latents.shape == (1, *config.latent_grid, 16)
  assert step.index == config.num_inference_steps - 1
  frames = (np.concatenate([frames[0] for frames in pipeline.frames(latents)]) + 1) / 2
  expected = np.load(PIPELINES / name / "frames.npz")["frames"].astype(np.float32)
  assert np.abs(frames - expected).max() <= 2e-3


def test_no_step_runs_beside_the_compiler():
  config = pyconfig.initialize(["tests/tiny.yml", *FLOAT32, *small("attention=svg")], "decode")
  pipeline, timed = VideoPipeline(config), []
  compile_step = pipeline._compile

  def watched(key, step, arguments):
    timed.append((step.index, len(pipeline.step_seconds)))
    return compile_step(key, step, arguments)

  pipeline._compile = watched
  request = Request(config.prompt, config.seed)
  list(pipeline.denoise([request], pipeline.encode_prompts([request.prompt])))
  assert len(timed) == 2 and timed[1][0] > 0  # dense steps, then sparse ones
  assert all(index == seconds for index, seconds in timed)  # every earlier step has its seconds already


def small(*more):
  return [
    "init_random_weights=true",
    "prompt=a ball",
    "height=32",
    "width=48",
    "num_frames=5",
    "num_inference_steps=3",
    *more,
  ]


def test_several_videos_and_seeds_do_not_depend_on_the_batch(tmp_path):
  prompts = tmp_path / "prompts.txt"
  prompts.write_text("a ball\n🎈 /../ " + "x" * 300 + "\n", encoding="utf-8")
  shared = [a for a in small() if not a.startswith("prompt=")] + ["save_latents=true"]
  alone = run(tmp_path, *shared, f"prompts_file={prompts}", "num_videos_per_prompt=2", name="alone")
  together = run(tmp_path, *shared, f"prompts_file={prompts}", "num_videos_per_prompt=2", "batch_size=3", name="together")
  names = sorted(path.name for path in alone.glob("*.mp4"))
  assert names == ["000.mp4", "001.mp4", "002.mp4", "003.mp4"]
  loaded = [np.load(alone / f"{i:03d}.latents.npy") for i in range(4)]
  for i in range(4):
    np.testing.assert_allclose(np.load(together / f"{i:03d}.latents.npy"), loaded[i], rtol=1e-5, atol=1e-5)
  assert np.abs(loaded[0] - loaded[1]).max() > 0.1 and np.abs(loaded[0] - loaded[2]).max() > 1e-3
  assert [v["seed"] for v in json.loads((alone / "run.json").read_text())["videos"]] == [0, 1, 0, 1]


def test_the_summary_counts_the_heads_of_all_videos(tmp_path, capsys):
  argv = ["tests/tiny.yml", f"base_output_directory={tmp_path}", "run_name=run", *FLOAT32]
  assert decode.main([*argv, *small("attention=svg", "num_videos_per_prompt=3")]) == 0
  batches = json.loads((tmp_path / "run" / "run.json").read_text())["batches"]
  routed = [batch["attention"]["routing_counts"] for batch in batches]
  spatial, temporal = (sum(counts[kind] for counts in routed) for kind in ("spatial", "temporal"))
  assert len(batches) == 3 and spatial + temporal > sum(routed[-1].values())
  assert f"heads routed: {spatial:,} spatial, {temporal:,} temporal" in "".join(capsys.readouterr())


def test_resume_makes_only_what_is_missing(tmp_path):
  folder = run(tmp_path, *small("num_videos_per_prompt=3"))
  assert run(tmp_path, *small("num_videos_per_prompt=3"), status=2)  # never over an existing run
  before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.mp4")}
  (folder / "001.mp4").unlink()
  (folder / "002.mp4.tmp").write_bytes(b"half a file")
  assert run(tmp_path, *small("num_videos_per_prompt=3", "resume=true", "seed=1"), status=2)  # another seed: another run
  run(tmp_path, *small("num_videos_per_prompt=3", "resume=true"))
  after = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.mp4")}
  assert set(after) == set(before) and not list(folder.glob("*.tmp"))
  assert {name for name in after if after[name] != before[name]} == {"001.mp4"}


def test_resume_of_a_mistyped_run_is_noticed(tmp_path, capsys):
  (tmp_path / "evening").mkdir()
  arguments = ["tests/tiny.yml", f"base_output_directory={tmp_path}", "resume=true", "dry_run=true", *small()]
  assert decode.main([*arguments, "run_name=evning"]) == 0
  assert "evning yet, it starts now; did you mean evening?" in "".join(capsys.readouterr())
  assert decode.main([*arguments, "run_name=evening"]) == 0
  assert "starts now" not in "".join(capsys.readouterr())


def test_resume_refuses_a_folder_that_shows_something_else(tmp_path, capsys):
  prompts = tmp_path / "prompts.txt"
  prompts.write_text("one\ntwo\n")
  arguments = [a for a in small() if not a.startswith("prompt=")] + [f"prompts_file={prompts}", "resume=true"]
  folder = run(tmp_path, *arguments)
  prompts.write_text("one\nother\n")
  run(tmp_path, *arguments, status=2)
  assert "001.mp4" in capsys.readouterr().err
  prompts.write_text("one\ntwo\nthree\n")  # only longer: the first two videos are still theirs
  run(tmp_path, *arguments)
  assert len(list(folder.glob("*.mp4"))) == 3
  whole = (folder / "run.json").read_bytes()
  for damaged in (b"\xff\xfe", b"[]", b'{"config": null}', b'{"config": {}, "videos": [5]}', whole[:-20], None):
    (folder / "run.json").unlink() if damaged is None else (folder / "run.json").write_bytes(damaged)
    run(tmp_path, *arguments, status=2)
    assert "run.json" in capsys.readouterr().err
  (folder / "run.json").write_bytes(whole)
  (folder / "001.mp4").unlink()
  (folder / "001.latents.npy").write_bytes(b"\x93NUMPY")
  run(tmp_path, *arguments, status=2)
  assert "001.latents.npy: is damaged" in capsys.readouterr().err


def test_a_full_disk_is_one_message_and_keeps_the_latents(tmp_path, capsys, monkeypatch):
  def full(*args):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(decode, "write_video", full)
  folder = run(tmp_path, *small(), status=1)
  assert "No space left on device" in capsys.readouterr().err and (folder / "latents.npy").exists()
  monkeypatch.setattr(np, "save", full)
  folder = run(tmp_path, *small(), name="sooner", status=1)
  assert "is the disk full?" in capsys.readouterr().err and os.listdir(folder) == ["run.json"]


def test_saved_latents_decode_again_to_the_same_video(tmp_path):
  first = run(tmp_path, *small("save_latents=true"), name="first")
  again = run(tmp_path, "init_random_weights=true", f"latents_path={first / 'latents.npy'}", name="again")
  np.testing.assert_array_equal(read_video(again / "video.mp4"), read_video(first / "video.mp4"))
  assert (first / "latents.npy").exists()


def test_latents_are_removed_unless_asked_for(tmp_path):
  folder = run(tmp_path, *small())
  assert sorted(path.name for path in folder.iterdir()) == ["run.json", "video.mp4"]


@pytest.mark.parametrize(
  "arguments",
  [
    ["num_frames=1"],
    ["height=16", "width=16"],
    ["height=16", "width=160"],
    ["height=96", "width=16"],
    ["num_inference_steps=1"],
    ["guidance_scale=0"],
    ["guidance_scale=1"],
    ["seed=9223372036854775807"],
    ["solver=euler"],
  ],
  ids=lambda a: "-".join(a),
)
def test_odd_but_legal(tmp_path, arguments):
  keys = {a.partition("=")[0] for a in arguments}
  folder = run(tmp_path, *(a for a in small("attention=svg") if a.partition("=")[0] not in keys), *arguments)
  values = dict(a.split("=") for a in [*small(), *arguments])
  frames = read_video(folder / "video.mp4")
  assert frames.shape == (int(values["num_frames"]), int(values["height"]), int(values["width"]), 3)


@pytest.mark.parametrize(
  "component, weight, words",
  [
    ("text_encoder", "encoder.final_layer_norm.weight", ["text encoder", "NaN"]),
    ("transformer", "proj_out.bias", ["denoising step 1 of 5", "NaN"]),
    ("vae", "decoder.conv_in.bias", ["VAE", "frames 1 to 1", "latents_path="]),
  ],
)
def test_nan_is_an_error_that_names_the_stage_and_nothing_is_written(tmp_path, capsys, component, weight, words):
  folder = shutil.copytree(PIPELINES / "one_expert" / "pipe", tmp_path / "pipe")
  changed = 0
  for path in (folder / component).glob("*.safetensors"):
    tensors = load_file(path)
    if weight in tensors:
      tensors[weight], changed = np.full_like(tensors[weight], np.nan), changed + 1
      save_file(tensors, path)
  assert changed == 1
  arguments = [a for a in golden_arguments("one_expert") if not a.startswith("load_parameters_path")]
  out = run(tmp_path, *arguments, f"load_parameters_path={folder}", "attention=dot_product", status=1)
  message = capsys.readouterr().err
  assert all(word in message for word in words) and "Traceback" not in message
  assert not list(out.glob("*.mp4*")) and (out / "latents.npy").exists() == (component == "vae")


def test_routes_layers_and_prompts_never_recompile(tmp_path):
  schedule = tmp_path / "schedule.yml"
  schedule.write_text(
    "num_steps: 6\nnum_layers: 2\nintervals:\n- {steps: [2, 4], layers: [1, 2], density: 0.9}\n"
    "- {steps: [4, 6], layers: [0, 2], density: 0.3}\n"
  )
  arguments = [
    a
    for a in small("attention=svg", f"svg_schedule={schedule}", "svg_kernel=exact")
    if not a.startswith(("num_", "height", "width"))
  ]
  config = pyconfig.initialize(
    ["tests/tiny.yml", *FLOAT32, *arguments, "num_inference_steps=6", "height=128", "width=128", "num_frames=17"],
    "decode",
  )
  pipeline = VideoPipeline(config)
  text = pipeline.encode_prompts(["a ball", "a cat"])
  weights = pipeline.load_expert(0)[1]
  sharpness = weights["blocks"]["attn1"]["norm_q"]["scale"]
  sharpness.set_value(8 * sharpness.get_value())  # random heads of flat attention would all be routed alike
  routes = []
  for prompt, seed in (("a ball", 0), ("a cat", 1)):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
      lambda event, seconds, into=compiled, **_: (
        into.append(event) if event.endswith("backend_compile_duration") else None
      )
    )
    list(pipeline.denoise([Request(prompt, seed)], text))
    routes.append(np.stack([r for r in pipeline.routes if r is not None]))
  assert len(pipeline._programs) == 3, "one for dense steps, one for each of the two densities"
  assert (routes[0] != routes[1]).any(), "the two prompts should be routed differently for this test to mean anything"
  assert compiled == []


def test_paths_with_a_tilde_and_random_weights_with_a_lora(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  np.save(tmp_path / "noise.npy", np.random.default_rng(0).standard_normal((16, 2, 4, 6)).astype(np.float32))
  rng = np.random.default_rng(0)
  prefix = "diffusion_model.blocks.1.self_attn.q"
  save_file(
    {
      f"{prefix}.lora_down.weight": rng.standard_normal((4, 128), np.float32),
      f"{prefix}.lora_up.weight": rng.standard_normal((128, 4), np.float32),
    },
    tmp_path / "lora.safetensors",
  )
  shared = small("initial_noise_path=~/noise.npy", "save_latents=true")
  plain = np.load(run(tmp_path, *shared, name="plain") / "latents.npy")
  changed = np.load(run(tmp_path, *shared, "lora_path=~/lora.safetensors", name="lora") / "latents.npy")
  assert np.abs(plain - changed).max() > 1e-4
  run(tmp_path, "init_random_weights=true", "latents_path=~/plain/latents.npy", name="again")


def test_lora_is_merged_and_one_of_another_model_is_refused(tmp_path, capsys):
  rng = np.random.default_rng(0)
  down, up = rng.standard_normal((4, 48), np.float32), rng.standard_normal((48, 4), np.float32) * 0.1
  save_file(
    {
      "diffusion_model.blocks.1.self_attn.q.lora_down.weight": down,
      "diffusion_model.blocks.1.self_attn.q.lora_up.weight": up,
      "diffusion_model.blocks.1.self_attn.q.alpha": np.array(2, np.float32),
    },
    tmp_path / "lora.safetensors",
  )

  def merge(tensors):
    if "blocks.1.attn1.to_q.weight" in tensors:
      tensors["blocks.1.attn1.to_q.weight"] += 0.5 * (2 / 4) * (up @ down)

  arguments = [a for a in golden_arguments("one_expert") if not a.startswith("load_parameters_path")] + [
    "save_latents=true"
  ]
  folder = shutil.copytree(PIPELINES / "one_expert" / "pipe", tmp_path / "pipe")
  for path in (folder / "transformer").glob("*.safetensors"):
    tensors = load_file(path)
    merge(tensors)
    save_file(tensors, path)
  merged = run(tmp_path, *arguments, f"load_parameters_path={folder}", name="merged")
  original = f"load_parameters_path={PIPELINES / 'one_expert' / 'pipe'}"
  lora = run(tmp_path, *arguments, original, f"lora_path={tmp_path / 'lora.safetensors'}", "lora_weight=0.5", name="lora")
  plain = np.load(PIPELINES / "one_expert" / "latents.npy")
  expected, got = np.load(merged / "latents.npy"), np.load(lora / "latents.npy")
  assert np.linalg.norm(got - expected) < 1e-5 * np.linalg.norm(expected) < 0.01 * np.linalg.norm(expected - plain)
  save_file({"diffusion_model.blocks.9.self_attn.q.lora_down.weight": down}, tmp_path / "other.safetensors")
  run(tmp_path, *arguments, original, f"lora_path={tmp_path / 'other.safetensors'}", name="other", status=2)
  assert "blocks.9.self_attn.q" in capsys.readouterr().err and not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_stopping_keeps_what_is_done(tmp_path, number):
  arguments = [
    sys.executable,
    "-m",
    "MaxText.decode",
    "tests/tiny.yml",
    f"base_output_directory={tmp_path}",
    "run_name=run",
    "log_format=json",
    *FLOAT32,
    *small("num_inference_steps=400", "height=64", "width=64")[:2],
    "num_inference_steps=400",
    "height=64",
    "width=64",
    "num_frames=5",
  ]
  process = subprocess.Popen(
    arguments, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
  )
  for line in process.stdout:
    event = json.loads(line)
    if event["event"] == "progress" and event["done"] >= 3:
      break
  process.send_signal(number)
  process.stdout.read()
  assert process.wait(60) in ({-signal.SIGKILL} if number == signal.SIGKILL else {1})
  folder = tmp_path / "run"
  assert not (folder / "video.mp4").exists()
  kept = list(folder.glob("video.step-*.latents.npy"))
  assert bool(kept) == (number != signal.SIGKILL)
  start = time.monotonic()
  argv = [*arguments[3:], "resume=true"]
  argv[argv.index("log_format=json")] = "log_format=quiet"
  assert decode.main(argv) == 0 and time.monotonic() - start < 120
  assert sorted(path.name for path in folder.iterdir()) == ["run.json", "video.mp4"]
