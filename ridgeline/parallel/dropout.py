"""Keyed dropout in modules that have never heard of it: finding it, and what it is replaced by.

Dropout modules get another forward; functions (`F.dropout`, the dropout of attention, stochastic depth)
are caught as they are called, in models that call any. The numbers come from `random.py`. Called by
`apply.py` before any other technique.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ridgeline.errors import UsageError
from ridgeline.parallel.random import Node, Randomness, _ranges, keyed_bits, keyed_dropout

_PLAIN = (Tensor, nn.Parameter, FunctionalTensor)
"""Also what stands for a plain tensor while torch traces."""

# Functions that a module calls: (randomness, the function, its arguments) -> its result.


def _num_mask_dims(call: Any, num_dims: int) -> int:
    """Leading dims with a mask of their own: all, or those of batch and channels, where a tensor of
    one dim less is a single sample."""
    if call is F.dropout:
        return num_dims
    return 1 if num_dims == {F.dropout1d: 2, F.dropout3d: 4}.get(call) else 2


def _dropout(
    randomness: Randomness,
    call: Any,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    **dims: Any,
) -> Tensor:
    if not training or p == 0.0:
        return input
    if type(input) not in (*_PLAIN, DTensor) and randomness.shapes is None:
        # A type of a technique's own, which knows its parts, and calls `keyed_dropout` with them.
        return call(input, p, training, inplace)
    dims["num_dims"] = _num_mask_dims(call, input.dim())
    site, learnt = randomness.next_site(), randomness.sample_dim_of(input.shape)
    if randomness.shapes is not None:
        return input
    if learnt is not None:
        dims.setdefault("sample_dim", learnt)
    return keyed_dropout(input, p, randomness, site, inplace=inplace, **dims)


def _attention(
    randomness: Randomness,
    call: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    options.update(attn_mask=attn_mask, is_causal=is_causal)
    if dropout_p == 0.0:
        return call(query, key, value, **options)
    site = randomness.next_site()
    if randomness.shapes is not None:
        return call(query, key, value, **options)
    return randomness.attention(query, key, value, dropout_p, randomness, site, **options)


def _rebuild_attention(randomness: Randomness) -> Callable[..., Any]:
    """`F.multi_head_attention_forward` that calls keyed dropout. A mode is off while it handles a
    function, so that what that one calls is not seen; its code runs with other functions instead."""
    code = F.multi_head_attention_forward
    attention = functools.partial(_attention, randomness, F.scaled_dot_product_attention)
    names = {
        **vars(F),
        "has_torch_function": lambda *_: False,
        "dropout": functools.partial(_dropout, randomness, F.dropout, sample_dim=0),
        "scaled_dot_product_attention": attention,
    }
    del names["__name__"]  # by which the compiler would look the others up in torch's own module
    return FunctionType(code.__code__, names, code.__name__, code.__defaults__)


def _uniform(randomness: Randomness, shape: Sequence[int], dtype: Any, device: Any) -> Tensor:
    """As many bits as the type holds, so that 1 never comes out."""
    num_bits = {torch.float64: 53, torch.float32: 24, torch.float16: 11}.get(dtype, 8)
    keys, site = randomness.keys.on(device), randomness.next_site()
    learnt = randomness.sample_dim_of(shape)
    if randomness.shapes is not None:
        return torch.ones(shape, dtype=dtype, device=device)
    if learnt is not None:
        keys = replace(keys, sample_dim=learnt)
    bits = keyed_bits(shape, keys, site, _ranges(shape, None, device))
    return ((bits >> (64 - num_bits)) & (2**num_bits - 1)).to(dtype) * 2.0**-num_bits


def _rand(randomness: Randomness, call: Any, *size: Any, **like: Any) -> Tensor:
    shape = size[0] if size and isinstance(size[0], Sequence) else size
    if set(like) - {"dtype", "device"} or not shape:
        return call(*size, **like)
    default = torch.empty((), **like)
    return _uniform(randomness, tuple(shape), default.dtype, default.device)


def _bernoulli_(
    randomness: Randomness, call: Any, input: Tensor, p: Any = 0.5, **given: Any
) -> Tensor:
    if given or (type(input) not in _PLAIN and randomness.shapes is None):
        return call(input, p, **given)
    return input.copy_(_uniform(randomness, input.shape, torch.float64, input.device) < p)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), _dropout),
    F.scaled_dot_product_attention: _attention,
    torch.rand: _rand,
    Tensor.bernoulli_: _bernoulli_,
}


class _Functional(TorchFunctionMode):
    """Keys the random functions that modules call while it is entered."""

    def __init__(self, randomness: Randomness) -> None:
        super().__init__()
        self.randomness = randomness
        self.multi_head_attention = _rebuild_attention(randomness)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            return self.multi_head_attention(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is None:
            return func(*args, **kwargs)
        return handler(self.randomness, func, *args, **kwargs)


# Changing a model.


@dataclass(frozen=True)
class KeyedDropout:
    """What `apply_keyed_dropout` did, by the paths of modules."""

    modules: tuple[str, ...] = ()
    """Dropout modules that are keyed."""
    watched: tuple[str, ...] = ()
    """Modules that call, or seem to call, random functions, which is why all calls are watched."""
    left_alone: tuple[str, ...] = ()
    """Random modules that are not keyed: their results depend on the layout."""


_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_checkpoint_wrapped_module|_orig_mod)(?:\.|$)")
_RANDOM_NAMES = {"dropout", "dropout1d", "dropout2d", "dropout3d", "drop_path", "bernoulli_"}


def _function_of(module: nn.Module) -> Callable[..., Any] | None:
    """The function that a dropout module is; None for others, and for one with a forward of its own."""
    for name in ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d"):
        if type(module).forward is getattr(nn, name).forward:
            return getattr(F, name.lower())
    return None


def _is_left_alone(module: nn.Module) -> bool:
    if isinstance(module, nn.AlphaDropout | nn.FeatureAlphaDropout):
        return module.p > 0
    return isinstance(module, nn.RNNBase) and module.dropout > 0


def _seems_random(module: nn.Module) -> bool:
    """Whether a module may call a random function itself, as far as can be seen without running it:
    by a rate among its attributes or in its config, or by a name in the code of its class."""
    kind = type(module)
    if isinstance(module, nn.RNNBase) or _function_of(module):
        return False
    for holder in (module, getattr(module, "config", None)):
        for name, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
            if "drop" in name.lower() and isinstance(value, float) and 0.0 < value <= 1.0:
                return True
    if re.search("stochastic_?depth|drop_?path", kind.__name__, re.IGNORECASE):
        return True
    functions = [f for f in vars(kind).values() if isinstance(f, FunctionType)]
    names = {name for function in functions for name in _names_in(function.__code__)}
    if kind.__module__.startswith("torch.nn."):
        return False
    if any(not hasattr(module, name) for name in names & _RANDOM_NAMES):
        return True
    if "scaled_dot_product_attention" not in names:
        return False
    if any(_function_of(child) and child.p > 0 for child in module.children()):
        return True  # to which it may give that rate
    rates = [v for n, v in vars(module).items() if n == "p" or "drop" in n.lower()]
    # It names the argument, and no rate of its own says that there is none.
    is_given = any(_gives_rate(function.__code__) for function in functions)
    return is_given and not (rates and all(rate in (0, False, None) for rate in rates))


def _gives_rate(code: CodeType) -> bool:
    """Whether some call in it names `dropout_p`; a call's keywords are a tuple among the constants."""
    return any(
        _gives_rate(value) if isinstance(value, CodeType) else "dropout_p" in value
        for value in code.co_consts
        if isinstance(value, CodeType | tuple)
    )


