"""How much a method costs in accuracy: the server's arithmetic simulated on held-out text.

Needs torch and transformers (and matplotlib for figures), never SGLang.
"""
