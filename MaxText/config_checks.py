"""Rules that join several keys, decided before anything is loaded or compiled.

Every check yields problems in words: the key, its value, what is allowed, and the fix. A flag that would do nothing is a
problem too.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from MaxText import config_types
from MaxText.config_reader import nearest, user_path
from MaxText.data_checks import check_data
from MaxText.training_checks import check_training

if TYPE_CHECKING:
  from MaxText.pyconfig import Config

MAX_SIDE = 16384  # pixels; libx264 opens no larger picture
MIN_FPS, MAX_FPS = 0.001, 1000.0  # what video_io.write_video takes
SVG_PRESETS = ("conservative", "moderate", "aggressive")


@dataclasses.dataclass(frozen=True)
class Facts:
  """What a check looks at: the config, the command, and the keys that the user set by command line or environment."""

  config: Config
  command: str
  user_keys: frozenset[str]

  @property
  def training(self) -> bool:
    """Whether the command reads the keys of training as train does."""
    return self.command in ("train", "train_compile")


def check(config: Config, command: str, user_keys: frozenset[str]) -> list[str]:
  """All problems of a config whose values are of the right type, in the order of the keys."""
  facts = Facts(config, command, user_keys)
  if problems := list(_text(facts)):  # first, because the other checks open what these name
    return problems
  checks: tuple[Callable[[Facts], Iterator[str]], ...] = (
      _architecture, _size, _experts, _svg, _dense, _mesh, _files, _loras, _output, _weights, _prompts,
      check_training, check_data)
  return [problem for one in checks for problem in one(facts)]


def _around(value: int, step: int, offset: int = 0) -> str:
  """The nearest valid values offset + n·step (n ≥ 0, result ≥ 1) in words: "1072 or 1088"."""
  low = (value - offset) // step * step + offset
  valid = [v for v in (low, low + step) if v >= max(offset, 1)]
  return " or ".join(str(v) for v in valid)


def _text(facts: Facts) -> Iterator[str]:
  for key in config_types.KEYS:
    value = getattr(facts.config, key)
    for text in value if isinstance(value, tuple) else (value,):
      if isinstance(text, str) and not _is_unicode(text):
        yield f"{key}={text!r}: is not valid UTF-8 text"
      elif isinstance(text, str) and "\0" in text and key not in config_types.FREE_TEXT:
        yield f"{key}={text!r}: holds a NUL character"


def _architecture(facts: Facts) -> Iterator[str]:
  c = facts.config
  if c.head_dim % 2:
    yield f"head_dim={c.head_dim}: must be even, because rotary embeddings turn pairs; use {c.head_dim + 1}"
  if c.freq_dim % 2:
    yield f"freq_dim={c.freq_dim}: must be even (sines and cosines); use {c.freq_dim + 1}"
  if c.text_dim != c.text_d_model:
    yield (f"text_dim={c.text_dim} differs from text_d_model={c.text_d_model}: the transformer reads what the text "
           "encoder writes, so they must be equal")
  for key, channels in (("in_channels", c.in_channels), ("out_channels", c.out_channels)):
    if channels != c.vae_z_dim:
      yield (f"{key}={channels} differs from vae_z_dim={c.vae_z_dim}: text-to-video models read and predict the VAE's "
             "latents (image-to-video models are not supported)")
  if not c.vae_dim_mult or len(c.vae_temporal_downsample) != len(c.vae_dim_mult) - 1:
    yield (f"vae_temporal_downsample has {len(c.vae_temporal_downsample)} entries: the {len(c.vae_dim_mult)} stages of "
           f"vae_dim_mult need {max(0, len(c.vae_dim_mult) - 1)}, one between each two")
  if c.text_num_buckets % 4:
    yield f"text_num_buckets={c.text_num_buckets}: must be a multiple of 4; use {_around(c.text_num_buckets, 4)}"


def _size(facts: Facts) -> Iterator[str]:
  c = facts.config
  frame_step, pixel_step = c.vae_strides
  if (c.num_frames - 1) % frame_step:
    yield (f"num_frames={c.num_frames}: must be {frame_step}n+1 (the first frame stands alone, each further latent frame "
           f"holds {frame_step}); nearest valid: {_around(c.num_frames, frame_step, 1)}")
  elif c.latent_grid[0] % c.patch_size[0]:
    yield (f"num_frames={c.num_frames}: gives {c.latent_grid[0]} latent frames, which is no multiple of "
           f"patch_size[0]={c.patch_size[0]}")
  for key, value, patch in (("height", c.height, c.patch_size[1]), ("width", c.width, c.patch_size[2])):
    step = pixel_step * patch
    if value % step:
      yield (f"{key}={value}: must be a multiple of {step} (VAE stride {pixel_step} × patch {patch}); "
             f"nearest valid: {_around(value, step)}")
    elif value > MAX_SIDE:
      yield f"{key}={value}: must be at most {MAX_SIDE}, the largest picture of an H.264 video"
  if not MIN_FPS <= c.fps <= MAX_FPS:
    yield f"fps={c.fps:g}: must be {MIN_FPS:g} to {MAX_FPS:g}, what video files can hold"


def _experts(facts: Facts) -> Iterator[str]:
  c = facts.config
  experts = f"the model has {c.num_experts} expert{'s' if c.num_experts > 1 else ''}"
  for key, value in (("guidance_scale", c.guidance_scale), ("svg_density", c.svg_density)):
    if isinstance(value, tuple) and len(value) != c.num_experts:
      yield (f"{key}={list(value)}: has {len(value)} entries, but {experts}; give one number, or one an expert "
             "(high noise first)")
  if c.num_experts == 2 and c.boundary_ratio is None:
    yield (f"boundary_ratio=null: {experts}, so give the noise level at which the second takes over "
           "(0.875 for Wan 2.2 T2V A14B)")
  if c.num_experts == 1 and c.boundary_ratio is not None and "boundary_ratio" in facts.user_keys:
    yield f"boundary_ratio={c.boundary_ratio}: {experts}, so it would do nothing; leave it out"


def _interval(c: Config, unit: str, total_key: str, total: int) -> Iterator[str]:
  start_key, end_key = f"svg_start_{unit}", f"svg_end_{unit}"
  start, end = getattr(c, start_key), getattr(c, end_key)
  for key, value in ((start_key, start), (end_key, end)):
    if value is not None and value > total:
      yield f"{key}={value}: must be 0 to {total} ({total_key}={total})"
  if start is not None and end is not None and start > end:
    yield f"{start_key}={start}: lies after {end_key}={end}; the interval is [start, end), so start must be at most end"


def _svg(facts: Facts) -> Iterator[str]:
  c = facts.config
  if c.attention != "svg" and facts.command != "benchmark_attention":
    for key in sorted(k for k in facts.user_keys if k.startswith("svg_")):
      yield f"{key}: would do nothing with attention={c.attention}; add attention=svg, or leave it out"
  if c.attention != "svg" and c.compare_dense:
    yield f"compare_dense=true: would compare dense attention with itself (attention={c.attention}); add attention=svg"
  yield from _interval(c, "step", "num_inference_steps", c.num_inference_steps)
  yield from _interval(c, "layer", "num_layers", c.num_layers)
  frames = c.latent_grid[0]
  if c.svg_sink_frames > frames and "svg_sink_frames" in facts.user_keys:
    yield (f"svg_sink_frames={c.svg_sink_frames}: num_frames={c.num_frames} has only {frames} latent frames; "
           f"must be 0 to {frames}")
  if c.svg_routing != "dynamic" and "svg_num_sampled_queries" in facts.user_keys:
    yield (f"svg_num_sampled_queries: would do nothing with svg_routing={c.svg_routing}; leave it out, or use "
           "svg_routing=dynamic")
  if c.svg_band_width is not None and c.svg_density is not None and "svg_density" in facts.user_keys:
    yield f"svg_density: would do nothing beside svg_band_width={c.svg_band_width}, a band in tokens; keep one of the two"
  if c.svg_schedule not in SVG_PRESETS and not os.path.isfile(user_path(c.svg_schedule)):
    yield (f"svg_schedule={c.svg_schedule}: is neither {', '.join(SVG_PRESETS)} nor a file"
           f"{nearest(c.svg_schedule, SVG_PRESETS) or '; a file of your own is YAML with step and layer intervals'}")


def _dense(facts: Facts) -> Iterator[str]:
  c = facts.config
  if c.attention == "dot_product" and facts.command != "benchmark_attention":
    for key in sorted(facts.user_keys & {"flash_block_q", "flash_block_kv"}):
      yield f"{key}: would do nothing with attention=dot_product; use attention=flash, or leave it out"
  if c.vae_tile_size is None and "vae_tile_overlap" in facts.user_keys:
    yield "vae_tile_overlap: would do nothing without tiles; give vae_tile_size too, or leave it out"
  elif c.vae_tile_size is not None:
    stride = c.vae_strides[1]
    for key, value in (("vae_tile_size", c.vae_tile_size), ("vae_tile_overlap", c.vae_tile_overlap)):
      if value % stride:
        yield f"{key}={value}: must be a multiple of {stride}, the VAE's stride; nearest valid: {_around(value, stride)}"
    if 2 * c.vae_tile_overlap > c.vae_tile_size:
      yield f"vae_tile_overlap={c.vae_tile_overlap}: must be at most half of vae_tile_size={c.vae_tile_size}"


def _mesh(facts: Facts) -> Iterator[str]:
  c = facts.config
  sizes = {key: getattr(c, key) for key in config_types.keys_of("mesh") if key.endswith("_parallelism")}
  for link in ("ici", "dcn"):
    open_keys = [key for key, size in sizes.items() if key.startswith(link) and size == -1]
    if len(open_keys) > 1:
      yield f"{' and '.join(open_keys)} are all -1: only one {link}_* size can be inferred; give the others a number"
  if c.context_parallel_strategy == "ulysses":
    yield from _ulysses(c, _axis(sizes, "context"), _axis(sizes, "tensor"))
  elif _axis(sizes, "context") > 1:
    yield (f"ici_context_parallelism={_axis(sizes, 'context')} with context_parallel_strategy=none: attention could not "
           "cross the context axis; add context_parallel_strategy=ulysses, or set ici_context_parallelism=1")


def _axis(sizes: Mapping[str, int], axis: str) -> int:
  """Size of a mesh axis as far as it is given; what is inferred from the devices is checked when the mesh is made."""
  return math.prod(max(1, sizes[f"{link}_{axis}_parallelism"]) for link in ("ici", "dcn"))


def _ulysses(c: Config, context: int, tensor: int) -> Iterator[str]:
  heads, tokens = c.num_heads, c.num_tokens
  if heads % tensor:
    fits = [n for n in range(1, heads + 1) if heads % n == 0]
    yield f"ici_tensor_parallelism={tensor}: does not divide num_heads={heads}; choices: {', '.join(map(str, fits))}"
    return
  fits = [n for n in range(1, heads // tensor + 1) if heads // tensor % n == 0 and tokens % n == 0]
  choices = f"context sizes that divide heads and tokens: {', '.join(map(str, fits))}; spread the rest over data or fsdp"
  if heads // tensor % context:
    share = f" / {tensor} (tensor parallelism)" if tensor > 1 else ""
    yield f"ici_context_parallelism={context}: does not divide num_heads={heads}{share}, which ulysses spreads; {choices}"
  elif tokens % context:
    yield (f"ici_context_parallelism={context}: does not divide the {tokens} tokens of {c.height}×{c.width}, "
           f"{c.num_frames} frames; {choices}")


def _open_npy(key: str, path: str) -> np.ndarray | str:
  """A .npy file mapped into memory, or a problem. Pickles are not opened."""
  file = user_path(path)
  try:
    with open(file, "rb") as opened:
      if opened.read(6) != b"\x93NUMPY":
        return f"{key}={path}: is not a .npy file; write it with numpy.save"
    return np.load(file, mmap_mode="r", allow_pickle=False)
  except OSError as error:
    return f"{key}={path}: cannot be read: {error.strerror or error}"
  except (ValueError, EOFError) as error:
    return f"{key}={path}: is damaged, or holds Python objects instead of numbers ({error})"


def read_latents_shape(path: str) -> tuple[int, ...] | None:
  """Shape [C, F, H/8, W/8] of saved latents, or None where the file is no such array (`check` says why)."""
  array = _open_npy("latents_path", path)
  return None if isinstance(array, str) or array.ndim != 4 else array.shape


def _files(facts: Facts) -> Iterator[str]:
  c = facts.config
  shape = (c.vae_z_dim, *c.latent_grid)
  for key, path in (("initial_noise_path", c.initial_noise_path), ("latents_path", c.latents_path)):
    if path is None:
      continue
    array = _open_npy(key, path)
    if isinstance(array, str):
      yield array
    elif array.shape != shape or array.dtype != np.float32:
      stride = c.vae_strides[1]
      yield (f"{key}={path}: holds {array.dtype} {list(array.shape)}, but {c.height}×{c.width}, {c.num_frames} frames "
             f"need float32 {list(shape)} ([channels, latent frames, height/{stride}, width/{stride}])")
    elif not np.isfinite(array).all():
      yield f"{key}={path}: holds NaN or infinite values"
  if c.initial_noise_path is not None and c.latents_path is not None:
    yield "initial_noise_path and latents_path are both set: saved latents are finished and need no noise; keep one"
  if c.latents_path is not None and c.compare_dense:
    yield "compare_dense=true: would denoise anew, and latents_path would do nothing; leave one of the two out"
  if c.latents_path is not None and (c.prompts_file is not None or c.num_videos_per_prompt > 1):
    yield ("latents_path holds one video, so prompts_file and num_videos_per_prompt would make copies of it; "
           "leave them out")
  if c.initial_noise_path is not None and c.num_videos_per_prompt > 1:
    yield (f"num_videos_per_prompt={c.num_videos_per_prompt}: all would be the same video, because initial_noise_path "
           "fixes the noise; leave one of the two out")


def _loras(facts: Facts) -> Iterator[str]:
  c = facts.config
  paths = (c.lora_path,) if isinstance(c.lora_path, str) else c.lora_path or ()
  for path in paths:
    if not os.path.isfile(user_path(path)):
      yield f"lora_path={path}: no such file"
  for key in ("lora_weight", "lora_expert"):
    value = getattr(c, key)
    if not paths and key in facts.user_keys:
      yield f"{key}: would do nothing without lora_path"
    if isinstance(value, tuple) and paths and len(value) != len(paths):
      yield f"{key}={list(value)}: has {len(value)} entries for {len(paths)} files; give one a file"
  if paths and facts.command == "convert_checkpoint":
    yield "lora_path: convert_checkpoint merges no LoRA, so it would do nothing; leave it out, and give it to decode"
  if paths and c.num_experts == 1 and c.lora_expert != "both":
    yield f"lora_expert={c.lora_expert}: this model has one expert; leave it out"


def _folder_problem(path: str) -> str | None:
  """Why folders cannot be made under `path`, or None; tries it in the nearest existing one, and leaves nothing behind."""
  place = user_path(path).absolute()
  try:
    while not place.exists():
      place = place.parent
    if not place.is_dir():
      return f"{place} is a file, not a folder"
    with tempfile.TemporaryDirectory(prefix=".writable-", dir=place):
      return None
  except OSError as error:
    return f"{place}: {error.strerror or error}"


def _output(facts: Facts) -> Iterator[str]:
  c = facts.config
  if re.match(r"[a-z0-9]+://", c.base_output_directory):
    yield (f"base_output_directory={c.base_output_directory}: must be a folder of this machine; mount the bucket and "
           "give its folder")
  elif not c.base_output_directory:
    yield "base_output_directory is empty: give a folder, or . for the current one"
  elif facts.command not in ("convert_checkpoint", "train_compile") and (
      problem := _folder_problem(c.base_output_directory)) is not None:
    yield f"base_output_directory={c.base_output_directory}: cannot be written ({problem})"
  name = c.run_name
  if name in (".", "..") or re.search(r"[/\\\x00-\x1f\x7f]", name) or len(os.fsencode(name)) > 200:
    yield f"run_name={name!r}: must be a plain folder name of at most 200 bytes, without slashes or control characters"
  if c.resume and not name:
    yield "resume=true: give run_name, the run to continue"
  if c.compile_topology is not None and not re.fullmatch(r"[a-z0-9]+:\d+(x\d+){1,2}", c.compile_topology):
    yield (f"compile_topology={c.compile_topology}: must be a chip and its grid, such as v6e:2x4, v5e:2x4, v5p:2x2x1 or "
           "tpu7x:2x2x1")
  elif c.compile_topology is not None and facts.command == "train":
    yield (f"compile_topology={c.compile_topology}: train runs on the devices here; leave it out, or give the same "
           "keys to python -m MaxText.train_compile, which compiles the step for that slice and runs nothing")
  elif c.compile_topology is not None and not (
      facts.command in ("benchmark_attention", "train_compile") or facts.command == "decode" and c.dry_run):
    yield (f"compile_topology={c.compile_topology}: read by benchmark_attention and train_compile, and by decode with "
           "dry_run=true, which compiles and runs nothing; add dry_run=true, or leave it out")
  elif c.compile_topology is None and facts.command == "train_compile":
    yield "compile_topology is missing: give the TPU slice to compile for, a chip and its grid, such as v6e:4x4"


def _weights(facts: Facts) -> Iterator[str]:
  c = facts.config
  if c.load_parameters_path is not None and c.init_random_weights:
    yield "load_parameters_path and init_random_weights=true are both set: keep the weights, or ask for random ones"
  if c.load_parameters_path is None and facts.command == "convert_checkpoint" and not c.init_random_weights:
    yield ("load_parameters_path is missing: give the folder to convert, or init_random_weights=true for a new model of "
           "random weights")
  elif c.init_random_weights and facts.command == "convert_checkpoint" and c.tokenizer_path is None:
    yield "tokenizer_path is missing: give the folder that train_tokenizer wrote; the new model reads prompts with it"
  elif c.tokenizer_path is not None and facts.command == "convert_checkpoint" and not c.init_random_weights:
    yield "tokenizer_path: would do nothing without init_random_weights=true; the folder has a tokenizer of its own"
  elif c.converted_path is None and facts.command == "convert_checkpoint":
    yield "converted_path is missing: name the folder to write"
  elif c.load_parameters_path is None and not c.init_random_weights and facts.command == "decode":
    yield ("no weights: give load_parameters_path=FOLDER (a Wan model in Diffusers format, an original release, or our "
           "Orbax checkpoint), or init_random_weights=true to run with random weights (the video is noise)")


def read_prompts_file(path: str) -> tuple[str, ...]:
  """The prompts of a UTF-8 text file, one a line; blank lines are left out.

  Raises:
    ValueError: unreadable, not UTF-8, or without a prompt.
  """
  try:
    text = user_path(path).read_text(encoding="utf-8-sig")
  except UnicodeDecodeError:
    raise ValueError(f"prompts_file={path}: is not UTF-8 text") from None
  except OSError as error:
    raise ValueError(f"prompts_file={path}: cannot be read: {error.strerror or error}") from None
  prompts = tuple(line.strip() for line in text.split("\n") if line.strip())
  if not prompts:
    raise ValueError(f"prompts_file={path}: holds no prompt; write one a line")
  return prompts


def _prompts(facts: Facts) -> Iterator[str]:
  c = facts.config
  if c.prompt is not None and c.prompts_file is not None:
    yield "prompt and prompts_file are both set: keep one"
  if c.prompts_file is not None:
    try:
      read_prompts_file(c.prompts_file)
    except ValueError as error:
      yield str(error)
  given = c.prompt is not None or c.prompts_file is not None or c.latents_path is not None
  if facts.command == "decode" and not given and not c.dry_run:
    yield 'no prompt: give prompt="what the video shows", or prompts_file=FILE with one prompt a line'


def _is_unicode(text: str) -> bool:
  try:
    text.encode("utf-8")
  except UnicodeEncodeError:
    return False
  return True