def _names_in(code: CodeType) -> set[str]:
    """Names that code uses, with those of functions inside of it."""
    inner = [_names_in(value) for value in code.co_consts if isinstance(value, CodeType)]
    return set(code.co_names).union(*inner)


def _dropout_forward(self: Any, input: Tensor) -> Tensor:
    if not self.training or self.p == 0.0:
        return input
    with self._keyed.running():
        call = _function_of(self)
        return _dropout(self._keyed.randomness, call, input, self.p, True, self.inplace)


def _tracked_forward(module: nn.Module) -> Callable[..., Any]:
    """The module's forward, which says that it is running."""
    patched = vars(module).get("forward")
    original = getattr(patched, "__func__", patched) or type(module).forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        node: Node = self._keyed
        with node.running(), node.randomness.watching(node.functional and self.training):
            if patched is not None:
                return patched(*args, **kwargs)
            return original(self, *args, **kwargs)

    return forward


def _attach(model: nn.Module, randomness: Randomness, keyed: list[str], watches: bool) -> None:
    nodes: dict[str, Node] = {}
    for path, module in model.named_modules():
        if not _needs_node(path, module, keyed, watches):
            continue
        parents = ["", *(path[:i] for i, letter in enumerate(path) if letter == ".")]
        parent = next((nodes[p] for p in reversed(parents) if p in nodes), None)
        functional = watches and path not in keyed
        name = _WRAPPERS.sub("", path)
        nodes[path] = module._keyed = Node(randomness, name, parent, functional)
        if path in keyed:
            module.forward = MethodType(_dropout_forward, module)
        elif not isinstance(module, nn.ModuleList | nn.ModuleDict):
            module.forward = MethodType(_tracked_forward(module), module)
    randomness._nodes += nodes.values()
    if watches and randomness._mode is None:
        randomness._mode = _Functional(randomness)


