import signal

import torch
from hypothesis import settings

torch.set_num_threads(1)  # small tensors: threads only wait for each other
settings.register_profile("fsdfm", max_examples=40, deadline=None, derandomize=True)
settings.load_profile("fsdfm")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell that starts us in the background says so, also to
    signal.signal(signal.SIGINT, signal.default_int_handler)  # all our children; tests press Ctrl-C
