"""RunConfig: everything one training run is told, as frozen dataclasses.

A recipe is a YAML file; dotted overrides (`train.lr=0.1`) change single values; what nobody sets keeps
the default written here. `load_config` resolves the three, remembers where each value came from for
`ridgeline config show`, and refuses a key it does not know. Called by `cli.py` on the login node and
by the worker of every rank, so it needs no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ridgeline import augmenting
from ridgeline.augmenting import AugmentConfig
from ridgeline.errors import UsageError, unknown_word
from ridgeline.layout import check_text, override_text
from ridgeline.tuning import AT_LEAST, CHOICES, PlanConfig, TuneConfig
from ridgeline.typed import build_typed, leaf_items, leaves, to_plain

RECIPES = Path(__file__).parent / "recipes"


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as the number it is; YAML 1.1, which PyYAML follows, reads it as text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Of a key that stands twice, YAML keeps the last in silence; here it is an error."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            if isinstance(key, str):
                seen.add(key)
        return dict(super().construct_mapping(node, deep))


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that `_Loader` would read as numbers."""


_EXPONENT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
for _dialect in (_Loader, _Dumper):
    _dialect.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


@dataclass(frozen=True)
class ModelConfig:
    name: str = ""
    """A name of `ridgeline.models`, `module:Class`, `transformers:AutoModel...` or `timm:NAME`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the model's constructor."""
    dtype: str = "float32"
    """Type the parameters are kept in: float32, float64, bfloat16 or float16."""
    channels_last: bool = False
    """Keep 4-D weights and inputs in channels-last order, which convolutions on GPUs prefer."""
    weights: str = ""
    """Initial weights: a safetensors file, or a directory of them as `transformers` writes it."""


@dataclass(frozen=True)
class DataConfig:
    source: str = ""
    """A name of `ridgeline.data.build.SOURCES`, or `module:function`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the source."""
    workers: int = 0
    """Loader processes a rank; 0 loads in threads of the rank's own process."""
    threads: int = 1
    """Loader threads a rank, where there are no processes."""
    prefetch: int = 2
    """Batches that each process or thread keeps ready ahead of the step."""
    shuffle: str = "full"
    """full; or `blocks`, for files on a disk that dislikes jumps: in a window of blocks read in order."""
    shuffle_block: int = 256
    """Samples that lie together and are read in one go (shuffle=blocks)."""
    shuffle_window: int = 16384
    """Samples that are mixed, and are in memory at a time (shuffle=blocks)."""
    drop_last: bool = False
    """Leave out the last batch of an epoch when it is smaller than the others."""
    stage: str = ""
    """Copy `args.path` to each node's own disk first: a folder there, `auto` to look for one, or not."""
    stage_share: str = "node"
    """Who reads what is staged: each node for itself, or the job once, sending it from node to node."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """What is done to samples on the device: decoding, crops, flips, colours, mixing."""


@dataclass(frozen=True)
class TrainConfig:
    task: str = "auto"
    """classify, causal_lm, masked_lm, forecast, `module:function`, or `auto`: what the source is for."""
    batch: int = 32
    """Samples in the global batch; the number of ranks does not change it."""
    epochs: int | None = None
    """Passes over the data; the run ends at `epochs` or at `steps`, whichever comes first."""
    steps: int | None = None
    """Optimizer steps."""
    stop_after: float = 1.0
    """Share of the run after which it evaluates, saves and ends, to be gone on with: schedules are those of
    the whole run."""
    lr: float = 1e-3
    """Learning rate at the reference batch."""
    reference_batch: int | None = None
    """Global batch that `lr` was found with; None means `batch`, so that no rule applies."""
    lr_rule: str = "none"
    """How the rate follows the batch away from the reference: none, linear or sqrt."""
    clip: float | None = None
    """Largest global gradient norm; None leaves gradients as they are."""
    seed: int = 0
    """Decides initial weights, order of samples, augmentation and dropout."""
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates at the end of every epoch and of the run."""
    eval_samples: int | None = None
    """Evaluate on the first so many samples of the evaluation split; 0 never evaluates."""
    target: dict[str, float] = field(default_factory=dict)
    """Stop when an evaluation reaches all of these, e.g. {accuracy: 0.97}."""
    deterministic: bool = False
    """Only deterministic kernels, which CUDA pays for, and an error where it has none; on the CPU they
    always are."""


