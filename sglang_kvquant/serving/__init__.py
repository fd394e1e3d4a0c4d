"""Serving inside SGLang: pool, windows, attention backend, weights, hooks."""
