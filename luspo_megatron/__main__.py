"""``python -m luspo_megatron`` is the ``luspo`` command."""

from luspo_megatron.cli import command

command()
