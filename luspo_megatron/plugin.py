"""``module:attribute`` names: how a config names a person's own reward, prompt source, objective or engine.

A console script does not have the working directory on ``sys.path``; a module beside the config is what people mean,
so the working directory is tried too.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any

from luspo_megatron.errors import UserError

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_plugin_name(name: str) -> bool:
    """True for the form ``package.module:attribute``."""
    return _NAME.fullmatch(name) is not None


def load_plugin(name: str, what: str) -> Any:
    """The object that ``module:attribute`` names; ``what`` (a flag) is for the message.

    Raises UserError when the module or the attribute is missing. An error inside the module propagates with its
    traceback: that is the author's to see.
    """
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise
        raise UserError(
            f"{what}: cannot import {module_name!r} of {name!r}; put its folder on PYTHONPATH or run from that folder"
        ) from None
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise UserError(f"{what}: module {module_name!r} ({module.__file__}) has no attribute {attribute!r}") from None
