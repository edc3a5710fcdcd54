import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # small tensors: threads only wait for each other
settings.register_profile("fsdfm", max_examples=40, deadline=None, derandomize=True)
settings.load_profile("fsdfm")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell that starts us in the background says so, also to
    signal.signal(signal.SIGINT, signal.default_int_handler)  # all our children; tests press Ctrl-C


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Scores that are kept for the next evaluation belong to this run of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDFM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
