"""Subcommands of ``sglang-kvquant``, one module each, listed in ``sglang_kvquant.cli``."""
