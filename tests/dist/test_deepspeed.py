"""Scripts written for DeepSpeed: what DeepSpeed itself computes of them, and what one device does."""

from __future__ import annotations

import importlib.util
import json
from argparse import ArgumentParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import ridgeline.compat.deepspeed as deepspeed
from ridgeline.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env

GOLDEN = Path(__file__).parents[1] / "golden"
THEIRS = json.loads((GOLDEN / "deepspeed.json").read_text())


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "deepspeed_script", GOLDEN / "deepspeed_script.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(case: str) -> dict[str, Any]:
    env = read_rank_env()
    module = script()
    return module.train(deepspeed, module.CASES[case], env.rank, env.world_size)


@pytest.mark.parametrize("case", THEIRS)
def test_computes_what_deepspeed_does(ranks: Any, case: str) -> None:
    theirs, ours = THEIRS[case], ranks(2, run, case)[0]
    loose = case == "in 16 bits"  # it casts the model, and autocast its products
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=2e-3 if loose else 1e-5)
    assert ours["rates"] == pytest.approx(theirs["rates"], rel=1e-12)
    for mine, its in zip(ours["norms"], theirs["norms"], strict=True):
        if mine is not None and its is not None:
            assert mine == pytest.approx(its, rel=2e-2 if loose else 1e-4)


def test_all_cases_have_figures_of_deepspeed() -> None:
    assert list(THEIRS) == list(script().CASES)


SAMPLES = 20


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3)))
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.blocks(x)))


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(4, (SAMPLES,), generator=generator))


def layers() -> deepspeed.PipelineModule:
    spec = deepspeed.LayerSpec
    torch.manual_seed(5)
    return deepspeed.PipelineModule(
        layers=[
            deepspeed.TiedLayerSpec("in", nn.Linear, 6, 6, bias=False),
            spec(nn.Linear, 6, 6), torch.tanh, spec(nn.LayerNorm, 6), spec(nn.Linear, 6, 6), nn.GELU(),
            deepspeed.TiedLayerSpec(
                "in", nn.Linear, 6, 6, bias=False, forward_fn=lambda layer, x: x @ layer.weight
            ),
            spec(nn.Linear, 6, 4),
        ],
        num_stages=2, loss_fn=nn.CrossEntropyLoss(),
    )  # fmt: skip


CONFIG = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
}


def trained(config: dict[str, Any], steps: int, folder: str, how: str = "") -> dict[str, Any]:
    """So many steps in all, going on from what is in `folder`, and saved there."""
    torch.manual_seed(4)
    model = layers().double() if how == "stages" else Net().double()
    engine, optimizer, loader, _schedule = deepspeed.initialize(
        model=model, training_data=samples(), config=CONFIG | config, loss_fn=F.cross_entropy
    )
    path, client = engine.load_checkpoint(folder)
    assert (path is None) == (client == {})
    batches = iter(deepspeed.utils.RepeatingLoader(loader))
    for _ in range(engine.micro_steps):  # the data are the script's to find again
        next(batches)
    losses = []
    while engine.global_steps < steps:
        if how == "stages":
            losses.append(float(engine.train_batch(batches)))
            continue
        total = 0.0
        for number in range(engine.gradient_accumulation_steps()):
            x, y = next(batches)
            loss = F.cross_entropy(engine(x), y)
            engine.backward(loss)
            assert engine.is_gradient_accumulation_boundary() == (number == 1)
            engine.step()
            total += float(loss.detach()) / 2
        losses.append(total)
    engine.save_checkpoint(folder, client_state={"losses": losses, "tensor": torch.ones(2)})
    engine.save_16bit_model(folder)
    return {
        "client": client, "layout": engine.layout, "rate": engine.get_lr(), "steps": engine.global_steps,
        "samples": engine.global_samples, "optimizer": type(optimizer).__name__,
    }  # fmt: skip


def weights(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "pytorch_model.bin", weights_only=True)


def compare(
    ranks: Any, tmp_path: Path, configs: list[tuple[dict[str, Any], str]], size: int
) -> list[Any]:
    """Two steps, and two more, each in a layout, against four on one device."""
    alone = tmp_path / "one"
    trained({}, 4, str(alone))
    found = [
        ranks(size, trained, config, 2 + 2 * number, str(tmp_path / "many"), how)[0]
        for number, (config, how) in enumerate(configs)
    ]
    expected, got = weights(alone), weights(tmp_path / "many")
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-9, msg=name)
    return found


def test_goes_on_in_another_layout_as_on_one_device(ranks: Any, tmp_path: Path) -> None:
    first = {"zero_optimization": {"stage": 1}, "ridgeline": {"layout": "recompute=full"}}
    second = {"tensor_parallel": {"autotp_size": 2}}
    a, b = compare(ranks, tmp_path, [(first, ""), (second, "")], 2)
    assert a["layout"] == "dp=2,zero=1,recompute=full,accumulate=2"
    assert b["layout"] == "tp=2,accumulate=2"
    assert (a["client"], b["steps"], b["samples"]) == ({}, 4, 32)
    assert len(b["client"]["losses"]) == 2
    assert torch.equal(b["client"]["tensor"], torch.ones(2))
    assert b["optimizer"] == "AdamW"


