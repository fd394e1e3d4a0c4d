"""Plain-torch definitions of the write, decode and extend steps.

They define what is correct: the Triton kernels are tested against them in fp64, and the CPU server
runs them in fp32. Nothing here imports triton or sglang.
"""
