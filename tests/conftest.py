import torch
from hypothesis import settings

torch.set_num_threads(1)  # small tensors: threads only wait for each other
settings.register_profile("fsdfm", max_examples=40, deadline=None, derandomize=True)
settings.load_profile("fsdfm")
