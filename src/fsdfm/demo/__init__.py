"""What the embedded models do and how well: one page, and the model cards.

Reading order: stories (what is made, live), stored (what was made and measured before), page (HTML), report (the one
call that writes the folder), card (the measured part of a model card).
"""

from fsdfm.demo.card import write_card
from fsdfm.demo.report import measured_fragment, write_demo

__all__ = ["measured_fragment", "write_card", "write_demo"]
