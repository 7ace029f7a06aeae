"""luspo_megatron: RLVR training of large MoE models with LUSPO on Megatron-core shards.

`from luspo_megatron import Config, load, train` is the Python interface (api.py). Its imports wait until it is asked
for: this file is also read inside engines, whose environments lack the packages that it needs. No module of the
package may bear one of these names: importing it would put the module in the place of the function.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from luspo_megatron.api import Config as Config
    from luspo_megatron.api import RunResult as RunResult
    from luspo_megatron.api import load as load
    from luspo_megatron.api import train as train

__version__ = "0.1.0"

_API = ("Config", "RunResult", "load", "train")


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from luspo_megatron import api

    return getattr(api, name)