@dataclass(frozen=True)
class OptimConfig:
    name: str = "adamw"
    """adamw, adam, sgd, lars or lamb."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam, AdamW and LAMB."""
    eps: float = 1e-8
    """All but SGD."""
    momentum: float = 0.0
    """SGD and LARS."""
    nesterov: bool = False
    """SGD and LARS."""
    trust: float = 0.001
    """LARS: how far a layer moves at a rate of 1, as a share of its weights."""
    decay_norms: bool = True
    """Apply weight decay also to biases and norm weights (every parameter of one dimension)."""
    ema: float | None = None
    """Keep a moving average of the weights: after each update this share of it stays, the rest is the new
    weights. 0.999 and 0.9999 are usual. Evaluations and `weights.safetensors` are then of the average."""
    ema_warmup: bool = True
    """After n updates no more than (1 + n) / (10 + n) stays, so that the initial weights are soon gone."""


@dataclass(frozen=True)
class ScheduleConfig:
    name: str = "constant"
    """constant, linear, cosine or step."""
    warmup_steps: int = 0
    """Steps over which the rate rises linearly from 0."""
    floor: float = 0.0
    """Share of the rate at which linear and cosine end."""
    step_epochs: tuple[int, ...] = ()
    """Epochs at whose start the `step` schedule multiplies the rate by `factor`."""
    factor: float = 0.1


@dataclass(frozen=True)
class DdpConfig:
    bucket_mb: float = 25.0
    """Gradients are reduced in buckets of this size while backward goes on."""
    sync_batch_norm: bool = False
    """Take batch-norm statistics over the whole global microbatch rather than a rank's part."""
    find_unused: bool = False
    """Look every step for parameters that took no part in the loss; costs a pass over the graph."""


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 0
    """Steps between checkpoints; 0 leaves it to `minutes`."""
    minutes: float = 15.0
    """Wall-clock minutes between checkpoints; 0 leaves it to `every`."""
    at_end: bool = True
    """Also when the run ends, so that it can be made longer."""
    keep: int = 2
    """The newest that are kept."""
    keep_every: int = 0
    """Also those whose step is a multiple of this are kept; 0 keeps none for that."""
    keep_best: str = ""
    """Also the one after the best evaluation by this metric, e.g. accuracy."""
    background: bool = True
    """Write while training goes on; false waits for the disk."""
    check: bool = True
    """Read every byte against its checksum before going on from a checkpoint."""


@dataclass(frozen=True)
class GuardConfig:
    on_bad: str = "stop"
    """stop, skip the batch, or rollback: to the last checkpoint, and past the batch without it."""
    spike: float = 0.0
    """A loss over so many times the median of those before is bad as well; 0: only what is no number."""
    window: int = 50
    """Losses that the median is taken of."""
    most: int = 10
    """Bad batches after which the run stops anyway."""


@dataclass(frozen=True)
class LogConfig:
    every: int = 10
    """Steps between exchanges of the losses among ranks and lines in `metrics.jsonl`."""
    tensorboard: str = "auto"
    """yes, no, or auto: scalars for TensorBoard when it is installed."""
    weights: bool = True
    """Keep the final weights in the run directory as one safetensors file."""
    samples: bool = False
    """Keep which samples each step used, in `samples/rank-N.jsonl`."""
    resources_s: float = 5.0
    """Seconds between lines on each node's cores, memory, disks and GPUs in `resources/`; 0: none."""


@dataclass(frozen=True)
class RestartConfig:
    times: int | None = None
    """Restarts after a rank failed, counted anew with each new checkpoint; None: 3 where there is a
    checkpoint to go on from, else 0, because work that starts over is for its owner to decide."""
    min_ranks: int | None = None
    """Go on with as few ranks as this when one keeps failing; None always uses all."""
    regrow_minutes: float = 30.0
    """After so long with fewer ranks, save and start all of them again; 0 never does."""


