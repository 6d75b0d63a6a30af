"""Sources by name: the ones that ship, the user's own, and what is said when a name is wrong."""

import random
import sys
import textwrap

import numpy as np
import pytest
import torch

from ridgeline.data.build import build_sources
from ridgeline.data.source import DatasetSource
from ridgeline.errors import UsageError


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "my_own_data.py").write_text(
        textwrap.dedent(
            """
            import random
            import numpy as np
            import torch

            class Squares(torch.utils.data.Dataset):
                num_classes = 3
                def __init__(self, split, length=10, seed=None):
                    self.length = length if split == "train" else 4
                    self.seed = seed
                def __len__(self):
                    return self.length
                def __getitem__(self, i):
                    return torch.tensor([float(i), float(i) ** 2]), i % 3

            def noisy(split, *, scale):
                class Noisy(Squares):
                    def __getitem__(self, i):
                        noise = torch.rand(2) + np.random.rand() + random.random()
                        return noise * scale, np.zeros(2, dtype=np.float32)
                return Noisy(split)

            def dictionaries(split):
                return [{"x": torch.zeros(2)}]

            def stream(split):
                return iter(())

            def plain(): ...
            thing = 3
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_own_data"
    sys.modules.pop("my_own_data", None)


def test_own_dataset(own_module):
    train, held_out = build_sources(f"{own_module}:Squares", {"length": 6}, 11)
    assert (len(train), len(held_out)) == (6, 4)
    assert train.dataset.seed == 11
    inputs, targets = train.fetch(np.array([4, 2]), 0)
    assert inputs.tolist() == [[4, 16], [2, 4]]
    assert targets.tolist() == [1, 2]
    info = train.info
    assert (info.input_shape, info.target_shape, info.task) == ((2,), (), "classify")
    assert info.num_classes == 3


def test_own_randomness_is_a_function_of_the_sample(own_module):
    train, _ = build_sources(f"{own_module}:noisy", {"scale": 2.0}, 0)
    together = train.fetch(np.array([3, 1, 2]), 5)[0]
    torch.rand(3), np.random.rand(3), random.random()
    assert torch.equal(train.fetch(np.array([1]), 5)[0][0], together[1])
    assert not torch.equal(train.fetch(np.array([1]), 6)[0][0], together[1])
    assert not torch.equal(together[0], together[1])
    assert train.info.task == "forecast"


def test_reading_leaves_the_global_generators_alone(own_module):
    train, _ = build_sources(f"{own_module}:noisy", {"scale": 2.0}, 0)

    def draws(read):
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        if read:
            train.fetch(np.arange(4), 0)
        return torch.rand(1).item(), np.random.rand(), random.random()

    assert draws(read=True) == draws(read=False)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("digit", {}, "unknown source 'digit' in data.source; did you mean 'digits'"),
        ("no_such_module_here:f", {}, "there is no module 'no_such_module_here'"),
        ("{own}:Square", {}, "did you mean 'Squares'"),
        ("{own}:thing", {}, "not a function or class"),
        ("{own}:plain", {}, "takes no argument 'split'"),
        ("{own}:noisy", {}, "needs the argument 'scale'"),
        ("{own}:Squares", {"lenght": 3}, "no argument 'lenght'.*did you mean 'length'"),
        ("{own}:dictionaries", {}, "collate to dict"),
        ("{own}:stream", {}, "no __len__ and __getitem__"),
        ("digits", {"sise": 8}, r"source 'digits' has no argument 'sise' .*did you mean 'size'"),
        ("digits", {"seed": 8}, "no argument 'seed'"),
        ("digits", {"size": "big"}, "size='big' in data.args must be a whole number"),
        ("digits", {"channels": 2}, "channels=2 .* one of 1, 3"),
        ("digits", {"augment": 1}, "augment=1 .* true or false"),
        ("synthetic", {"shape": "x"}, "shape='x' .* list of sizes"),
        ("synthetic", {"shape": [3, 0]}, r"shape\[1\]=0"),
        ("synthetic", {"dtype": "float23"}, "dtype='float23' .* did you mean 'float3?"),
        ("synthetic", {"vocab": 9}, "vocab=9 .* no meaning for task='classify'"),
        ("synthetic", {"grid": 0}, "grid=0 .* at least 1"),
        ("synthetic", {"task": "causal_lm", "grid": 4}, "grid=4 .* no meaning for tokens"),
        ("synthetic", {"shape": [16], "grid": 4}, r"grid=4 .* inputs of shape \[16\]"),
        ("synthetic", {"task": "forecast", "classes": 9}, "classes=9 .* no meaning"),
    ],
)
def test_errors(own_module, name, args, message):
    with pytest.raises(UsageError, match=message):
        build_sources(name.replace("{own}", own_module), args, 0)


def test_an_empty_data_set_is_refused():
    with pytest.raises(UsageError, match="'empty' holds no samples"):
        DatasetSource([], name="empty")
