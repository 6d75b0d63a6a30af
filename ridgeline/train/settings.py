"""Settings of speed for a loop of the user's own: a small YAML file for `ridgeline.start(tune=...)`.

    layout: precision=bf16,compile=true
    tune: {attention: cudnn}
    loader: {workers: 8, prefetch: 4}
    channels_last: true
    bucket_mb: 100

`ridgeline doctor SCRIPT.py --climb` writes one; RIDGELINE_TUNE=FILE gives one to a script as it is. The
file is read without torch; `prepare_process` and `prepare_model` put it into effect for `job.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ridgeline.errors import UsageError, unknown_word
from ridgeline.layout import Layout
from ridgeline.tuning import AT_LEAST, CHOICES, TuneConfig
from ridgeline.typed import build_typed, leaf_items, leaves, to_plain

if TYPE_CHECKING:
    import torch
    from torch import nn

FIELDS = ("precision", "compile", "recompute", "compress")
"""Fields of a layout that say how fast it goes, and not how ranks share the work."""
OWN_ONLY = {
    "weights": "wide",
    "loss": "full",
}
"""Settings of `tune` that reach into the optimizer or the loss, which are the script's own, and what they
have to be here."""


@dataclass(frozen=True)
class LoaderSettings:
    workers: int = 0
    """Processes of `job.loader`; 0 leaves what the script says."""
    prefetch: int = 0
    """Batches that each of them reads ahead; 0 is torch's own number."""


@dataclass(frozen=True)
class Settings:
    layout: str = ""
    """precision, compile, recompute and compress; over what the script gives to start."""
    tune: TuneConfig = field(default_factory=TuneConfig)
    loader: LoaderSettings = field(default_factory=LoaderSettings)
    channels_last: bool = False
    bucket_mb: float = 0.0
    """Of gradients that replicas reduce together; 0 leaves what the script says."""


def read_settings(path: Path) -> Settings:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UsageError(
            f"cannot read the settings {path} ({error.strerror}); `ridgeline doctor SCRIPT.py --climb` "
            "writes such a file"
        ) from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} holds no settings; write for example 'layout: precision=bf16'")
    settings: Settings = build_typed(Settings, values, "", leaves(to_plain(Settings())))
    _check(settings, path)
    return settings


def _check(settings: Settings, path: Path) -> None:
    given = dict(leaf_items(to_plain(settings)))
    for key, known in CHOICES.items():
        if given[key] not in known:
            raise unknown_word("value", str(given[key]), known, f"{key} of {path}")
    for key, least in AT_LEAST.items():
        if given[key] < least:
            raise UsageError(f"{key}={given[key]} in {path} is too small; the least is {least:g}")
    if settings.loader.workers < 0 or settings.loader.prefetch < 0:
        raise UsageError(f"loader of {path} has a number below 0; leave it out")
    if settings.bucket_mb < 0:
        raise UsageError(f"bucket_mb={settings.bucket_mb:g} in {path} is below 0; leave it out")
    for name, value in OWN_ONLY.items():
        if getattr(settings.tune, name) != value:
            raise UsageError(
                f"tune.{name}={getattr(settings.tune, name)} in {path} is for `ridgeline train`: the loss "
                "and the optimizer are in the script's own code; leave it out"
            )
    with_settings(Layout(), settings, str(path))


def write_settings(settings: Settings, path: Path, comment: str = "") -> None:
    """All that is not as it would be without the file, and whether the optimizer is fused."""
    tune = to_plain(settings.tune)
    normal = to_plain(TuneConfig())
    changed = {k: v for k, v in tune.items() if v != normal[k] or k == "fused_optimizer"}
    values: dict[str, Any] = {"layout": settings.layout, "tune": changed}
    loader = {k: v for k, v in to_plain(settings.loader).items() if v}
    values |= {"loader": loader} if loader else {}
    values |= {"channels_last": True} if settings.channels_last else {}
    values |= {"bucket_mb": settings.bucket_mb} if settings.bucket_mb else {}
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    path.write_text(head + yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def with_settings(layout: Layout, settings: Settings, place: str) -> Layout:
    """The script's layout with the fields that the file names."""
    for item in filter(None, (part.strip() for part in settings.layout.split(","))):
        name, _, value = item.partition("=")
        if name not in FIELDS:
            raise UsageError(
                f"layout of {place} sets {name}, which is not for a file of settings: it may set "
                f"{', '.join(FIELDS)}; give the rest to start(layout=...)"
            )
        layout = layout.with_field(name, value, f"layout of {place}")
    return layout


def prepare_process(settings: Settings, device: torch.device) -> Callable[[], None]:
    """What holds for the whole process: attention kernels, search for convolutions, fused updates. The
    last is a hook, which what is returned takes away again."""
    import torch

    from ridgeline.parallel.tuned import prefer_attention

    prefer_attention(settings.tune.attention)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = settings.tune.search_convolutions
    if settings.tune.fused_optimizer:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        return register_optimizer_step_pre_hook(_fuse).remove
    return lambda: None


def _fuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before a step of torch's own optimizers: their one kernel, unless the script has chosen another."""
    import torch

    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        chosen = group.get("fused") is not None or group.get("foreach") is not None
        if chosen or group.get("differentiable") or group.get("capturable"):
            continue
        parameters = group["params"]
        if not all(p.device.type in ("cuda", "cpu") and p.is_floating_point() for p in parameters):
            continue
        group["fused"] = True
        group["foreach"] = False
        # As its constructor would have done it: the kernel divides by a scaler's factor itself.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        for parameter in parameters:
            done = optimizer.state.get(parameter, {}).get("step")
            if done is not None:  # from a checkpoint, where it was counted on the host
                optimizer.state[parameter]["step"] = torch.as_tensor(
                    done, dtype=torch.float32, device=parameter.device
                )


def prepare_model(model: nn.Module, layout: Layout, settings: Settings) -> None:
    """Autocast around the model's own forward, and the order of its memory."""
    import torch

    from ridgeline.parallel.precision import AUTOCAST

    if settings.channels_last:
        try:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        except RuntimeError as error:
            raise UsageError(
                f"channels_last is for 2-D convolutions, and {type(model).__name__} has others "
                f"({error}); leave it out"
            ) from error
    dtype = AUTOCAST.get(layout.precision)
    if dtype is not None:
        model.__class__ = _narrow_class(type(model), dtype)


@lru_cache(maxsize=64)
def _narrow_class(base: type[nn.Module], dtype: torch.dtype) -> type[nn.Module]:
    """The same class, computing under autocast; what leaves it is float32 again, because the loss is the
    script's own and may know nothing of narrow types."""
    import torch
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    from ridgeline.parallel.derived import derive_class
    from ridgeline.parallel.grouped import teach_autocast

    def widen(value: Tensor) -> Tensor:
        return value.float() if value.dtype is dtype else value

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        device = next((p.device.type for p in self.parameters()), "cpu")
        teach_autocast(device)
        with torch.autocast(device, dtype=dtype):
            out = base.forward(self, *args, **options)
        return widen(out) if isinstance(out, Tensor) else tree_map_only(Tensor, widen, out)

    return derive_class(base, forward, _narrow_class, dtype)