@dataclass(frozen=True)
class WatchConfig:
    timeout_s: float = 600.0
    """A rank that makes no progress for so long ends the run with a table of where each is; 0: off."""
    first_step_s: float = 1800.0
    """The same for the first step, which may compile, and while a run waits for checkpoints."""


@dataclass(frozen=True)
class RunConfig:
    name: str = "run"
    """Start of the run directory's name."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ddp: DdpConfig = field(default_factory=DdpConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    restart: RestartConfig = field(default_factory=RestartConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    layout: str = ""
    """Parallel arrangement in its text form, e.g. dp=2,precision=bf16; `auto` asks the planner."""
    axes: str = "pp,dp,cp,spatial,tp"
    """Order in which ranks are laid out along the axes of the layout, slowest links first."""
    device: str = "auto"
    """cpu, cuda, or auto: the accelerator when there is one."""
    threads: int | None = None
    """CPU threads a rank; None: OMP_NUM_THREADS where that is set, else its share of the cores."""


@dataclass(frozen=True)
class Resolved:
    """A configuration and, for each dotted key, where its value came from."""

    config: RunConfig
    origin: dict[str, str]


_CHOICES: dict[str, tuple[str, ...]] = {
    **CHOICES,
    **augmenting.CHOICES,
    "model.dtype": ("float32", "float64", "bfloat16", "float16"),
    "data.shuffle": ("full", "blocks"),
    "data.stage_share": ("node", "job"),
    "train.lr_rule": ("none", "linear", "sqrt"),
    "optim.name": ("adamw", "adam", "sgd", "lars", "lamb"),
    "schedule.name": ("constant", "linear", "cosine", "step"),
    "log.tensorboard": ("auto", "yes", "no"),
    "guard.on_bad": ("stop", "skip", "rollback"),
    "device": ("auto", "cpu", "cuda"),
}

_AT_LEAST: dict[str, float] = {
    **AT_LEAST,
    **augmenting.AT_LEAST,
    "data.workers": 0,
    "data.prefetch": 0,
    "data.threads": 1,
    "data.shuffle_block": 1,
    "data.shuffle_window": 1,
    "train.batch": 1,
    "train.epochs": 1,
    "train.steps": 1,
    "train.lr": 0,
    "train.reference_batch": 1,
    "train.clip": 0,
    "train.seed": 0,
    "train.eval_every": 0,
    "train.eval_samples": 0,
    "optim.weight_decay": 0,
    "optim.eps": 0,
    "optim.momentum": 0,
    "optim.trust": 0,
    "schedule.warmup_steps": 0,
    "ddp.bucket_mb": 0.001,
    "log.every": 1,
    "log.resources_s": 0,
    "checkpoint.every": 0,
    "checkpoint.minutes": 0,
    "checkpoint.keep": 1,
    "checkpoint.keep_every": 0,
    "guard.spike": 0,
    "guard.window": 1,
    "guard.most": 0,
    "restart.times": 0,
    "restart.min_ranks": 1,
    "restart.regrow_minutes": 0,
    "watch.timeout_s": 0,
    "watch.first_step_s": 0,
    "threads": 1,
}


def find_recipe(name: str) -> Path:
    """A shipped recipe by its name, or any YAML file by its path."""
    path, shipped = Path(name), RECIPES / f"{name}.yaml"
    recipe = path / "config.yaml"  # where a run directory has it
    if recipe.is_file() and not shipped.is_file():
        raise UsageError(f"{name} is the directory of a run, not a recipe; its recipe is {recipe}")
    if path.suffix in (".yaml", ".yml") or "/" in name:
        if not path.is_file():
            raise UsageError(f"no recipe file at {name}; shipped ones: {', '.join(recipe_names())}")
        return path
    if not shipped.is_file():
        raise unknown_word("recipe", name, recipe_names(), "the command line (or give a path)")
    return shipped


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load_config(recipe: Path | None, overrides: Sequence[str] = ()) -> Resolved:
    """Resolve defaults, a recipe file and dotted overrides, in that order, and check the result."""
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    if recipe is not None:
        values = _read_yaml(recipe)
        origin = dict.fromkeys(leaves(values), recipe.name)
    for text in overrides:
        key = _apply_override(values, text)
        stale = [known for known in origin if known == key or known.startswith(f"{key}.")]
        for known in stale:
            del origin[known]
        origin[key] = "command line"
    if recipe is not None and values and not {"model", "data"} & set(values):
        _refuse_script_settings(recipe, values)
    with telling_places(recipe, overrides):
        config = build_typed(RunConfig, values, "", leaves(to_plain(RunConfig())))
        _check_values(config)
    return Resolved(config, _origin_of_leaves(config, origin))


def _refuse_script_settings(path: Path, values: Mapping[str, Any]) -> None:
    """What a script's climb has left has settings of a recipe, and some that no recipe has."""
    if set(values) <= {"layout", "tune", "loader", "channels_last"}:
        raise UsageError(
            f"{path} holds a script's settings and is no recipe; RIDGELINE_TUNE={path} python SCRIPT.py "
            "uses them"
        )