def _needs_node(path: str, module: nn.Module, keyed: list[str], watches: bool) -> bool:
    """Dropout, what holds it, and where functions are watched all but torch's own single layers."""
    if path in keyed or (keyed and not path) or any(k.startswith(f"{path}.") for k in keyed):
        return True
    torch_layer = type(module).__module__.startswith("torch.nn.") and not list(module.children())
    return watches and (not torch_layer or _seems_random(module))


def keyed_modules(model: nn.Module) -> list[str]:
    """Paths of the dropout modules that drop anything."""
    return [path for path, m in model.named_modules() if _function_of(m) and m.p > 0]


def seems_to_drop(model: nn.Module) -> bool:
    """Whether there is dropout in `model`, as far as can be seen without running it."""
    return bool(keyed_modules(model)) or any(_seems_random(m) for m in model.modules())


def watch_shapes(model: nn.Module, randomness: Randomness) -> None:
    """Have `model`, a copy that is run only to be watched, note the shapes of all it would drop."""
    randomness.shapes = {}
    _attach(model, randomness, keyed_modules(model), True)
    model.train()


def _calls_random(model: nn.Module, keyed: list[str], example_inputs: Any) -> bool:
    """Run a copy of the model once, in training, so that nothing of the model itself has seen it."""
    model = copy.deepcopy(model)
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    if any(p.is_meta for p in model.parameters()):  # no weights yet, so no numbers either
        example_inputs = tree_map_only(Tensor, lambda x: x.to("meta"), example_inputs)
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    randomness = Randomness(0)
    _attach(model, randomness, keyed, True)
    model.train()
    with torch.random.fork_rng(devices), torch.no_grad():
        _ = model(**args[0]) if isinstance(args[0], dict) else model(*args)
    return randomness.drawn


def apply_keyed_dropout(
    model: nn.Module, randomness: Randomness, example_inputs: Any = None
) -> KeyedDropout:
    """Let all dropout in `model` be a function of `randomness`; a model without any is not touched.

    Dropout modules are found as they are. Functions (`F.dropout`, the dropout of attention, stochastic
    depth) are seen only as they run: with `example_inputs` (a tuple of arguments, a dict of them, or
    one) the model runs once to know whether it calls any; without, it is judged by its attributes,
    config and code, and a rate that is written in none of them is missed. Watching for functions costs
    microseconds a torch function, so a model that only has modules is better given an example.
    """
    modules = dict(model.named_modules())
    again = [path or "the model" for path, module in modules.items() if "_keyed" in vars(module)]
    if again:
        raise UsageError(f"{again[0]!r} is keyed already; apply it once, to the whole model")
    keyed = keyed_modules(model)
    left = [path for path, module in modules.items() if _is_left_alone(module)]
    watched = [path for path, module in modules.items() if _seems_random(module)]
    if example_inputs is not None:
        watched = (watched or [""]) if _calls_random(model, keyed, example_inputs) else []
    _attach(model, randomness, keyed, bool(watched))
    return KeyedDropout(tuple(keyed), tuple(watched), tuple(left))
