"""``python -m sglang_kvquant`` is the same as ``sglang-kvquant``."""

import sys

from .cli import main

sys.exit(main())