@contextmanager
def telling_places(recipe: Path | None, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Around whatever reads that recipe: an error about one of its settings says where that was written.
    Ranks read a copy, so it is for whoever was given the recipe itself to know."""
    try:
        yield
    except UsageError as error:
        if not error.key:
            raise
        raise error.at(_find_place(recipe, overrides, error.key)) from error.__cause__


def _find_place(recipe: Path | None, overrides: Sequence[str], key: str) -> str:
    """FILE:LINE of a setting, or of the section that it would be in; `command line` where it is from there,
    and empty where nobody has set it."""
    said = [text.partition("=")[0].strip() for text in overrides]
    if any(f"{key}.".startswith(f"{name}.") for name in said):
        return "command line"
    if recipe is None:
        return ""
    try:
        node = yaml.compose(recipe.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, ValueError, yaml.YAMLError):
        return ""
    line = None
    for part in key.split("."):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = [pair for pair in pairs if pair[0].value == part.partition("[")[0]]
        if not found:
            break
        line, node = found[-1][0].start_mark.line + 1, found[-1][1]
    return "" if line is None else f"{recipe}:{line}"


def parse_config(text: str, place: str, overrides: Sequence[str] = ()) -> RunConfig:
    """What `dump_config` wrote, with dotted overrides; `place` is where it was found."""
    values = _parse_yaml(text, place)
    for override in overrides:
        _apply_override(values, override)
    config: RunConfig = build_typed(RunConfig, values, "", leaves(to_plain(RunConfig())))
    _check_values(config)
    return config


def dump_config(config: RunConfig) -> str:
    """The configuration as YAML that `load_config` reads back to the same value."""
    plain = to_plain(config)
    return str(yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def show_config(resolved: Resolved) -> str:
    """The configuration as YAML, each line with where its value came from."""
    lines: list[str] = []
    _show(to_plain(resolved.config), "", 0, resolved.origin, lines)
    width = max(len(text) for text, _ in (line.split("\t") for line in lines if "\t" in line))
    width = min(width, 60)
    out = []
    for line in lines:
        text, tab, source = line.partition("\t")
        out.append(f"{text:<{width}}  # {source}" if tab else text)
    return "\n".join(out) + "\n"


def _show(
    values: Mapping[str, Any], prefix: str, depth: int, origin: Mapping[str, str], out: list[str]
) -> None:
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        indent = "  " * depth
        if isinstance(value, dict) and value:
            out.append(f"{indent}{_inline(key)}:")
            _show(value, f"{dotted}.", depth + 1, origin, out)
        else:
            text = f"{indent}{_inline(key)}: {_inline(value)}"
            out.append(f"{text}\t{_origin_of(dotted, origin)}")


def _inline(value: Any) -> str:
    """A value as YAML on one line; only double quotes keep a text of several lines on one."""
    style = '"' if isinstance(value, str) and "\n" in value else None
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, default_style=style, width=math.inf
    )
    return str(text).strip().removesuffix("\n...")


def _origin_of(dotted: str, origin: Mapping[str, str]) -> str:
    """The origin of a key, or of the nearest key above it that was set as a whole."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        found = origin.get(".".join(parts[:end]))
        if found is not None:
            return found
    return "default"


def _origin_of_leaves(config: RunConfig, origin: Mapping[str, str]) -> dict[str, str]:
    return {leaf: _origin_of(leaf, origin) for leaf in leaves(to_plain(config))}


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # not text
        raise UsageError(f"cannot read the recipe {path}: {error}") from error
    return _parse_yaml(text, str(path))


def _parse_yaml(text: str, place: str) -> dict[str, Any]:
    try:
        values = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise UsageError(f"{place}{where}: {problem}") from error
    except ValueError as error:  # a date that is none
        raise UsageError(f"cannot read the recipe {place}: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"{place}: a recipe is a mapping of keys to values, not {values!r:.40}")
    return values


def _apply_override(values: dict[str, Any], text: str) -> str:
    """Set one dotted key in place; returns the key whose origin changed."""
    key, equals, value_text = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UsageError(
            f"override {text!r} on the command line is not KEY=VALUE (for example train.lr=0.1)"
        )
    if key == "layout":
        values["layout"] = value_text
        return key
    if key.startswith("layout."):
        before = str(values.get("layout") or "")
        values["layout"] = override_text(before, key.removeprefix("layout."), value_text, "layout")
        return "layout"
    try:
        value = read_value(value_text) if value_text.strip() else None
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"override {text!r}: the value is not valid YAML") from error
    node: dict[str, Any] = values
    *parents, last = key.split(".")
    for parent in parents:
        below = node.get(parent)
        if below is not None and not isinstance(below, dict):
            raise UsageError(f"override {text!r}: {parent} is a value, not a section")
        # A copy, because a YAML alias is the same dictionary in another place.
        node[parent] = dict(below or {})
        node = node[parent]
    node[last] = value
    return key


def read_value(text: str) -> Any:
    """One value, as an override has it."""
    return yaml.load(text, Loader=_Loader)


def needs_evaluation(config: RunConfig) -> str:
    """The setting that nothing comes of in a run that never evaluates; empty where there is none."""
    if config.train.target:
        return "train.target"
    return "checkpoint.keep_best" if config.checkpoint.keep_best else ""


def _check_values(config: RunConfig) -> None:
    """What types cannot say: choices, ranges, and what a run cannot do without."""
    values = dict(leaf_items(to_plain(config)))
    for key, known in _CHOICES.items():
        if values[key] not in known:
            raise unknown_word("value", str(values[key]), known, key)
    for key, least in _AT_LEAST.items():
        value = values.get(key)
        if value is None:
            continue
        if not math.isfinite(value):
            raise UsageError(f"{key}={value} is not a finite number", key=key)
        if value < least:
            raise UsageError(f"{key}={value} is too small; the least is {least:g}", key=key)
    for key, most in augmenting.AT_MOST.items():
        if values[key] > most:
            raise UsageError(f"{key}={values[key]} is too large; the most is {most:g}", key=key)
    augmenting.check_augment(config.data.augment)
    if "/" in config.name or not config.name or config.name.startswith("."):
        raise UsageError(f"name={config.name!r} starts a directory's name; leave out '/' and '.'")
    if not all(0 <= beta < 1 for beta in config.optim.betas):
        raise UsageError(f"optim.betas={list(config.optim.betas)} are not both from 0 to below 1")
    if config.optim.ema is not None and not 0 < config.optim.ema < 1:
        raise UsageError(
            f"optim.ema={config.optim.ema} is no share of an average that stays: from above 0 to below 1, "
            "such as 0.999; null keeps none",
            key="optim.ema",
        )
    for key in ("model.name", "data.source"):
        if not values[key]:
            raise UsageError(f"{key} is not set; every recipe names a model and a source", key=key)
    if config.train.epochs is None and config.train.steps is None:
        raise UsageError("neither train.epochs nor train.steps is set, so the run would never end")
    if not 0 < config.train.stop_after <= 1:
        raise UsageError(
            f"train.stop_after={config.train.stop_after} is no share of the run: from above 0 to 1",
            key="train.stop_after",
        )
    if config.train.eval_samples == 0 and config.train.target:
        raise UsageError(
            "train.target is set but train.eval_samples=0 never evaluates; leave one of them out",
            key="train.target",
        )
    check_text(config.layout, "layout")
