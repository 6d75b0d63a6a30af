"""Byte-level text: what is read, what is predicted, what is masked."""

import numpy as np
import pytest
import torch

from ridgeline.data.build import build_sources
from ridgeline.data.sources.text import IGNORED_TARGET, MASK_TOKEN
from ridgeline.errors import UsageError


def test_targets_are_the_next_bytes_of_the_file(tmp_path):
    data = bytes(np.random.default_rng(0).integers(0, 256, 4000, dtype=np.uint8))
    file = tmp_path / "data.bin"
    file.write_bytes(data)
    train, held_out = build_sources("text", {"path": str(file), "seq_len": 32}, 0)
    inputs, targets = train.fetch(np.arange(len(train)), 0)
    assert inputs.flatten().tolist() == list(data[: len(train) * 32])
    assert targets.flatten().tolist() == list(data[1 : len(train) * 32 + 1])
    inputs, _ = held_out.fetch(np.arange(len(held_out)), 0)
    assert inputs.flatten().tolist() == list(data[3800 : 3800 + len(held_out) * 32])


def test_folder_list_pattern_and_limit(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", "d.log"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(name[0 if "/" not in name else -5].encode() * 100)

    def head(args):
        train, _ = build_sources("text", {"seq_len": 2, **args}, 0)
        return bytes(train.fetch(np.arange(len(train)), 0)[0].flatten().tolist())

    folder = head({"path": str(tmp_path), "pattern": "**/*.txt"})
    assert folder.startswith(b"a" * 100 + b"b" * 100 + b"c")
    assert b"d" not in folder
    listed = head({"path": [str(tmp_path / "d.log"), str(tmp_path / "sub")]})
    assert listed.startswith(b"d" * 100 + b"c")
    assert len(head({"path": str(tmp_path), "max_bytes": 100})) == 94


def test_default_is_the_standard_library():
    train, held_out = build_sources("text", {}, 0)
    assert 8_000_000 - 256 <= (len(train) + len(held_out)) * 128 <= 8_000_000
    assert train.info.units_per_sample == 128


def test_masking_counts_and_rule():
    args = {"seq_len": 128, "max_bytes": 1_000_000, "task": "masked_lm"}
    masked, _ = build_sources("text", args, 0)
    plain, _ = build_sources("text", {**args, "task": "causal_lm"}, 0)
    indices = np.arange(1000)
    inputs, targets = masked.fetch(indices, 4)
    tokens = plain.fetch(indices, 4)[0]
    chosen = targets != IGNORED_TARGET
    assert (chosen.sum(1) == round(0.15 * 128)).all()
    assert torch.equal(targets[chosen], tokens[chosen])
    assert torch.equal(inputs[~chosen], tokens[~chosen])
    hidden = (inputs[chosen] == MASK_TOKEN).double().mean()
    kept = (inputs[chosen] == tokens[chosen]).double().mean()
    assert abs(hidden - 0.8) < 0.02
    assert abs(kept - 0.1) < 0.02
    # No position is favoured.
    assert chosen.double().mean(0).std() < 0.02
    assert masked.info.num_classes == 257


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"path": "/nowhere/at/all"}, "path '/nowhere/at/all' in data.args does not exist"),
        ({"path": 3}, "path=3 in data.args must be a file"),
        ({"seq_len": 0}, "seq_len=0 .* at least 1"),
        ({"seq_len": True}, "seq_len=True"),
        ({"task": "masked"}, "task='masked' .* did you mean 'masked_lm'"),
        ({"pattern": "/x"}, "pattern='/x'"),
        ({"max_bytes": 100}, "gives 100 bytes, too few"),
    ],
)
def test_errors(args, message):
    with pytest.raises(UsageError, match=message):
        build_sources("text", args, 0)


def test_empty_folder_and_short_file_are_named(tmp_path):
    with pytest.raises(UsageError, match=str(tmp_path)):
        build_sources("text", {"path": str(tmp_path)}, 0)
    file = tmp_path / "short.txt"
    file.write_text("too short")
    with pytest.raises(UsageError, match=r"short\.txt.*9 bytes"):
        build_sources("text", {"path": str(file)}, 0)
    file.write_text("")
    with pytest.raises(UsageError, match=r"short\.txt.*0 bytes"):
        build_sources("text", {"path": str(file)}, 0)