def test_stages_with_tied_layers_are_the_layers_one_after_the_other(
    ranks: Any, tmp_path: Path
) -> None:
    ranks(2, trained, {}, 4, str(tmp_path / "two"), "stages")
    ranks(4, trained, {"zero_optimization": {"stage": 2}}, 4, str(tmp_path / "four"), "stages")
    model = layers().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    rates = [0.0, 0.0, 0.01 * 0.6309297535714574, 0.01]
    for rate, picked in zip(rates, order(), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        x, y = samples()[picked]
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
    for folder in ("two", "four"):
        found = weights(tmp_path / folder)
        assert torch.equal(found["0.weight"], found["6.module.weight"])
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


def order() -> list[Any]:
    """The samples of the first four steps, whatever the layout."""
    from ridgeline.data.order import plan_epoch

    plans = [p for epoch in range(2) for p in plan_epoch(SAMPLES, 8, 0, 1, 5, epoch)]
    return [torch.from_numpy(plan.parts[0]) for plan in plans[:4]]


class Own(nn.Module):
    """Takes its targets."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop = Net(), nn.Dropout(0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.drop(self.net(x)), y)


def test_a_model_that_takes_its_targets_needs_no_example() -> None:
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    engine, _, loader, _ = deepspeed.initialize(
        model=Own().double(), training_data=samples(), config=config
    )
    before = engine.get_lr(), weights_of(engine)
    for x, y in loader:
        engine.zero_grad()
        engine.backward(engine(x, y))
        engine.step()
    assert engine.global_steps == 5
    assert not torch.equal(weights_of(engine), before[1])
    with pytest.raises(AttributeError, match="deepspeed's engine has no 'cur_scale'"):
        _ = engine.cur_scale
    with pytest.raises(UsageError, match="no forward pass went through engine"):
        engine.backward(engine.module(*samples()[0:4]))


def weights_of(engine: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in engine.module.parameters()])


def test_what_scripts_import_is_there() -> None:
    parser = deepspeed.add_config_arguments(ArgumentParser())
    assert parser.parse_args(["--deepspeed", "--deepspeed_config", "x"]).deepspeed_config == "x"
    layer = nn.Linear(2, 2)
    with deepspeed.zero.Init(), deepspeed.zero.GatheredParameters(list(layer.parameters())):
        x = torch.ones(1, 2, requires_grad=True)
        assert torch.equal(deepspeed.checkpointing.checkpoint(layer, x), layer(x))
    accelerator = deepspeed.get_accelerator()
    assert accelerator.device_name() in ("cpu", "cuda")
    assert deepspeed.comm.get_world_size() == 1
    assert isinstance(FusedAdam(layer.parameters()), torch.optim.AdamW)
    assert not isinstance(DeepSpeedCPUAdam(layer.parameters(), adamw_mode=False), torch.optim.AdamW)
    with pytest.raises(UsageError, match="`ridgeline export`"):
        _ = deepspeed.init_inference
    assert not hasattr(deepspeed, "init_inference")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = deepspeed.nothing


def refuse(what: str, folder: str) -> None:
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    model: nn.Module = nn.Linear(2, 2)
    if what == "no config":
        deepspeed.initialize(model=model)
    if what == "optimizer":
        deepspeed.initialize(model=model, config={"train_batch_size": 2})
    if what == "unknown optimizer":
        deepspeed.initialize(model=model, config=config | {"optimizer": {"type": "Best"}})
    if what == "1-bit":
        deepspeed.initialize(model=model, config=config | {"optimizer": {"type": "OneBitAdam"}})
    if what == "parameter":
        wrong = {"type": "AdamW", "params": {"rate": 1}}
        deepspeed.initialize(model=model, config=config | {"optimizer": wrong})
    if what == "schedule":
        deepspeed.initialize(model=model, config=config | {"scheduler": {"type": "WarmUpLR"}})
    if what == "schedule's parameter":
        wrong = {"type": "WarmupLR", "params": {"warmup_steps": 3}}
        deepspeed.initialize(model=model, config=config | {"scheduler": wrong})
    if what == "layers":
        deepspeed.PipelineModule(layers=[nn.Linear(2, 2), 3], num_stages=1)
    engine, _, _, _ = deepspeed.initialize(model=model, config=config)
    if what == "client":
        engine.save_checkpoint(folder, client_state={"parser": ArgumentParser()})
    if what == "theirs":
        (Path(folder) / "global_step5").mkdir(parents=True)
        (Path(folder) / "global_step5" / "mp_rank_00_model_states.pt").touch()
        engine.load_checkpoint(folder, "global_step5")
    if what == "tag":
        engine.load_checkpoint(folder, "other")
    if what == "data":
        engine.train_batch()
    if what == "frozen":
        engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    if what == "frozen model":
        engine.save_16bit_model(folder, exclude_frozen_parameters=True)
    if what == "sampler":
        engine.deepspeed_io(samples(), data_sampler=range(SAMPLES))
    if what == "logits":
        engine.eval_batch(iter([]), compute_loss=False)
    if what == "graph":
        engine.backward(torch.zeros(()), retain_graph=True)
    if what == "compile":
        engine.compile()
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("no config", "has no configuration; give config="),
        ("optimizer", "has no optimizer: give optimizer="),
        ("unknown optimizer", "type=Best .* is not known"),
        ("1-bit", "powersgd"),
        ("parameter", "optimizer.params of AdamW"),
        ("schedule", "did you mean 'WarmupLR'"),
        ("schedule's parameter", "did you mean 'warmup_num_steps'"),
        ("layers", "layer 1 of a PipelineModule is a int"),
        ("client", "holds a ArgumentParser; give plain data"),
        ("theirs", "zero_to_fp32"),
        ("tag", "no checkpoint in .*other"),
        ("data", "has no data"),
        ("compile", "comes too late"),
        ("frozen", r"exclude_frozen_parameters=\.\.\.\) is not here"),
        ("frozen model", r"save_16bit_model\(exclude_frozen"),
        ("sampler", r"data_sampler=\.\.\.\) is not here; use a DataLoader"),
        ("logits", r"compute_loss=\.\.\.\) is not here"),
        ("graph", r"retain_graph=\.\.\.\) is not here"),
    ],
)
def test_refusals(what: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=text):
        refuse(what, str(tmp_path / "saved"))
