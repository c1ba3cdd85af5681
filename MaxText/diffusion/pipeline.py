"""From prompt to pixels, in one file: text embeddings → noise → denoising steps → VAE → frames.

`VideoPipeline` is the Python interface, and `decode` is a thin command around it:

    from MaxText import pyconfig
    from MaxText.diffusion.pipeline import Request, VideoPipeline

    config = pyconfig.initialize(["configs/video.yml", "attention=svg"], "decode")
    pipeline = VideoPipeline(config)
    request = Request(prompt=config.prompt, seed=0)
    text = pipeline.encode_prompts([request.prompt])
    for step, latents_BFHWC in pipeline.denoise([request], text):
      pass
    for frames_BTHWC in pipeline.frames(latents_BFHWC):       # a few frames at a time
      ...

What a step does is decided beforehand on the host (`plan_steps`): its timestep, expert, guidance, and which layers are
sparse with what density. The device program (`denoise`) is a pure function of its arguments, called by a plain loop.

Dimensions: B videos, F H W latent frames/rows/columns, C latent channels, T text tokens, E text width, L layers, N heads.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from MaxText.attention import Attention, make_attention
from MaxText.attention.svg import SvgAttention
from MaxText.attention.svg import schedule as svg_schedule
from MaxText.attention.ulysses import check_parallel, on_mesh
from MaxText.checkpoints import export, lora
from MaxText.checkpoints import folder as folder_lib
from MaxText.config_reader import user_path
from MaxText.config_types import RunError
from MaxText.diffusion import flow_matching, solvers
from MaxText.models.tokenizer import Tokenizer
from MaxText.models.umt5 import Umt5Encoder, encode_prompts
from MaxText.models.vae import WanVae, decode_frames
from MaxText.models.wan import WanTransformer
from MaxText.parallel import mesh as mesh_lib
from MaxText.parallel import sharding, topology
from MaxText.reporter import Reporter

EXPERTS = ("transformer", "transformer_2")  # component names: high noise (or the only one), low noise
STEPS_IN_FLIGHT = 2  # how many steps may be dispatched ahead; unbounded queues cost time and hide failures
PROMPTS_A_BATCH = 4  # texts encoded together


class NotFiniteError(RunError):
  """NaN or infinity where a number was expected; the message names stage and step."""


@dataclasses.dataclass(frozen=True)
class Request:
  """One video to make."""

  prompt: str
  seed: int


@dataclasses.dataclass(frozen=True)
class Step:
  """What one denoising step does, decided on the host before anything runs.

  Attributes:
    index: 0-based. timestep: as the model is told, 0 … 1000. expert: 0 high noise (or the only one), 1 low noise.
    guidance: classifier-free guidance scale; at most 1 runs no unconditional half, as the reference does.
    sparse: None for a dense step, else the schedule's entry (density, half-width, layers).
  """

  index: int
  timestep: float
  expert: int
  guidance: float
  sparse: svg_schedule.StepPlan | None

  @property
  def guided(self) -> bool:
    return self.guidance > 1.0

  @property
  def kind(self) -> tuple:
    """Steps of one kind take the same time."""
    return (
      self.expert,
      self.guided,
      self.sparse and (self.sparse.half_width, self.sparse.layer_start, self.sparse.layer_end),
    )

  def as_record(self) -> dict[str, Any]:
    """For run.json."""
    sparse = self.sparse
    return {
      "step": self.index,
      "timestep": self.timestep,
      "expert": EXPERTS[self.expert],
      "guidance": self.guidance,
      "density": None if sparse is None else sparse.density,
      "band_width": None if sparse is None else sparse.half_width,
      "sparse_layers": None if sparse is None else [sparse.layer_start, sparse.layer_end],
    }


def expert_of_steps(config, solver) -> list[int]:
  """Which expert each step asks: 0 high noise (or the only one), 1 low noise (below the boundary)."""
  if config.num_experts == 1:
    return [0] * len(solver.timesteps)
  boundary = config.boundary_ratio * flow_matching.NUM_TRAIN_TIMESTEPS
  return [0 if timestep >= boundary else 1 for timestep in solver.timesteps]


def plan_steps(config, solver, schedule) -> tuple[Step, ...]:
  """Timestep, expert, guidance and sparsity of every step; schedule None: all dense."""
  experts = expert_of_steps(config, solver)
  sparse = (
    [None] * len(experts)
    if schedule is None
    else [plan if plan.half_width is not None else None for plan in schedule.steps]
  )
  return tuple(
    Step(i, float(timestep), expert, config.guidance_scales[expert], plan)
    for i, (timestep, expert, plan) in enumerate(zip(solver.timesteps, experts, sparse, strict=True))
  )


def denoise(
  graphdef,
  weights,
  state,
  row,
  timestep,
  guidance,
  text_kv,
  sparse_layers_L,
  *,
  solver_step,
  guided,
  attention,
  sparse_attention,
):
  """One denoising step: velocity by the model, guidance, solver update. Pure; `STATIC` names its static arguments.

  Args:
    graphdef, weights: a split WanTransformer.
    state: solver state (pytree; `.sample` is [B, F, H, W, C] float32).
    row: this step's coefficients of the solver. timestep, guidance: float32 scalars.
    text_kv: keys and values of every layer's cross-attention; of 2B texts if guided: B prompts, then B negative prompts.
    sparse_layers_L: bool [L]; which layers are sparse in this step.
    solver_step: (state, velocity, row) -> state. guided: run the unconditional half.
    attention, sparse_attention: as in WanTransformer.
  Returns:
    the next state, the routes temporal_LBN of the step, and whether the sample is finite (bool scalar).
  """
  model = nnx.merge(graphdef, weights)
  latents = jnp.concatenate([state.sample, state.sample]) if guided else state.sample
  velocity, temporal_LBN = model(
    latents,
    jnp.full(latents.shape[0], timestep, jnp.float32),
    text_kv,
    attention=attention,
    sparse_attention=sparse_attention,
    sparse_layers_L=sparse_layers_L,
    cross_attention=attention,
  )
  with jax.named_scope("solver"):
    if guided:
      conditional, unconditional = jnp.split(velocity, 2)
      velocity = unconditional + guidance * (conditional - unconditional)
    state = solver_step(state, velocity, row)
    return state, temporal_LBN, jnp.isfinite(state.sample).all()


STATIC = ("graphdef", "solver_step", "guided", "attention", "sparse_attention")


def compiler_options(platform: str) -> dict[str, str] | None:
  """On CPU, keeps the float32 copy of bfloat16 weights to one layer (models/umt5.py says why XLA would hoist it)."""
  return {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"} if platform == "cpu" else None


@functools.partial(jax.jit, static_argnums=0)
def _text_keys_values(graphdef, weights, text_BTE):
  return nnx.merge(graphdef, weights).text_keys_values(text_BTE)


class VideoPipeline:
  """The models of a configuration on a mesh, and the stages that turn prompts into frames.

  Models are loaded when a stage first needs them; the text encoder is dropped before the transformer is loaded.

  Args:
    config: from `pyconfig.initialize`.
    reporter: where progress goes.
  Raises:
    ConfigError: what only shows once devices or weights are known (mesh sizes, heads that do not divide, …).
  """

  def __init__(self, config, reporter: Reporter | None = None):
    self.config = config
    self.reporter = reporter or Reporter("quiet")
    self.folder = config.folder
    rules = sharding.parse_rules(config.logical_axis_rules)
    devices = None if config.compile_topology is None else topology.topology_devices(config.compile_topology)
    self.placement = sharding.Placement(mesh_lib.make_mesh(config, devices), rules)
    # The VAE is small and streams one video at a time: one device decodes while the others hold the transformer.
    self.vae_placement = sharding.Placement(mesh_lib.one_device(self.placement.mesh), rules)
    self.dtypes = {"dtype": jnp.dtype(config.dtype), "weight_dtype": jnp.dtype(config.weight_dtype)}
    self.solver = solvers.make_solver(config.solver, config.num_inference_steps, config.flow_shift)
    self.schedule = (
      svg_schedule.resolve(config, expert_of_steps(config, self.solver)) if config.attention == "svg" else None
    )
    self.steps = plan_steps(config, self.solver, self.schedule)
    self.dense_kernel = make_attention(config, self.placement.mesh)
    self.attention = on_mesh(self.dense_kernel, self.placement)
    self._check_mesh()
    self.loras = lora.open_loras(config.loras, config.wan(), config.num_experts)
    self.experts: dict[int, tuple[Any, Any]] = {}
    self.vae: WanVae | None = None
    self.routes: list[np.ndarray | None] = []
    self.step_seconds: list[float] = []
    self.compile_seconds = 0.0
    self._programs: dict[Any, Callable] = {}
    if config.jax_cache_dir and config.compile_topology is None:  # what is compiled without a device cannot be read back
      jax.config.update("jax_compilation_cache_dir", str(user_path(config.jax_cache_dir).absolute()))

  def _check_mesh(self) -> None:
    """Refuses, before anything is loaded, what the mesh cannot share out; warns of devices that repeat work."""
    config, placement = self.config, self.placement
    if placement.mesh.size == 1:
      return
    check_parallel(
      strategy=config.context_parallel_strategy,
      num_heads=config.num_heads,
      num_frames=config.num_frames,
      height=config.height,
      width=config.width,
      placement=placement,
    )
    abstract = nnx.state(nnx.eval_shape(self._make_expert))
    sharding.check_sharded_enough(
      sharding.sharded_abstract(abstract, placement), placement, config.sharding_tolerance
    )
    warning = sharding.repeated_work(placement, config.batch_size * (1 + any(step.guided for step in self.steps)))
    if warning:
      self.reporter.warn(warning)

  @functools.cache  # noqa: B019 - a pipeline lives as long as its command
  def svg_attention(self, half_width: int) -> SvgAttention:
    """The sparse attention of a density, as one device sees it."""
    config = self.config
    return SvgAttention(
      half_width=half_width,
      sink_frames=min(config.svg_sink_frames, config.token_grid[0]),
      sink=config.svg_sink,
      num_sampled_queries=config.svg_num_sampled_queries,
      routing=config.svg_routing,
      kernel=config.svg_kernel,
      layout=config.svg_layout,
      block_q=config.svg_block_q or 0,
      block_kv=config.svg_block_kv or 0,
      backend="pallas" if self.platform == "tpu" else "xla",
      chip=config.topology_chip,
    )

  @property
  def platform(self) -> str:
    """'cpu', 'gpu' or 'tpu'."""
    return self.placement.mesh.devices.flat[0].platform

  @contextlib.contextmanager
  def _on_mesh(self):
    """Programs traced within it are laid out on this pipeline's mesh."""
    with jax.set_mesh(self.placement.mesh), sharding.mesh_rules(self.placement):
      yield

  # --- models

  def _make_expert(self) -> WanTransformer:
    return WanTransformer(self.config.wan(), rngs=nnx.Rngs(0), **self.dtypes)

  def _make_vae(self) -> WanVae:
    return WanVae(self.config.vae(), rngs=nnx.Rngs(0), **self.dtypes)

  def _make_text_encoder(self) -> Umt5Encoder:
    """The largest network: weights that are stored in bfloat16 stay so, since each layer is cast when it is used."""
    stored = set(export.stored_dtypes(self.folder, "text_encoder").values()) if self.folder else set()
    weight_dtype = jnp.bfloat16 if stored == {np.dtype(jnp.bfloat16)} else self.dtypes["weight_dtype"]
    return Umt5Encoder(self.config.umt5(), rngs=nnx.Rngs(0), **{**self.dtypes, "weight_dtype": weight_dtype})

  def abstract_weights(self) -> dict[str, Any]:
    """Each network's weights as ShapeDtypeStructs with shardings, in the order in which they are loaded."""
    makers = {"text_encoder": self._make_text_encoder, "vae": self._make_vae}
    names = ("text_encoder", *EXPERTS[: self.config.num_experts], "vae")
    return {
      name: sharding.sharded_abstract(
        nnx.state(nnx.eval_shape(makers.get(name, self._make_expert))),
        self.vae_placement if name == "vae" else self.placement)
      for name in names
    }

  def _load(
    self, component: str, make: Callable[[], nnx.Module], placement: sharding.Placement | None = None
  ) -> nnx.Module:
    """Weights from the folder, or random ones, created straight in their shards."""
    placement = placement or self.placement
    graphdef, abstract = nnx.split(nnx.eval_shape(make))
    abstract = sharding.sharded_abstract(abstract, placement)
    if self.config.debug_sharding:
      self.reporter.info(f"{component}\n{sharding.debug_sharding(abstract)}")
    if self.folder is None:
      module = sharding.init_sharded(make, placement, seed=EXPERTS.index(component) if component in EXPERTS else 0)
      return nnx.merge(graphdef, self._with_loras(component, nnx.state(module)))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract)) / 2**30
    progress = self.reporter.share(f"loading {component}, {size:.2f} GiB")
    state = folder_lib.load(self.folder, component, abstract, progress)
    return nnx.merge(graphdef, self._with_loras(component, state))

  def _with_loras(self, component: str, state: Any) -> Any:
    return lora.merge(state, self.loras[component]) if self.loras.get(component) else state

  def load_expert(self, expert: int) -> tuple[Any, Any]:
    """(graphdef, weights) of the high-noise (0) or low-noise (1) transformer, loaded on first use."""
    if expert not in self.experts:
      self.experts[expert] = nnx.split(self._load(EXPERTS[expert], self._make_expert))
    return self.experts[expert]

  def load_vae(self) -> WanVae:
    if self.vae is None:
      self.vae = self._load("vae", self._make_vae, self.vae_placement)
    return self.vae

  # --- text

  def encode_prompts(self, prompts: Sequence[str], encoder: Umt5Encoder | None = None) -> dict[str, np.ndarray]:
    """Embeddings [T, E] of each distinct text, and of the negative prompt where guidance needs it, on the host.

    Unless one is given, the text encoder is loaded for this and dropped again. Without weights there is no vocabulary
    either: the embeddings are then random numbers seeded by the text.
    """
    negative = [self.config.negative_prompt] if any(step.guided for step in self.steps) else []
    texts = list(dict.fromkeys([*prompts, *negative]))
    if self.folder is None:
      shape = (self.config.text_length, self.config.text_dim)
      return {text: np.random.default_rng(list(text.encode())).standard_normal(shape, np.float32) for text in texts}
    tokenizer = Tokenizer(str(pathlib.Path(self.folder.tokenizer_path).parent))
    for text, dropped in zip(texts, tokenizer(texts).truncated, strict=True):
      if dropped:
        self.reporter.warn(
          f"a prompt is {dropped} tokens longer than the {tokenizer.max_length} that the model reads; its end is "
          f"dropped: {text[:40]!r}…"
        )
    embedded: dict[str, np.ndarray] = {}
    with self._on_mesh():
      encoder = encoder or self._load("text_encoder", self._make_text_encoder)
      for start in range(0, len(texts), PROMPTS_A_BATCH):
        group = texts[start : start + PROMPTS_A_BATCH]
        values = jax.device_put(encode_prompts(encoder, tokenizer, group), self.placement.replicated)
        values = np.asarray(values).astype(np.float32)  # whole on every host
        embedded.update(zip(group, values, strict=True))
    for text, value in embedded.items():
      if not np.isfinite(value).all():
        raise NotFiniteError(
          f"text encoder: NaN or infinity in the embedding of {text[:60]!r}; its weights are damaged or overflow"
        )
    return embedded

  # --- denoising

  def initial_noise(self, requests: Sequence[Request]) -> np.ndarray:
    """float32 [B, F, H, W, C]; depends on each request's seed alone, or is read from `initial_noise_path`."""
    shape = (*self.config.latent_grid, self.config.in_channels)
    if self.config.initial_noise_path:
      noise_CFHW = np.load(user_path(self.config.initial_noise_path), allow_pickle=False)
      return np.broadcast_to(noise_CFHW.transpose(1, 2, 3, 0), (len(requests), *shape))
    return np.stack([np.asarray(flow_matching.noise(request.seed, shape)) for request in requests])

  def denoise(
    self, requests: Sequence[Request], embeddings: dict[str, np.ndarray], *, control: Attention | None = None
  ) -> Iterator[tuple[Step, jax.Array]]:
    """Runs all steps for a batch of requests; yields (step, latents [B, F, H, W, C] float32) as each step ends.

    The routes of the run are left in `self.routes` (a [layers, B, heads] bool array for a sparse step, else None) and the
    seconds in `self.step_seconds`; both start anew here. Compilation is timed apart, in `self.compile_seconds`.

    Args:
      embeddings: what `encode_prompts` returned.
      control: None, or the attention of every step and layer (from `dense_control`): the other side of a comparison.
    Raises:
      NotFiniteError: names the first step whose latents are not finite.
    """
    self.routes, self.step_seconds = [], []
    state = jax.device_put(self.solver.init(self.initial_noise(requests)), self.placement.replicated)
    running: collections.deque[tuple[Step, Any, jax.Array, jax.Array]] = collections.deque()
    last_end = time.perf_counter()

    def finish() -> tuple[Step, jax.Array]:
      nonlocal last_end
      step, state, temporal_LBN, finite = running.popleft()
      if not bool(finite):
        raise NotFiniteError(
          f"denoising step {step.index + 1} of {len(self.steps)} (timestep {step.timestep:g}, "
          f"{EXPERTS[step.expert]}): NaN or infinity in the latents; try dtype=float32, or check the weights"
        )
      now = time.perf_counter()
      self.step_seconds.append(now - last_end)
      last_end = now
      self.routes.append(np.asarray(temporal_LBN) if self._is_sparse(step, control) else None)
      return step, state.sample

    text_kv, expert = None, None
    for step in self.steps:
      if step.expert != expert:
        while running:  # so that loading the next expert is not counted as a step
          yield finish()
        text_kv, expert = None, step.expert  # the old expert's keys and values go before the new one's come
        graphdef, weights = self.load_expert(expert)
        text_kv = self._text_keys_values(graphdef, weights, requests, embeddings, step.guided)
        last_end = time.perf_counter()
      layers = np.zeros(self.config.num_layers, bool)
      if self._is_sparse(step, control):
        layers[step.sparse.layer_start : step.sparse.layer_end] = True
      arguments = (
        weights,
        state,
        self.solver.row(step.index),
        np.float32(step.timestep),
        np.float32(step.guidance),
        text_kv,
        layers,
      )
      key = self._program_key(graphdef, step, control, len(requests))
      if key not in self._programs:
        while running:  # a step that ran beside the compiler would be timed by neither
          yield finish()
        last_end += self._compile(key, step, arguments)
      state, temporal_LBN, finite = self._programs[key](*arguments)
      running.append((step, state, temporal_LBN, finite))
      if len(running) >= STEPS_IN_FLIGHT:
        yield finish()
    while running:
      yield finish()

  def _is_sparse(self, step: Step, control: Attention | None) -> bool:
    return step.sparse is not None and control is None

  def dense_control(self, other_tiles: bool = False) -> Attention:
    """The dense attention; with `other_tiles` the same mathematics in another order of summation."""
    other = dataclasses.replace(self.dense_kernel, block_q=256, block_kv=512)
    return on_mesh(other if other_tiles else self.dense_kernel, self.placement)

  def _text_keys_values(self, graphdef, weights, requests, embeddings, guided):
    text = [embeddings[request.prompt] for request in requests]
    if guided:
      text += [embeddings[self.config.negative_prompt]] * len(requests)
    with self._on_mesh():
      return _text_keys_values(graphdef, weights, np.stack(text))

  def abstract_text_keys_values(self, graphdef, weights, text_BTE) -> Any:
    """Shapes and shardings of what `_text_keys_values` makes, of abstract arguments; compiles it."""
    with self._on_mesh():
      compiled = _text_keys_values.lower(graphdef, weights, text_BTE).compile()
      shapes = jax.eval_shape(functools.partial(_text_keys_values, graphdef), weights, text_BTE)
    return jax.tree.map(
      lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, compiled.output_shardings)

  def _program_key(self, graphdef, step: Step, control: Attention | None, batch: int) -> tuple:
    """What a compiled step depends on: (graphdef, guided, dense attention, sparse attention or None, batch).

    One program for dense steps and one a density, whatever the routes, the layers and the expert: those are data.
    """
    sparse = self._is_sparse(step, control)
    sparse_attention = on_mesh(self.svg_attention(step.sparse.half_width), self.placement) if sparse else None
    return graphdef, step.guided, control or self.attention, sparse_attention, batch

  def _compile(self, key: tuple, step: Step, arguments) -> float:
    """Compiles the step of a key for the shapes of its arguments; returns the seconds that took."""
    graphdef, guided, attention, sparse_attention, _ = key
    kind = f"density {step.sparse.density}" if sparse_attention is not None else "dense"
    self.reporter.info(f"compiling the denoising step ({kind}{', with guidance' if guided else ''})")
    start = time.perf_counter()
    with self._on_mesh():
      replicated = self.placement.replicated
      lowered = jax.jit(denoise, static_argnames=STATIC, out_shardings=(replicated, None, replicated)).lower(
        graphdef,
        *arguments,
        solver_step=self.solver.step,
        guided=guided,
        attention=attention,
        sparse_attention=sparse_attention,
      )
      self._programs[key] = lowered.compile(compiler_options=compiler_options(self.platform))
    seconds = time.perf_counter() - start
    self.compile_seconds += seconds
    return seconds

  def seconds_left(self) -> float | None:
    """Estimate from the steps so far: each remaining one takes the mean of its own kind, or of all where none is done."""
    done = list(zip(self.steps, self.step_seconds, strict=False))
    if not done:
      return None
    by_kind: dict[Any, list[float]] = collections.defaultdict(list)
    for step, seconds in done:
      by_kind[step.kind].append(seconds)
    every = float(np.mean(self.step_seconds))
    return sum(float(np.mean(by_kind.get(step.kind, [every]))) for step in self.steps[len(self.step_seconds) :])

  # --- pixels

  def frames(self, latents_BFHWC) -> Iterator[np.ndarray]:
    """Frames of the latents, a few at a time: float32 [B, T, height, width, 3] in [-1, 1].

    Raises:
      NotFiniteError: names the frame at which the VAE gave NaN or infinity.
    """
    if not np.isfinite(np.asarray(latents_BFHWC)).all():
      raise NotFiniteError("latents: NaN or infinity before the VAE; nothing was written")
    vae = self.load_vae()
    self.reporter.info(f"decoding {self.config.num_frames} frames (the first time, the VAE is compiled)")
    latents_BFHWC = jax.device_put(np.asarray(latents_BFHWC), self.vae_placement.replicated)
    done = 0
    for frames in decode_frames(
      vae, latents_BFHWC, tile_size=self.config.vae_tile_size, tile_overlap=self.config.vae_tile_overlap
    ):
      frames = np.asarray(frames, np.float32)
      if not np.isfinite(frames).all():
        raise NotFiniteError(
          f"VAE: NaN or infinity in frames {done + 1} to {done + frames.shape[1]}; nothing was written; "
          "try dtype=float32"
        )
      done += frames.shape[1]
      yield frames
