"""A layout into a recipe's file: of the recipe's batch, one that can be started, and no other line touched.

Called by `ridgeline plan --write`.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from ridgeline.config import load_config
from ridgeline.errors import RunError, UsageError
from ridgeline.layout import Layout
from ridgeline.plan.auto import runnable
from ridgeline.plan.kinds import Model
from ridgeline.plan.recipe import recipe_model
from ridgeline.plan.search import Found, Planned


def require_batch(path: Path, batch: int) -> None:
    """A layout is of a batch: of another than the recipe's it may not even divide."""
    if path.is_file() and (own := load_config(path, []).config.train.batch) != batch:
        raise UsageError(
            f"--batch {batch} is not the batch of {path}, which is {own}, and --write puts the layout "
            "there; leave --batch out, or change train.batch first"
        )


def require_model(path: Path, name: str, model: Model) -> None:
    """A layout is of a model as well."""
    if not path.is_file() or Path(name) == path:
        return
    config = load_config(path, []).config
    if config.model.name != "llama":
        return  # its size is known only where it is built, which is where it starts
    own = recipe_model(config)
    if own.num_parameters != model.num_parameters:
        raise UsageError(
            f"the model of {path} has {own.num_parameters:,} parameters and {name} "
            f"{model.num_parameters:,}, and --write puts the layout there; plan {path} itself"
        )


def startable(found: Found, path: Path) -> Planned:
    """The best that this release can also start with the recipe's model."""
    best = runnable(found) if path.is_file() else found.best[0]
    if best is None:
        raise RunError(
            f"none of the {len(found.best)} layouts shown can be started with the tied weights of {path}; "
            "ask for more with --top"
        )
    return best


def write_layout(path: Path, layout: Layout) -> str:
    """Replace or add `layout` of a recipe, and leave every other line as it is; what was done."""
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text)
        lines = text.splitlines()
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        for key, value in reversed(pairs):
            if key.value == "layout":
                last = value.end_mark.line + (value.end_mark.column > 0)
                lines[key.start_mark.line : max(last, key.start_mark.line + 1)] = []
        aside = path.with_name(f".{path.name}.part.yaml")
        try:
            aside.write_text("\n".join([*lines, f"layout: {layout}"]) + "\n", encoding="utf-8")
            load_config(aside, [])
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot write {path} of --write ({error.strerror}); name a recipe"
        ) from error
    except (UsageError, yaml.YAMLError) as error:
        raise RunError(
            f"{path} of --write stays as it is: {' '.join(str(error).split())}"
        ) from error
    return f"layout written to {path}"
