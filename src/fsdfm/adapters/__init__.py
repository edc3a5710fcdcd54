"""Where other programs meet ours; each file needs its own package and is imported by nobody but its user.

`lm_eval` lets the lm-evaluation-harness ask our models, `diffusers` runs our denoisers under its schedulers, `onnx`
writes a model that needs no PyTorch, `portable` is what then samples from it, with numpy alone.
"""
