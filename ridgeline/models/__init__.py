"""Single-device models, each an ordinary `nn.Module` in one file, and the table that names them.

`build_model("llama", size="1m")` builds one of ours, `build_model("my_module:MyModel")` anyone's.
"""

from ridgeline.models.build import MODELS, build_model

__all__ = ["MODELS", "build_model"]
