"""``python -m luspo_megatron`` is the ``luspo`` command."""

import sys

from luspo_megatron.cli import main

sys.exit(main())
