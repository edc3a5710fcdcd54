import pytest
import torch

from fsdfm.model import Transformer, TransformerConfig
from fsdfm.model.bfloat16 import Bfloat16Linear
from fsdfm.model.filling import fill_network
from fsdfm.model.int8 import Int8Linear
from fsdfm.model.layers import Attention, Mlp

CONFIG = TransformerConfig(vocab_size=17, width=16, num_blocks=2, num_heads=2)


@pytest.mark.parametrize(("precision", "kind"), [("bfloat16", Bfloat16Linear), ("int8", Int8Linear)])
def test_every_product_of_a_block_is_small(precision, kind):
    """Weights that stay float32 write the same texts, in four times the memory."""
    weights = Transformer(CONFIG).state_dict()
    with torch.device("meta"):
        model = Transformer(CONFIG)
    fill_network(model, weights, precision)
    parts = [part for module in model.modules() if isinstance(module, Attention | Mlp) for part in module.children()]
    assert len(parts) == 8
    assert all(isinstance(part, kind) for part in (*parts, model.head))
