"""Everything that touches SGLang: flags, refusals, pool, windows, attention backend, metrics."""
